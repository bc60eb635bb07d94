"""Processors, GPUs and out-of-memory kills, as the system's files tell."""

from __future__ import annotations

import os

import pytest

from tfdist.errors import LaunchError
from tfdist.launch import machine


@pytest.mark.parametrize(
    ("text", "limit"), [("max 100000", None), ("100000 100000", 1), ("50000 100000\n", 1), ("", None), ("odd", None)]
)
def test_a_containers_limit_counts(tmp_path, text, limit):
    (tmp_path / "cpu.max").write_text(text)
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert machine.processors(str(tmp_path)) == min(mine, limit or mine)


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("", ()),
        ("-1", ()),
        ("0", ("0",)),
        ("2,3", ("2", "3")),
        ("0,-1,1", ("0",)),
        ("NoDevFiles", ()),
        ("none", ()),
        ("1, ,2", ("1",)),
        ("1,", ("1",)),
        ("MIG-GPU-8932f937-d72c/7/0", ("MIG-GPU-8932f937-d72c/7/0",)),
        ("GPU-8932f937, MIG-1", ("GPU-8932f937", "MIG-1")),
    ],
)
def test_gpus_are_those_that_cuda_would_see(visible, gpus):
    assert machine.gpus({"CUDA_VISIBLE_DEVICES": visible}) == gpus


def test_a_gpu_named_twice_which_cuda_takes_for_none_at_all_is_refused():
    with pytest.raises(LaunchError, match="'0,1,0' names the GPU 0 twice"):
        machine.gpus({"CUDA_VISIBLE_DEVICES": "0,1,0"})


def test_without_a_choice_all_devices_count(tmp_path):
    for name in ("nvidia3", "nvidia12", "nvidiactl", "nvidia-uvm"):  # a container may have any two
        (tmp_path / name).touch()
    assert machine.gpus({}, str(tmp_path / "nvidia[0-9]*")) == ("0", "1")


def test_out_of_memory_kills_are_counted_where_the_system_tells(tmp_path):
    assert machine.out_of_memory_kills(str(tmp_path)) is None
    (tmp_path / "memory.events").write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert machine.out_of_memory_kills(str(tmp_path)) == 3
