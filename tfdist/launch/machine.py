"""What this machine lends us: processors, GPUs, and whether its kernel killed something for want of memory."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Mapping

from tfdist.errors import LaunchError

CGROUP = "/sys/fs/cgroup"
_GPU_NAME = re.compile(r"[0-9]+|(GPU|MIG)-[\w/-]+")


def processors(cgroup: str = CGROUP) -> int:
    """Returns how many processors this process may use at once: its affinity, less a container's limit."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(os.path.join(cgroup, "cpu.max")).partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        count = min(count, max(1, round(int(quota) / int(period))))
    return count


def gpus(environ: Mapping[str, str], pattern: str = "/dev/nvidia[0-9]*") -> tuple[str, ...]:
    """Returns the GPUs that this process may use, named as CUDA_VISIBLE_DEVICES names them.

    Names are numbers, UUIDs (GPU-8932f937) or slices of a GPU (MIG-1c3bb1c9), each of which one task can have.
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables

    Raises:
        LaunchError: A GPU is named twice; CUDA would then find none, and tasks would train on CPUs without a word.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        # Whatever their numbers, for which a container may have picked some of a host's: CUDA counts from 0.
        return tuple(str(i) for i in range(len(glob.glob(pattern))))
    # CUDA takes no notice of what follows the first name that is none, such as -1 or NoDevFiles.
    names = tuple(itertools.takewhile(_GPU_NAME.fullmatch, (name.strip() for name in visible.split(","))))
    for name in names:
        if names.count(name) > 1:
            raise LaunchError(
                f"CUDA_VISIBLE_DEVICES={visible!r} names the GPU {name} twice, and CUDA finds none then: name it once "
                "(tasks that are more than the GPUs share them)"
            )
    return names


class MemoryWatch:
    """Says whether the kernel has killed a process of this container for want of memory since it was last asked."""

    def __init__(self) -> None:
        self._seen = out_of_memory_kills()

    def has_killed(self) -> bool:
        """Returns whether it has; false where the kernel does not tell."""
        before, self._seen = self._seen, out_of_memory_kills()
        return before is not None and self._seen is not None and self._seen > before


def out_of_memory_kills(cgroup: str = CGROUP) -> int | None:
    """Returns how often the kernel has killed a process of this container for want of memory, where it tells."""
    match = re.search(r"^oom_kill (\d+)$", _read(os.path.join(cgroup, "memory.events")), re.MULTILINE)
    return int(match[1]) if match else None


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
