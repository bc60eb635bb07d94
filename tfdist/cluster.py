"""Frozen values: which tasks there are, where they listen, which of them we are.

Synopsis:

    cluster = Cluster({"worker": ("10.0.0.1:2222", "10.0.0.2:2222")})
    config = TFConfig(cluster, Task("worker", 1))
    config.is_chief            # False
    config.training_index      # 1
    cluster.training_tasks     # (Task("worker", 0), Task("worker", 1))

Every value is checked when it is made, so a `Cluster` that exists can be used. What a strategy asks beyond that
(a chief and a worker beside ps tasks, say) is in `tfdist.tf_config.validate_for`. The values hold no sockets and are
not pickled: between processes they travel as TF_CONFIG text.
"""

from __future__ import annotations

import ipaddress
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from tfdist.errors import ClusterError

JOBS = ("chief", "worker", "ps", "evaluator")

# The evaluator reads checkpoints and talks to nobody: a strategy that finds it in the cluster waits for a server
# which it never starts.
_JOBS_INSIDE = ("chief", "worker", "ps")

# Underscores are no part of DNS names, but Docker's container names have them and resolve.
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_NUMBERS_AND_DOTS = re.compile(r"[0-9.]+")
_VERTEX_POOLS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": "evaluator"}

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 120
_BRIEF.maxlevel = 3


@dataclass(frozen=True, order=True)
class Task:
    """One process of a cluster, named by its job and its index in it.

    Example:
        >>> print(tfdist.Task("worker", 1))
        worker 1
    """

    type: str
    index: int

    def __post_init__(self) -> None:
        check_job(self.type)
        # True is an int to Python, and a slip to everybody else.
        if not isinstance(self.index, int) or isinstance(self.index, bool):
            raise ClusterError(f"{self.type} has index {shown(self.index)}: give a whole number, counted from 0")
        if self.index < 0:
            raise ClusterError(f"{self.type} has index {shown(self.index)}: indexes count from 0")
        if self.type in ("chief", "evaluator") and self.index > 0:
            raise ClusterError(
                f"{self.type} {shown(self.index)}: a job has at most one {self.type}, and its index is 0"
            )

    def __str__(self) -> str:
        return f"{self.type} {self.index}"


@dataclass(frozen=True, repr=False)
class Cluster:
    """Addresses of all tasks, by job in the order chief, worker, ps; the evaluator stands outside.

    Raises:
        ClusterError: An unknown job, an address that is not `host:port`, two tasks at one address, more than one
            chief, or nobody who trains.

    Example:
        >>> cluster = tfdist.Cluster({"worker": ["host1:2222", "host2:2222"]})
        >>> cluster.training_tasks
        (Task(type='worker', index=0), Task(type='worker', index=1))
        >>> cluster.address(cluster.chief)
        'host1:2222'
    """

    jobs: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        jobs = _in_order(self.jobs)
        _check_addresses(jobs)
        object.__setattr__(self, "jobs", MappingProxyType(jobs))

    def __hash__(self) -> int:
        return hash(tuple(self.jobs.items()))

    def __repr__(self) -> str:
        return f"Cluster({dict(self.jobs)!r})"

    def __str__(self) -> str:
        """All addresses of a small cluster, the first few of a large one."""
        return "; ".join(f"{job} {_some(addresses)}" for job, addresses in self.jobs.items())

    @property
    def has_ps(self) -> bool:
        return bool(self.jobs.get("ps"))

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """Every task: chief, workers, ps."""
        return tuple(Task(job, index) for job, addresses in self.jobs.items() for index in range(len(addresses)))

    @cached_property
    def training_tasks(self) -> tuple[Task, ...]:
        """The tasks that compute gradients, chief first: MWMS' own order (with ps, the workers alone)."""
        return tuple(Task(job, i) for job in self._training_jobs for i in range(len(self.jobs.get(job, ()))))

    @property
    def num_training_tasks(self) -> int:
        return sum(len(self.jobs.get(job, ())) for job in self._training_jobs)

    @property
    def chief(self) -> Task:
        """The task that writes files: `chief`, or worker 0 where there is none."""
        return Task("chief", 0) if self.jobs.get("chief") else Task("worker", 0)

    def address(self, task: Task) -> str:
        """The `host:port` of one task."""
        try:
            return self.jobs[task.type][task.index]
        except (KeyError, IndexError):
            raise ClusterError(f"{task.type} {shown(task.index)} is not in the cluster: it has {self.counts}") from None

    @property
    def counts(self) -> str:
        """How many tasks there are, in words: "1 chief, 2 workers, 1 ps"."""
        return ", ".join(f"{n} {job if n == 1 or job == 'ps' else job + 's'}" for job, n in self._sizes)

    @property
    def _training_jobs(self) -> tuple[str, ...]:
        # Beside parameter servers the chief coordinates and computes no gradients.
        return ("worker",) if self.has_ps else ("chief", "worker")

    @property
    def _sizes(self) -> list[tuple[str, int]]:
        return [(job, len(addresses)) for job, addresses in self.jobs.items()]


