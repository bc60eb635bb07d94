"""The one place that decides devices: what a task computes on, and how gradients cross tasks because of it.

A task drives one device, as in torchrun and Horovod: a host with k GPUs runs k tasks.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence

import tensorflow as tf

from tfdist.cluster import Task
from tfdist.errors import StrategyError

WAYS = {"host": "sockets of the hosts", "nccl": "NCCL", "ring": "TensorFlow's ring"}


def configure(several: bool) -> str:
    """Returns the name of this task's device, whose memory then grows as it is needed.

    Raises:
        StrategyError: One of several tasks sees more than one GPU.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if several and len(gpus) > 1:
        raise StrategyError(
            f"this task sees {len(gpus)} GPUs, and a task drives one; start one task per GPU: "
            f"python -m tfdist.run --workers {len(gpus)} {sys.argv[0] or 'train.py'}, or give each task its own "
            "CUDA_VISIBLE_DEVICES"
        )
    for gpu in gpus:
        # TensorFlow otherwise takes all memory of a GPU, also of one that it shares.
        tf.config.experimental.set_memory_growth(gpu, True)
    return "/GPU:0" if gpus else "/CPU:0"


def identity() -> str:
    """Returns a name of this task's GPU by which tasks that share one can tell; empty without a GPU."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return ""
    details = tf.config.experimental.get_device_details(gpus[0])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    return f"{platform.node()}/{visible}/{details.get('device_name', 'GPU')}"


def choose_communication(wanted: str, tasks: Sequence[Task], gpus: Sequence[str]) -> str:
    """Returns "host", "nccl" or "ring": how gradients cross tasks.

    It is the same on every task, since every task knows the GPU of each. NCCL hangs where two tasks share a GPU.

    Args:
        wanted: One of these, or "auto".
        tasks: The training tasks.
        gpus: `identity()` of each.

    Raises:
        StrategyError: NCCL is wanted, and not every task has a GPU of its own.
    """
    own_gpu_each = all(gpus) and len(set(gpus)) == len(gpus)
    if wanted == "nccl" and not own_gpu_each:
        described = ", ".join(f"{task}: {gpu or 'no GPU'}" for task, gpu in zip(tasks, gpus, strict=True))
        raise StrategyError(
            f"communication='nccl' needs a GPU of its own in every task ({described}); use communication='auto'"
        )
    if wanted != "auto":
        return wanted
    return "nccl" if own_gpu_each else "host"
