"""Which lines of TensorFlow's are left out: lines as TensorFlow 2.21 wrote them."""

from __future__ import annotations

import pytest

from tfdist.launch.noise import NoiseFilter

NOISE = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1796061556.847052    5383 port.cc:153] oneDNN custom operations are on.",
    "I0000 00:00:1796061556.849548    5383 cudart_stub.cc:31] Could not find cuda drivers on your machine",
    "To enable the following instructions: AVX2 AVX512F FMA, in other operations, rebuild TensorFlow",
    "E0000 00:00:1796061562.368303    5383 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error (303)",
    "I0000 00:00:1796061562.502086    5452 coordination_service.cc:505] Example stragglers:",
    "/job:worker/replica:0/task:0",
    "W0000 00:00:1796064272.540015   22129 local_rendezvous.cc:412] Local rendezvous is aborting with status: "
    "INVALID_ARGUMENT: pyfunc_1 returns 0 values, but expects to see 4 values.",
    "\t [[{{node PyFunc}}]]",
    "I0000 00:00:1796061562.501995    5452 coordination_service.h:529] /job:worker/replica:0/task:1 has connected",
    "W0000 00:00:1796061562.826812    5384 dataset.cc:997] Input of GeneratorDatasetOp::Dataset will not be optimized",
    "2024-03-01 12:00:00.123456: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow binary is",
    "2024-03-01 12:00:00.123456: E external/local_xla/xla/stream_executor/cuda/cuda_dnn.cc:9261] "
    "Unable to register cuDNN factory: Attempting to register factory for plugin cuDNN",
    "W0000 00:00:1796096000.123456   22129 context.cc:1503] Ignoring an error encountered when deleting remote tensors "
    "handles: INVALID_ARGUMENT: Unable to find the relevant tensor remote_handle",
    "I1130 17:49:01.123456 140 grpc_server_lib.cc:467] Started server with target: grpc://127.0.0.1:47285",
]
WORDS = [
    "",
    "loss 0.5",
    "I have 2 cats",
    "I1130 17:49:01.123456 140737353 train.py:12] epoch 3",  # absl's Python logger: the script's own words
    "E0000 00:00:1796061562.368303    5383 executor.cc:52] out of coffee",
    "W0000 00:00:1796061562.368303    5383 cpu_allocator_impl.cc:83] Allocation of 1e9 exceeds 10% of free memory",
    "F0000 00:00:1796061562.368303    5383 tensor.cc:52] Check failed: a == b",
    "Traceback (most recent call last):",
    "UserWarning: failed call to cuInit",
]


@pytest.mark.parametrize("line", NOISE)
def test_start_up_noise_is_left_out(line):
    assert NoiseFilter()(line.encode())


@pytest.mark.parametrize("line", WORDS)
def test_words_are_kept(line):
    assert not NoiseFilter()(line.encode())


def test_info_is_kept_for_one_who_asked_for_a_level():
    is_noise = NoiseFilter(keep_info=True)
    assert not is_noise(NOISE[1].encode())
    assert is_noise(NOISE[0].encode())


def test_a_protocol_buffer_goes_with_its_message_and_like_lines_without_one_stay():
    is_noise = NoiseFilter()
    proto = [b"device_count {", b'  key: "CPU"', b"  value: 1", b"}", b"allow_soft_placement: true", b""]
    head = b"I0000 00:00:1796063222.971161   29536 eager_service_impl.cc:355] SessionOptions: goo.gle/debugonly   "
    assert [is_noise(line) for line in [b"value: 1", head, *proto]] == [False, True, *[True] * len(proto)]
    assert not is_noise(b"loss: 0.5 at step 3")
    assert not is_noise(b"value: 1")


def test_what_is_said_of_a_lost_worker_at_every_function_goes_and_other_errors_of_grpc_stay():
    more = [
        b"Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling /x/Y:",
        b':UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"recvmsg:Connection reset by peer"}',
        b"This could happen if the remote target has been disconnected from the client.",
    ]
    registered = b"E0000 00:00:1796095489.159239   105 context.cc:873] Failed to register function remotely due to x"
    failed = b"ERROR:tensorflow:Worker /job:worker/replica:0/task:1 failed with UnavailableError():recvmsg: reset"
    is_noise = NoiseFilter()
    assert all(is_noise(line) for line in [registered, *more, failed, *more[:2]])
    assert not is_noise(b"loss 0.5")
    assert not any(is_noise(line) for line in more)
