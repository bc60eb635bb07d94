"""Frozen values: which tasks there are, where they listen, which of them we are.

Synopsis:

    cluster = Cluster({"worker": ("10.0.0.1:2222", "10.0.0.2:2222")})
    config = TFConfig(cluster, Task("worker", 1))
    config.is_chief            # False
    cluster.training_tasks     # (Task("worker", 0), Task("worker", 1))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tfdist.errors import ClusterError

JOBS = ("chief", "worker", "ps", "evaluator")


@dataclass(frozen=True, order=True)
class Task:
    """One process of a cluster, named by its job and its index in it."""

    type: str
    index: int

    def __str__(self) -> str:
        return f"{self.type} {self.index}"


@dataclass(frozen=True)
class Cluster:
    """Addresses of all tasks, by job; the evaluator stands outside."""

    jobs: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "jobs", MappingProxyType({job: tuple(a) for job, a in self.jobs.items()}))

    @property
    def has_ps(self) -> bool:
        return bool(self.jobs.get("ps"))

    @property
    def training_tasks(self) -> tuple[Task, ...]:
        """The tasks that compute gradients, chief first: MWMS' own order (with ps, the workers alone)."""
        jobs = ("worker",) if self.has_ps else ("chief", "worker")
        return tuple(Task(job, i) for job in jobs for i in range(len(self.jobs.get(job, ()))))

    @property
    def chief(self) -> Task:
        """The task that writes files: `chief`, or worker 0 where there is none."""
        return Task("chief", 0) if self.jobs.get("chief") else Task("worker", 0)

    def address(self, task: Task) -> str:
        try:
            return self.jobs[task.type][task.index]
        except (KeyError, IndexError):
            raise ClusterError(f"{task} is not in the cluster") from None


@dataclass(frozen=True)
class TFConfig:
    """What TF_CONFIG says: the cluster and which task of it this process is."""

    cluster: Cluster
    task: Task
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_chief(self) -> bool:
        return self.task == self.cluster.chief
