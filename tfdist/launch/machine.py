"""What this machine lends us: processors, GPUs, and whether its kernel killed something for want of memory."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping

CGROUP = "/sys/fs/cgroup"


def processors(cgroup: str = CGROUP) -> int:
    """Returns how many processors this process may use at once: its affinity, less a container's limit."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(os.path.join(cgroup, "cpu.max")).partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        count = min(count, max(1, round(int(quota) / int(period))))
    return count


def gpus(environ: Mapping[str, str], pattern: str = "/dev/nvidia[0-9]*") -> tuple[str, ...]:
    """Returns the GPUs that this process may use, named as CUDA_VISIBLE_DEVICES names them."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        numbers = sorted(int(match[0]) for path in glob.glob(pattern) if (match := re.search(r"\d+$", path)))
        return tuple(str(i) for i in range(len(numbers)))
    names = [name.strip() for name in visible.split(",")]
    # CUDA ignores what follows the first name that is none, such as -1.
    return tuple(names[: next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))])


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
