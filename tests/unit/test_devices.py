"""What a task computes on, decided without a GPU at hand."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfdist import devices
from tfdist.cluster import Task
from tfdist.errors import StrategyError

TASKS = [Task("worker", 0), Task("worker", 1)]


@pytest.mark.parametrize(
    ("wanted", "gpus", "way"),
    [
        ("auto", ["", ""], "host"),
        ("auto", ["a/0/H100", "a/1/H100"], "nccl"),
        ("auto", ["a/0/H100", "b/0/H100"], "nccl"),
        ("auto", ["a/0/H100", "a/0/H100"], "host"),  # NCCL hangs where two tasks share a GPU
        ("auto", ["a/0/H100", ""], "host"),
        ("host", ["a/0/H100", "b/0/H100"], "host"),
        ("ring", ["", ""], "ring"),
        ("nccl", ["a/0/H100", "b/0/H100"], "nccl"),
    ],
)
def test_gradients_go_through_nccl_where_every_task_has_a_gpu_of_its_own(wanted, gpus, way):
    assert devices.choose_communication(wanted, TASKS, gpus) == way


@pytest.mark.parametrize("gpus", [["", ""], ["a/0/H100", ""], ["a/0/H100", "a/0/H100"]])
def test_nccl_without_a_gpu_for_each_names_what_each_task_has(gpus):
    with pytest.raises(StrategyError, match=r"needs a GPU of its own in every task \(worker 0: .*worker 1: "):
        devices.choose_communication("nccl", TASKS, gpus)


def test_the_first_two_tasks_that_share_a_gpu_are_named(caplog):
    with caplog.at_level("INFO", "tfdist"):
        assert devices.choose_communication("auto", [*TASKS, Task("worker", 2)], ["a/1", "a/0", "a/0"]) == "host"
    assert "not go through NCCL: worker 1 and worker 2 share a/0" in caplog.text


# What a task that sees these GPUs does: a function of their names alone.


@pytest.mark.parametrize(
    ("gpus", "several", "device"),
    [
        ([], False, "/CPU:0"),
        ([], True, "/CPU:0"),
        (["GPU:0"], True, "/GPU:0"),
        (["GPU:1"], True, "/GPU:0"),  # the one that the script has left visible is TensorFlow's first
        (["GPU:0"], False, "/GPU:0"),
    ],
)
def test_a_task_computes_on_the_one_gpu_that_it_sees(gpus, several, device):
    assert devices.choose_device(gpus, several=several, environ={}) == (device, "")


def test_a_task_alone_with_several_gpus_is_told_how_to_use_all():
    device, advice = devices.choose_device(["GPU:0", "GPU:1"], several=False, environ={}, script="my.py")
    assert device == "/GPU:0"
    assert advice == "this task computes on one of the 2 GPUs that it sees; to use all: python -m tfdist.run my.py"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, ["one task per GPU", "on every host", ": python -m tfdist.run my.py.", "CUDA_VISIBLE_DEVICES=0 for the"]),
        ({"TFDIST_RUN_DIR": "/x"}, ["/dev/nvidia*", ": CUDA_VISIBLE_DEVICES=0,1,2 python -m tfdist.run my.py"]),
    ],
)
def test_one_of_several_tasks_that_sees_several_gpus_is_refused_with_the_command(environ, words):
    gpus = ["GPU:0", "GPU:1", "GPU:2"]
    with pytest.raises(StrategyError) as caught:
        devices.choose_device(gpus, several=True, environ=environ, script="my.py")
    assert "sees 3 GPUs (GPU:0, GPU:1, GPU:2)" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


# What TensorFlow is told.


@pytest.fixture
def gpus(monkeypatch):
    """Lets TensorFlow believe in GPUs that are not there; what it says to settings on them is its own."""
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    context = sys.modules["tensorflow.python.eager.context"]

    def report(count: int) -> list[tf.config.PhysicalDevice]:
        names = [b"/physical_device:CPU:0", *(f"/physical_device:GPU:{i}".encode() for i in range(count))]
        monkeypatch.setattr(context.pywrap_tfe, "TF_ListPhysicalDevices", lambda: names)
        monkeypatch.setattr(context, "_context", context.Context())
        monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: {"device_name": "H100"})
        return tf.config.list_physical_devices("GPU")

    return report


@pytest.fixture
def started(monkeypatch):
    """Lets TensorFlow believe that it has started."""

    def start() -> None:
        monkeypatch.setattr(sys.modules["tensorflow.python.eager.context"].context(), "_context_handle", object())

    return start


growth = tf.config.experimental.get_memory_growth


@pytest.mark.parametrize(
    ("count", "several", "device"), [(0, True, "/CPU:0"), (1, True, "/GPU:0"), (3, False, "/GPU:0")]
)
def test_memory_of_each_gpu_grows_as_needed(count, several, device, gpus):
    found = gpus(count)
    assert devices.configure(several) == device
    assert [growth(gpu) for gpu in found] == [True] * count


@pytest.mark.parametrize("choice", [True, False])
def test_what_the_user_has_said_of_memory_stays_and_holds_for_all_gpus(choice, gpus):
    found = gpus(2)
    tf.config.experimental.set_memory_growth(found[1], choice)
    devices.configure(several=False)
    assert [growth(gpu) for gpu in found] == [choice, choice]


@pytest.mark.parametrize("text", ["true", "false"])
def test_the_users_variable_for_memory_is_left_to_tensorflow(text, gpus, monkeypatch):
    (gpu,) = gpus(1)
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", text)
    devices.configure(several=True)
    assert growth(gpu) is None


def test_a_memory_limit_of_the_user_stays(gpus):
    (gpu,) = gpus(1)
    limit = tf.config.LogicalDeviceConfiguration(memory_limit=1024)
    tf.config.set_logical_device_configuration(gpu, [limit])
    assert devices.configure(several=True) == "/GPU:0"
    assert tf.config.get_logical_device_configuration(gpu) == [limit]


def test_a_tensorflow_that_has_started_keeps_its_memory_and_the_user_is_told(gpus, started, caplog):
    gpus(1)
    started()
    assert devices.configure(several=False) == "/GPU:0"
    assert "takes nearly all memory of GPU:0 at once" in caplog.text
    assert "TF_FORCE_GPU_ALLOW_GROWTH=true" in caplog.text


def test_a_tensorflow_that_has_started_with_growing_memory_is_no_trouble(gpus, started, caplog):
    (gpu,) = gpus(1)
    tf.config.experimental.set_memory_growth(gpu, True)
    started()
    devices.configure(several=False)
    assert caplog.text == ""


def test_the_gpu_that_the_script_chose_is_the_one(gpus):
    found = gpus(4)
    tf.config.set_visible_devices(found[2], "GPU")
    assert devices.configure(several=True) == "/GPU:0"
    assert [growth(gpu) for gpu in found] == [None, None, True, None]
    assert devices.server_config().gpu_options.visible_device_list == "2"


def test_several_gpus_are_refused_before_anything_is_set(gpus):
    found = gpus(2)
    with pytest.raises(StrategyError, match="sees 2 GPUs"):
        devices.configure(several=True)
    assert [growth(gpu) for gpu in found] == [None, None]


def test_a_task_alone_is_told_of_its_other_gpus_once(gpus, caplog, monkeypatch):
    monkeypatch.setattr(devices, "_said", set())
    gpus(2)
    devices.configure(several=False)
    devices.configure(several=False)
    assert caplog.text.count("one of the 2 GPUs") == 1


def test_a_task_that_does_not_compute_leaves_all_gpus_alone(gpus):
    gpus(2)
    assert devices.configure(several=True, computes=False) == "/CPU:0"
    assert tf.config.get_visible_devices("GPU") == []
    assert devices.server_config().device_count["GPU"] == 0


def test_a_server_of_tensorflows_lets_memory_grow_as_well(gpus):
    gpus(1)
    devices.configure(several=True)
    options = devices.server_config().gpu_options
    assert (options.visible_device_list, options.allow_growth) == ("0", True)


# By what name tasks know that they share a GPU.

DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* One GPU, in the slot that the variable names. */
int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int *device, int ordinal) {
    const char *visible = getenv("FAKE_SLOT");
    if (ordinal > 0) return 101;
    *device = 1000 + (visible ? atoi(visible) : 10);
    return 0;
}
int cuDeviceGetPCIBusId(char *text, int length, int device) {
    if (length < 13) return 1;
    snprintf(text, length, "0000:%02d:00.0", device - 1000);
    return 0;
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A library with the three functions of CUDA's driver that are called."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "cuda.c").write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "cuda.so", folder / "cuda.c"], check=True, timeout=60)
    return ctypes.CDLL(str(folder / "cuda.so"))


def identities(driver, monkeypatch, seen):
    names = []
    for environ, host, system in seen:
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            patch.setattr("platform.node", lambda host=host: host)
            patch.setattr(devices, "BOOT_ID", str(system))
            names.append(devices.identity(driver))
    return names


@pytest.mark.parametrize(
    ("first", "second", "is_shared"),
    [
        # One GPU under two names; one name for two GPUs (each container has its own 0); two GPUs.
        ({"CUDA_VISIBLE_DEVICES": "0", "FAKE_SLOT": "10"}, {"CUDA_VISIBLE_DEVICES": "GPU-89", "FAKE_SLOT": "10"}, True),
        ({"CUDA_VISIBLE_DEVICES": "0", "FAKE_SLOT": "10"}, {"CUDA_VISIBLE_DEVICES": "0", "FAKE_SLOT": "20"}, False),
        ({"CUDA_VISIBLE_DEVICES": "0", "FAKE_SLOT": "10"}, {"CUDA_VISIBLE_DEVICES": "1", "FAKE_SLOT": "20"}, False),
        (
            {"CUDA_VISIBLE_DEVICES": "MIG-1", "FAKE_SLOT": "10"},
            {"CUDA_VISIBLE_DEVICES": "MIG-2", "FAKE_SLOT": "10"},
            True,
        ),
    ],
)
def test_tasks_of_one_host_share_a_gpu_where_its_slot_is_the_same(
    first, second, is_shared, driver, gpus, monkeypatch, tmp_path
):
    gpus(1)
    system = tmp_path / "boot_id"
    system.write_text("6f0c2d1e-8b7a-4d5c-9a3e-0123456789ab\n")
    # Containers have names of their own.
    one, other = identities(driver, monkeypatch, [(first, "box-1", system), (second, "box-2", system)])
    assert (one == other) is is_shared
    assert one == "H100 0000:10:00.0 of system 6f0c2d1e-8b7a"


def test_hosts_of_one_name_do_not_share_a_gpu(driver, gpus, monkeypatch, tmp_path):
    gpus(1)
    for i in range(2):
        (tmp_path / str(i)).write_text(f"{i}f0c2d1e-8b7a-4d5c-9a3e-0123456789ab\n")
    one, other = identities(driver, monkeypatch, [({}, "localhost", tmp_path / str(i)) for i in range(2)])
    assert one != other


@pytest.mark.parametrize("driver_error", ["no library", "no function", "an error code"])
def test_without_a_word_of_the_driver_the_visible_gpu_counts(driver_error, gpus, monkeypatch):
    silent = {
        "no library": None,
        "no function": SimpleNamespace(),
        "an error code": SimpleNamespace(cuInit=lambda flags: 100),
    }[driver_error]
    if silent is None:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    gpus(1)
    names = set()
    for visible in ("0", "1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        names.add(devices.identity(silent))
    assert len(names) == 2


def test_a_task_without_a_gpu_has_no_name_for_one(gpus):
    gpus(0)
    assert devices.identity() == ""
