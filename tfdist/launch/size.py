"""Flags, GPUs and TF_CONFIG -> how many tasks run here, and of which cluster.

neither a number nor a TF_CONFIG        a worker for each GPU, or one
--workers, --ps, --chief, --evaluator   a cluster of this host alone
a TF_CONFIG with one entry per host     this host's share of that cluster
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist import tf_config
from tfdist.cluster import TFConfig
from tfdist.errors import LaunchError, TfdistError
from tfdist.launch import machine
from tfdist.launch.share import Share, default_tasks_per_host, split


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line says of the number of tasks.

    Attributes:
        workers: A number, "gpu" for one per GPU, "auto" for the same and one without a GPU, or None for nothing.
        tasks_per_host: The same for each host of TF_CONFIG.
        ps: Number of parameter servers.
        chief: Whether a chief trains beside the workers.
        evaluator: Whether a task beside the cluster evaluates its checkpoints.
    """

    workers: int | str | None = None
    tasks_per_host: int | str | None = None
    ps: int = 0
    chief: bool = False
    evaluator: bool = False

    @property
    def own_cluster(self) -> str | None:
        """The first flag that asks for a cluster of this host alone."""
        flags = {
            "--workers": self.workers is not None,
            "--ps": self.ps != 0,
            "--chief": self.chief,
            "--evaluator": self.evaluator,
        }
        return next((flag for flag, is_given in flags.items() if is_given), None)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How many tasks of each job run in a cluster of this host, or its share of a larger one."""

    workers: int = 1
    ps: int = 0
    chief: bool = False
    share: Share | None = None


def size_of_run(asked: Asked, environ: Mapping[str, str]) -> Size:
    """Returns which tasks are to run on this host.

    Args:
        asked: What the command line says.
        environ: Where TF_CONFIG and CUDA_VISIBLE_DEVICES are.

    Raises:
        LaunchError: The flags, the GPUs and TF_CONFIG do not go together.
    """
    if asked.workers is not None and asked.tasks_per_host is not None:
        raise LaunchError(
            f"--workers {asked.workers} and --tasks-per-host {asked.tasks_per_host} both say how many tasks run here: "
            "give one of them"
        )
    gpus = len(machine.gpus(environ))
    config = _config_of_host(asked, environ)
    if config is not None:
        count = _number(asked.tasks_per_host, "--tasks-per-host", gpus)
        return Size(share=split(config, count or default_tasks_per_host(config, gpus)))
    flag = "--workers" if asked.tasks_per_host is None else "--tasks-per-host"
    number = asked.workers if asked.tasks_per_host is None else asked.tasks_per_host
    if number is None and asked.ps:
        raise LaunchError(f"--ps {asked.ps} needs workers: add --workers N")
    # They have a GPU as well; a chief that coordinates has none.
    others = ["the chief"] * (asked.chief and not asked.ps) + ["the evaluator"] * asked.evaluator
    workers = _number(number, flag, gpus, others=others) or max(1, gpus - len(others))
    return Size(workers=workers, ps=asked.ps, chief=asked.chief)


def _number(asked: int | str | None, flag: str, gpus: int, *, others: Sequence[str] = ()) -> int | None:
    """Returns the number that a flag asks for; None leaves it to the default, one for each GPU or one."""
    if isinstance(asked, int):
        if asked < 1:
            raise LaunchError(f"{flag} must be at least 1, not {asked}")
        return asked
    if asked == "gpu" and gpus <= len(others):
        takers = f"{' and '.join(others)} take{'s' * (len(others) == 1)}"
        found = f"{'are' if gpus > 1 else 'is'} {gpus} GPU{'s' * (gpus > 1)}, which {takers}," if gpus else "is no GPU"
        raise LaunchError(
            f"{flag} gpu: there {found} in CUDA_VISIBLE_DEVICES or as /dev/nvidia*; give a number, {flag} 2, or "
            "name the GPUs, CUDA_VISIBLE_DEVICES=0,1"
        )
    return None


def _config_of_host(asked: Asked, environ: Mapping[str, str]) -> TFConfig | None:
    """Returns what TF_CONFIG says of this host, or None where there is to be a cluster of this host alone."""
    # Inside a task of another run it is that task's.
    text = None if environ.get("TFDIST_RUN_DIR") else environ.get("TF_CONFIG")
    flag = asked.own_cluster
    try:
        config = tf_config.parse(text)
    except TfdistError as error:
        if flag is not None:
            return None  # it is replaced, and the tasks never see it
        raise LaunchError(str(error)) from None
    if flag is None or config is None:
        return config
    if len(config.cluster.tasks) > 1:
        # Each host would train apart, and nobody would notice.
        raise LaunchError(
            f"TF_CONFIG names a cluster of {config.cluster.counts}, and {flag} asks for another one on this host "
            "alone: leave out --workers, --ps, --chief and --evaluator to start this host's share of it "
            "(--tasks-per-host K says how many tasks that is), or unset TF_CONFIG"
            + ("; its evaluator is a task of its own, with a TF_CONFIG that says so" if asked.evaluator else "")
        )
    return None
