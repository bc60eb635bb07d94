"""A TF_CONFIG with one entry per host -> the cluster with one task per GPU, and which of its tasks run on this host.

Synopsis, on the first of two hosts with two GPUs each:

    config = tf_config.parse('{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}')
    share = split(config, 2)
    share.cluster       # worker a:2222, a:2223, b:2222, b:2223
    share.tasks         # worker 0, worker 1

Every host splits alike, so that all tasks know one cluster without a word between the hosts. Only tasks that train are
split: a ps stays one task, and so do an evaluator and the chief of a parameter-server cluster, which coordinates. A
chief that trains stays task 0 of the cluster; the other tasks of its host are the first workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfdist.cluster import Cluster, Task, TFConfig, canonical_host, split_address
from tfdist.errors import LaunchError

LAST_PORT = 65535


@dataclass(frozen=True)
class Share:
    """What one host runs of a cluster.

    Attributes:
        cluster: All tasks, on all hosts.
        tasks: Those of this host, in the order of their local indices.
        hosts: How many entries TF_CONFIG has, each of which one launcher starts.
        tasks_per_host: How many training tasks each of them is taken to run.
        first_gpu: Which of this host's GPUs the first task gets; not 0 where TF_CONFIG has several entries for it.
        extra: What else TF_CONFIG said, as `TFConfig.extra`.
    """

    cluster: Cluster
    tasks: tuple[Task, ...]
    hosts: int = 1
    tasks_per_host: int = 1
    first_gpu: int = 0
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def is_whole(self) -> bool:
        """Whether all tasks of the cluster run on this host."""
        return set(self.tasks) >= set(self.cluster.tasks)

    @property
    def ports(self) -> tuple[int, ...]:
        """Where this host's tasks listen; an evaluator does not."""
        addresses = (self.cluster.address(task) for task in self.tasks if task.type != "evaluator")
        return tuple(split_address(address)[1] for address in addresses)


def default_tasks_per_host(config: TFConfig, gpus: int) -> int:
    """Returns one task per GPU of this host, or one where TF_CONFIG has an entry for each task already.

    Args:
        config: What TF_CONFIG says.
        gpus: How many GPUs this host has.
    """
    return 1 if _has_entry_per_task(config.cluster) else max(1, gpus)


def split(config: TFConfig, tasks_per_host: int) -> Share:
    """Returns the share of the host whose entry in TF_CONFIG `config.task` is.

    Args:
        config: What TF_CONFIG says, with one entry per host.
        tasks_per_host: How many tasks each host that trains runs. They listen at the port of its entry and those after
            it.

    Raises:
        LaunchError: A port that is needed is another entry's, or above 65535.
    """
    if tasks_per_host < 1:
        raise LaunchError(f"--tasks-per-host must be at least 1, not {tasks_per_host}")
    _check_ports(config.cluster, tasks_per_host)
    jobs: dict[str, list[str]] = {}
    here = [config.task] if config.task.type == "evaluator" else []
    for entry in config.cluster.tasks:
        for i, address in enumerate(_addresses(config.cluster, entry, tasks_per_host)):
            job = entry.type if i == 0 else "worker"
            jobs.setdefault(job, []).append(address)
            if entry == config.task:
                here.append(Task(job, len(jobs[job]) - 1))
    return Share(
        cluster=Cluster({job: tuple(addresses) for job, addresses in jobs.items()}),
        tasks=tuple(here),
        hosts=len(config.cluster.tasks),
        tasks_per_host=tasks_per_host,
        first_gpu=_entries_before(config) * tasks_per_host,
        extra=config.extra,
    )


def _addresses(cluster: Cluster, entry: Task, tasks_per_host: int) -> Sequence[str]:
    """Addresses of the tasks that an entry becomes; an IPv6 host keeps its brackets."""
    host, _, port = cluster.address(entry).rpartition(":")
    count = tasks_per_host if entry in cluster.training_tasks else 1
    return [f"{host}:{int(port) + i}" for i in range(count)]


def _check_ports(cluster: Cluster, tasks_per_host: int) -> None:
    taken = {_place(cluster.address(entry)): entry for entry in cluster.tasks}
    for entry in cluster.training_tasks:
        host, first = _place(cluster.address(entry))
        last = first + tasks_per_host - 1
        words = f"{entry} at {cluster.address(entry)} is split into {tasks_per_host} tasks at ports {first} to {last}"
        if last > LAST_PORT:
            raise LaunchError(f"TF_CONFIG: {words}, and ports end at {LAST_PORT}: give it a lower port")
        for port in range(first, last + 1):
            other = taken.setdefault((host, port), entry)
            if other != entry:
                raise LaunchError(
                    f"TF_CONFIG: {words}, and {other} is at {cluster.address(other)}: set the ports of one host "
                    f"{tasks_per_host} or more apart, or, where each task has an entry of its own already, use "
                    "--tasks-per-host 1"
                )


def _place(address: str) -> tuple[str, int]:
    host, port = split_address(address)
    return canonical_host(host), port


def _training_hosts(cluster: Cluster) -> list[str]:
    return [_place(cluster.address(entry))[0] for entry in cluster.training_tasks]


def _has_entry_per_task(cluster: Cluster) -> bool:
    return any(count > 1 for count in Counter(_training_hosts(cluster)).values())


def _entries_before(config: TFConfig) -> int:
    """How many training entries of this host stand before ours: their tasks take the first GPUs."""
    if not config.trains:
        return 0
    hosts = _training_hosts(config.cluster)
    return hosts[: config.training_index].count(hosts[config.training_index])
