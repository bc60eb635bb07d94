"""What a task computes on, decided without a GPU at hand."""

from __future__ import annotations

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


@pytest.fixture
def gpus(monkeypatch):
    """Lets TensorFlow report GPUs that are not there; returns whose memory was told to grow."""
    grown: list[str] = []

    def report(count: int) -> list[str]:
        found = [f"GPU:{i}" for i in range(count)]
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: found if kind == "GPU" else [])
        monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda gpu, on: grown.append(gpu))
        details = {"device_name": "H100"}
        monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: details)
        return grown

    return report


@pytest.mark.parametrize(
    ("count", "several", "device"), [(0, True, "/CPU:0"), (1, True, "/GPU:0"), (3, False, "/GPU:0")]
)
def test_memory_of_each_gpu_grows_as_needed(count, several, device, gpus):
    grown = gpus(count)
    assert devices.configure(several) == device
    assert grown == [f"GPU:{i}" for i in range(count)]


def test_one_of_several_tasks_with_two_gpus_is_refused_with_the_command(gpus):
    gpus(2)
    with pytest.raises(StrategyError, match=r"sees 2 GPUs.*tfdist\.run --workers 2"):
        devices.configure(several=True)


def test_the_identity_tells_gpus_of_one_host_apart(gpus, monkeypatch):
    gpus(1)
    names = set()
    for visible in ("0", "1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        names.add(devices.identity())
    assert len(names) == 2
    gpus(0)
    assert devices.identity() == ""
