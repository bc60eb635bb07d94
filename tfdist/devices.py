"""The one place that decides devices: what a task computes on, and how gradients cross tasks because of it.

A task drives one device, as in torchrun and Horovod: a host with k GPUs runs k tasks.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.cluster import Task
from tfdist.errors import StrategyError

logger = logging.getLogger(__name__)

WAYS = {"host": "sockets of the hosts", "nccl": "NCCL", "ring": "TensorFlow's ring"}
# The same in all containers of a host, another one on every host and after every start of it.
BOOT_ID = "/proc/sys/kernel/random/boot_id"

_said: set[str] = set()


def configure(several: bool, *, computes: bool = True) -> str:
    """Returns the name of this task's device, whose memory then grows as it is needed.

    Args:
        several: Whether this is one of several tasks.
        computes: Whether the task computes; a parameter server does not, and leaves GPUs to those that do.

    Raises:
        StrategyError: One of several tasks sees more than one GPU.
    """
    # Those that the script has left visible: `tf.config.set_visible_devices` may have chosen one.
    gpus = tf.config.get_visible_devices("GPU")
    if not computes:
        _hide(gpus)
        return "/CPU:0"
    names = [gpu.name.rpartition("physical_device:")[2] for gpu in gpus]
    device, advice = choose_device(names, several=several, environ=os.environ, script=_script())
    if advice and advice not in _said:
        _said.add(advice)
        logger.warning("%s", advice)
    _let_memory_grow(gpus)
    return device


def choose_device(
    gpus: Sequence[str], *, several: bool, environ: Mapping[str, str], script: str = ""
) -> tuple[str, str]:
    """Returns the device of a task that sees these GPUs, and what to tell its user ("" for nothing).

    Args:
        gpus: Names of the GPUs, such as "GPU:0".
        several: Whether the task is one of several.
        environ: The task's environment.
        script: What the user runs.

    Raises:
        StrategyError: One of several tasks sees more than one GPU.

    Example:
        >>> choose_device(["GPU:0"], several=True, environ={})
        ('/GPU:0', '')
    """
    if not gpus:
        return "/CPU:0", ""
    if len(gpus) == 1:
        return "/GPU:0", ""
    command = f"python -m tfdist.run {script or 'train.py'}"
    if not several:
        return "/GPU:0", f"this task computes on one of the {len(gpus)} GPUs that it sees; to use all: {command}"
    sees = f"this task sees {len(gpus)} GPUs ({', '.join(gpus)}), and a task drives one"
    numbers = ",".join(str(i) for i in range(len(gpus)))
    if environ.get("TFDIST_RUN_DIR"):
        raise StrategyError(
            f"{sees}. The launcher gives each task one of those that CUDA_VISIBLE_DEVICES or /dev/nvidia* names, where "
            f"the script leaves it so; name them: CUDA_VISIBLE_DEVICES={numbers} {command}"
        )
    raise StrategyError(
        f"{sees}. Start one task per GPU, which this does, on every host with the TF_CONFIG that it has: {command}. "
        "Or, where TF_CONFIG has an entry for each GPU already, give each task its own: CUDA_VISIBLE_DEVICES=0 for the "
        "first, 1 for the second"
    )


def _script() -> str:
    # A notebook's kernel, or what Python calls its own prompt and -c, is nothing that the user wrote.
    return sys.argv[0] if sys.argv[0].endswith(".py") and "ipykernel" not in sys.argv[0] else ""


def _hide(gpus: Sequence[Any]) -> None:
    try:
        if gpus:
            tf.config.set_visible_devices([], "GPU")
    except RuntimeError:
        logger.warning("TensorFlow has started already, and this task, which computes nothing, keeps its GPUs")


def _let_memory_grow(gpus: Sequence[Any]) -> None:
    """Keeps TensorFlow from taking all memory of GPUs, also of those that tasks share, where the user said nothing."""
    if os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH"):
        return  # TensorFlow goes by it, whatever it is told
    chosen = [tf.config.experimental.get_memory_growth(gpu) for gpu in gpus]
    # It has to be the same for all visible GPUs.
    grow = next((choice for choice in chosen if choice is not None), True)
    for gpu in gpus:
        try:
            tf.config.experimental.set_memory_growth(gpu, grow)
        except ValueError:
            return  # the user has set up logical devices, each with a limit of its own
        except RuntimeError:
            logger.warning(
                "TensorFlow has started already, and takes nearly all memory of %s at once: call "
                "tfdist.create_strategy() before anything else of TensorFlow, or set TF_FORCE_GPU_ALLOW_GROWTH=true",
                gpu.name.rpartition("physical_device:")[2],
            )
            return


def server_config() -> tf.compat.v1.ConfigProto:
    """Returns what `tf.config` says of GPUs as a `tf.distribute.Server` takes it, which does not ask there itself."""
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return tf.compat.v1.ConfigProto(device_count={"GPU": 0})
    numbers = ",".join(str(_number(gpu)) for gpu in gpus)
    grows = bool(tf.config.experimental.get_memory_growth(gpus[0]))
    options = tf.compat.v1.GPUOptions(visible_device_list=numbers, allow_growth=grows)
    return tf.compat.v1.ConfigProto(gpu_options=options)


def identity(cuda: Any = None) -> str:
    """Returns a name of this task's GPU by which tasks that share one can tell; empty without a GPU.

    It names the slot of the GPU and the running system, so that neither the many ways to write CUDA_VISIBLE_DEVICES nor
    containers and hosts of equal or different names hide or feign a shared GPU. Slices (MIG) of one GPU have one name,
    for NCCL does not go between them.

    Args:
        cuda: CUDA's driver library; by default the one of this machine.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return ""
    details = tf.config.experimental.get_device_details(gpus[0])
    slot = _slot(_number(gpus[0]), cuda)
    if not slot:
        slot = f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}[{_number(gpus[0])}]"
    return f"{details.get('device_name', 'GPU')} {slot} of system {_system()}"


def _number(gpu: Any) -> int:
    return int(gpu.name.rpartition(":")[2])


def _slot(number: int, cuda: Any) -> str:
    """Returns the PCI address of CUDA's device, or "" where the driver does not tell."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1") if cuda is None else cuda
        device, address = ctypes.c_int(), ctypes.create_string_buffer(64)
        is_known = (
            cuda.cuInit(0) == 0
            and cuda.cuDeviceGet(ctypes.byref(device), number) == 0
            and cuda.cuDeviceGetPCIBusId(address, len(address), device) == 0
        )
    except (OSError, AttributeError):
        return ""
    return address.value.decode("ascii", "replace").lower() if is_known else ""


def _system() -> str:
    try:
        with open(BOOT_ID, encoding="ascii") as file:
            return file.read().strip()[:13] or platform.node()
    except OSError:
        return platform.node()


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
    if wanted == "auto" and any(gpus) and not own_gpu_each:
        logger.info("gradients do not go through NCCL: %s", _why_not(tasks, gpus))
    if wanted != "auto":
        return wanted
    return "nccl" if own_gpu_each else "host"


def _why_not(tasks: Sequence[Task], gpus: Sequence[str]) -> str:
    first = {gpu: task for task, gpu in zip(reversed(tasks), reversed(gpus), strict=True)}
    for task, gpu in zip(tasks, gpus, strict=True):
        if not gpu:
            return f"{task} has no GPU"
        if first[gpu] != task:
            return f"{first[gpu]} and {task} share {gpu}"
    return "each task has a GPU of its own"