@dataclass(frozen=True)
class TFConfig:
    """What TF_CONFIG says: the cluster and which task of it this process is.

    Attributes:
        cluster: All addresses.
        task: This process; a task of the cluster, or evaluator 0, which is outside of it.
        extra: What else the text said, as JSON values: unknown top-level keys (`environment`, `job`), and under
            "task" the unknown keys of the task (Vertex AI's `trial`).

    Example:
        >>> cluster = tfdist.Cluster({"worker": ["host1:2222", "host2:2222"]})
        >>> config = tfdist.TFConfig(cluster, tfdist.Task("worker", 1))
        >>> config.is_chief, config.training_index
        (False, 1)
    """

    cluster: Cluster
    task: Task
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.is_evaluator:
            self.cluster.address(self.task)
        if "cluster" in self.extra:
            raise ClusterError("extra holds 'cluster': pass the cluster itself as a Cluster")
        about_task = self.extra.get("task", {})
        if not isinstance(about_task, Mapping) or {"type", "index"} & set(about_task):
            raise ClusterError(
                f"extra holds 'task': {about_task!r}; only further keys of the task belong there, in a mapping, and "
                "its type and index in a Task"
            )
        object.__setattr__(self, "extra", MappingProxyType(dict(self.extra)))

    def __str__(self) -> str:
        if self.is_evaluator:
            return f"{self.task}, outside a cluster of {self.cluster.counts}"
        return f"{self.task} at {self.cluster.address(self.task)}, in a cluster of {self.cluster.counts}"

    @property
    def is_chief(self) -> bool:
        return self.task == self.cluster.chief

    @property
    def is_evaluator(self) -> bool:
        """Whether this task stands outside the cluster, and evaluates what the others train."""
        return self.task.type == "evaluator"

    @property
    def trains(self) -> bool:
        """Whether this task computes gradients."""
        return self.task.type == "worker" or (self.task.type == "chief" and not self.cluster.has_ps)

    @property
    def training_index(self) -> int:
        """Position of this task in `cluster.training_tasks`."""
        if not self.trains:
            raise ClusterError(f"{self.task} does not train, so it has no place among the training tasks")
        chief_is_first = self.task.type == "worker" and not self.cluster.has_ps and "chief" in self.cluster.jobs
        return self.task.index + chief_is_first


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 host comes without its brackets.

    Raises:
        ClusterError: The text is no address that another task could connect to.
    """
    if not isinstance(address, str):
        raise ClusterError(f"the address {shown(address)} is not text: write 'host:port'")
    text = shown(address)
    if "://" in address:
        raise ClusterError(f"the address {text} has a scheme: write 'host:port' alone")
    host, colon, port = address.rpartition(":")
    if not colon or port.endswith("]"):
        raise ClusterError(f"the address {text} has no port: write 'host:port', such as {shown(address + ':2222')}")
    _check_host(host, text)
    if not (port.isascii() and port.isdigit()):
        raise ClusterError(f"the address {text} has no number after its last colon: write 'host:port'")
    # The others have to know the port, so 'any free one' is none.
    if len(port) > 5 or not 1 <= int(port) <= 65535:
        raise ClusterError(f"the address {text} has port {shown(port)}: write a port from 1 to 65535")
    if port[0] == "0":
        raise ClusterError(f"the address {text} has port {port!r}: write it without leading zeros, {int(port)}")
    return (host[1:-1] if host[0] == "[" else host), int(port)


def check_job(name: object) -> None:
    """Raises ClusterError for a job name that TensorFlow does not know."""
    if isinstance(name, str) and name in JOBS:
        return
    allowed = "jobs are chief, worker, ps and evaluator"
    hint = ""
    if isinstance(name, str):
        plain = name.strip().lower()
        if plain in JOBS:
            hint = f"; write '{plain}'"
        elif plain == "master":
            hint = "; TensorFlow 2 calls a master 'chief'"
        elif plain in _VERTEX_POOLS:
            hint = f"; this is Vertex AI's CLUSTER_SPEC, its {plain} is the job '{_VERTEX_POOLS[plain]}'"
        elif plain == "localhost" or _looks_like_host(plain):
            hint = "; this looks like a host: a cluster maps jobs to addresses, {'worker': ['host:port']}"
    raise ClusterError(f"the job {shown(name)} is unknown: {allowed}{hint}")


def shown(value: object) -> str:
    """The value as Python writes it, cut where it is long: errors are read in a terminal."""
    return _BRIEF.repr(value)


def _in_order(jobs: object) -> dict[str, tuple[str, ...]]:
    if not isinstance(jobs, Mapping):
        raise ClusterError(f"a cluster is {shown(jobs)}: give a mapping of jobs, {{'worker': ['host:port']}}")
    for job, addresses in jobs.items():
        check_job(job)
        if job not in _JOBS_INSIDE:
            raise ClusterError(
                f"the {job} is listed in the cluster: leave it out, and name its process as Task({job!r}, 0)"
            )
        if not isinstance(addresses, (list, tuple)):
            raise ClusterError(f"the addresses of job {job} are {shown(addresses)}: give a list, ['host:port']")
        if not addresses:
            raise ClusterError(f"the job {job} has no addresses: leave it out of the cluster")
    if len(jobs.get("chief", ())) > 1:
        raise ClusterError(f"the cluster has {len(jobs['chief'])} chiefs: keep one, and make the others workers")
    if not jobs.keys() & {"chief", "worker"}:
        raise ClusterError(f"nobody trains in the cluster {shown(dict(jobs))}: add the job worker or chief")
    return {job: tuple(jobs[job]) for job in _JOBS_INSIDE if job in jobs}


def _check_addresses(jobs: Mapping[str, tuple[str, ...]]) -> None:
    seen: dict[tuple[str, int], tuple[str, int]] = {}
    for job, addresses in jobs.items():
        for index, address in enumerate(addresses):
            try:
                host, port = split_address(address)
            except ClusterError as error:
                raise ClusterError(f"{job} {index}: {error}") from None
            other = seen.setdefault((canonical_host(host), port), (job, index))
            if other != (job, index):
                raise ClusterError(
                    f"{other[0]} {other[1]} and {job} {index} have the same address, {address!r}: "
                    "give each task a port of its own"
                )


def _check_host(host: str, text: str) -> None:
    if host.startswith("[") and host.endswith("]"):
        try:
            ip: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            raise ClusterError(f"the address {text} has no IPv6 address between its brackets") from None
    elif ":" in host:
        raise ClusterError(f"the address {text} has several colons: write an IPv6 address as '[::1]:2222'")
    elif _NUMBERS_AND_DOTS.fullmatch(host):
        try:
            ip = ipaddress.IPv4Address(host)
        except ValueError:
            raise ClusterError(
                f"the address {text} has no IPv4 address before its port: write 'a.b.c.d:port'"
            ) from None
    elif _HOST.fullmatch(host) and len(host) <= 253:
        return
    elif not host:
        raise ClusterError(f"the address {text} has no host: write 'host:port'")
    else:
        raise ClusterError(
            f"the address {text} has no host name before its port: letters, digits, '.', '-' and '_' make one, "
            "without spaces (write a name in other letters in its 'xn--' form)"
        )
    if ip.is_unspecified:
        raise ClusterError(
            f"the address {text} means every interface, and no other task can connect to it: "
            "write the name or address under which the others reach this host"
        )


def canonical_host(host: str) -> str:
    """One spelling per host, as far as that can be known without asking the network."""
    if ":" in host:
        return str(ipaddress.IPv6Address(host))
    host = host.lower().rstrip(".")
    return "127.0.0.1" if host == "localhost" else host


def _looks_like_host(name: str) -> bool:
    return ":" in name or (name.count(".") > 0 and _HOST.fullmatch(name) is not None)


def _some(addresses: tuple[str, ...]) -> str:
    if len(addresses) <= 8:
        return ", ".join(addresses)
    return f"{', '.join(addresses[:3])}, ... {addresses[-1]} ({len(addresses)} tasks)"
