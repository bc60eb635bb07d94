"""TF_CONFIG text <-> `TFConfig`: what a platform or a launcher says to a task, read strictly and written plainly.

Synopsis:

    config = resolve()                                  # of this process; None when it runs alone
    validate_for(config, "multi_worker_mirrored")
    text = build(config.cluster, Task("worker", 1))     # what worker 1 gets

TensorFlow reads TF_CONFIG with a bare `json.loads`: it takes duplicate addresses, missing ports and negative indexes,
and trains alone in silence where it finds no cluster. Here each of these is an error before TensorFlow starts. What
has one plain meaning is put right and logged:

    a job or task `master`               is the chief
    an evaluator listed in the cluster   is taken out; its own task stays `evaluator 0`
    {"0": "a:1", "1": "b:1"}             is the list of its addresses, where none is missing
    an index as text, "1"                is the number
    a job with an empty list             is left out, where other jobs have addresses

TensorFlow's side: https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
from collections.abc import Mapping, Sequence

from tfdist.cluster import Cluster, Task, TFConfig, check_job, shown, split_address
from tfdist.errors import ClusterError, TFConfigError

KINDS = ("multi_worker_mirrored", "parameter_server", "synchronous")

_SAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'

_log = logging.getLogger(__name__)


def resolve(environ: Mapping[str, str] | None = None) -> TFConfig | None:
    """What this process is: its cluster and its task in it, or None where it runs alone.

    Example:
        config = tfdist.resolve()
        print(config or "alone")     # worker 1 at 10.0.0.2:2222, in a cluster of 2 workers

    Args:
        environ: Variables to read; those of the process by default.

    Raises:
        TFConfigError: TF_CONFIG is set and names no usable cluster.
    """
    config = parse((os.environ if environ is None else environ).get("TF_CONFIG"))
    _log.debug("TF_CONFIG: %s", config or "names no cluster, this process runs alone")
    return config


def parse(text: str | None) -> TFConfig | None:
    """The cluster and task that TF_CONFIG text names; None where it is unset, empty or without a cluster.

    Raises:
        TFConfigError: The text names no usable cluster, or a task that is not in it.
    """
    if text is None or not text.strip():
        return None
    try:
        return _read(_load(text))
    except ClusterError as error:
        raise TFConfigError(f"TF_CONFIG: {error}") from None


def build(cluster: Cluster, task: Task, extra: Mapping[str, object] | None = None) -> str:
    """The TF_CONFIG text of one task, in the form that TensorFlow itself reads.

    Linux takes up to 128 KiB in one environment variable: some 4,000 addresses.

    Args:
        cluster: All addresses.
        task: Whose text it is: a task of the cluster, or evaluator 0.
        extra: Further JSON values, as `TFConfig.extra` holds them.

    Raises:
        ClusterError: The task is not in the cluster, or `extra` is no JSON.
    """
    config = TFConfig(cluster, task, extra or {})
    document = {
        "cluster": {job: list(addresses) for job, addresses in cluster.jobs.items()},
        **config.extra,
        "task": {"type": task.type, "index": task.index, **_keys(config.extra.get("task", {}))},
    }
    try:
        return json.dumps(document, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ClusterError(f"extra {shown(dict(config.extra))} can not be written as JSON: {error}") from None


def local_cluster(
    *, workers: int, ps: int = 0, chief: bool = False, ports: Sequence[int], host: str = "127.0.0.1"
) -> Cluster:
    """A cluster on one host, with one port per task in the order of `Cluster.tasks`: chief, workers, ps.

    Raises:
        ClusterError: There are not as many ports as tasks, a port is not from 1 to 65535, or nobody trains.
    """
    counts = {"chief": int(chief), "worker": workers, "ps": ps}
    for job, count in counts.items():
        if count < 0:
            raise ClusterError(f"{count} tasks of job {job}: give 0 or more")
    if len(ports) != sum(counts.values()):
        words = " + ".join(f"{count} {job}" for job, count in counts.items() if count)
        raise ClusterError(f"{len(ports)} ports for {words or 'no'} tasks: give one port per task")
    rest = iter(ports)
    name = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return Cluster({job: tuple(f"{name}:{next(rest)}" for _ in range(n)) for job, n in counts.items() if n})


def validate_for(config: TFConfig, kind: str) -> None:
    """Raises ClusterError where a strategy of this kind can not run on this cluster, or not in this task.

    Args:
        config: What `parse` gave.
        kind: "multi_worker_mirrored", "parameter_server" or "synchronous".
    """
    if kind not in KINDS:
        raise ClusterError(f"the strategy kind {shown(kind)} is unknown: kinds are {', '.join(KINDS)}")
    cluster = config.cluster
    if config.task.type == "evaluator":
        raise ClusterError(
            f"{config.task} stands outside the cluster and takes no part in a {kind} strategy: "
            "make the model without a strategy there, and load checkpoints into it"
        )
    if kind != "parameter_server":
        if cluster.has_ps:
            raise ClusterError(
                f"the cluster has {cluster.counts}, and a {kind} strategy would wait for ps 0 without end: "
                "leave the ps tasks out, or take kind='parameter_server'"
            )
        return
    for job, why in (
        ("ps", "to hold the variables"),
        ("worker", "to compute gradients"),
        ("chief", "to coordinate, with an address that workers and ps can reach"),
    ):
        if job not in cluster.jobs:
            raise ClusterError(
                f"the cluster has {cluster.counts}, and a parameter_server strategy needs a {job} {why}: "
                f"add the job {job}" + (", or take kind='multi_worker_mirrored'" if job == "ps" else "")
            )


class _Repeated(dict[str, object]):
    """An object of the text in which `key` stands twice."""

    key: str


def _load(text: str) -> dict[str, object]:
    try:
        document = json.loads(
            text, object_pairs_hook=_object, parse_constant=_not_finite, parse_float=_finite, parse_int=_whole
        )
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20) : error.pos + 20]
        quotes = "; JSON has double quotes" if "'" in near and '"' not in text else ""
        raise TFConfigError(
            f"the text is not JSON: {error.msg} at character {error.pos}, near {near!r}{quotes}. Write {_SAMPLE}"
        ) from None
    except RecursionError:
        raise TFConfigError(f"the text is nested too deeply. Write {_SAMPLE}") from None
    if isinstance(document, str) and document.lstrip().startswith("{"):
        raise TFConfigError(f"the text is JSON inside a JSON string, {shown(document)}: encode it once")
    if not isinstance(document, dict):
        raise TFConfigError(f"the text is {_described(document)}, and not an object. Write {_SAMPLE}")
    return document


def _read(document: dict[str, object]) -> TFConfig | None:
    _check_once(document, "TF_CONFIG")
    if not document.get("cluster", {}) and isinstance(document.get("cluster", {}), dict):
        _check_alone(document)
        return None
    jobs = _read_jobs(document["cluster"])
    task, about_task = _read_task(document)
    extra = {key: value for key, value in document.items() if key not in ("cluster", "task", "rpc_layer")}
    if about_task:
        extra["task"] = about_task
    if _read_rpc_layer(document):
        extra["rpc_layer"] = "grpc"
    cluster = Cluster(jobs)  # type: ignore[arg-type]  # it checks that every address is text
    _warn_of_loopback(cluster)
    return TFConfig(cluster, task, extra)


def _check_alone(document: dict[str, object]) -> None:
    """Lets a lone task pass, and nobody who believes to be one of several."""
    for key in document:
        plain = key.strip().lower()
        if plain in ("cluster", "clusters", "cluster_spec", "clusterspec") and key != "cluster":
            raise TFConfigError(f"there is no 'cluster' but {key!r}: write 'cluster'")
        if plain in ("chief", "master", "worker", "workers", "ps"):
            raise TFConfigError(f"the job {key!r} stands outside of 'cluster': write {_SAMPLE}")
    if document.get("task"):
        task, _ = _read_task(document)
        if task.index > 0:
            raise TFConfigError(f"the task is {task}, and there is no cluster that it is in. Write {_SAMPLE}")
        if task.type != "evaluator":
            _note("there is a task, %s, and no cluster: it runs alone", task)


def _read_jobs(cluster: object) -> dict[str, tuple[object, ...]]:
    if not isinstance(cluster, dict):
        raise TFConfigError(f"'cluster' is {_described(cluster)}: write jobs, {{'worker': ['host:port']}}")
    _check_once(cluster, "'cluster'")
    if "master" in cluster and "chief" in cluster:
        raise TFConfigError("the cluster has both a chief and a master, which mean the same: leave the master out")
    jobs = {}
    for name, value in cluster.items():
        if name == "master":
            _note("the job 'master' is read as 'chief', its name in TensorFlow 2")
        job = "chief" if name == "master" else name
        check_job(job)
        addresses = _read_addresses(job, value)
        if not addresses:
            _note("the job %r has no addresses and is left out", job)
        elif job != "evaluator":
            jobs[job] = addresses
        elif len(addresses) > 1:
            raise TFConfigError(f"the cluster has {len(addresses)} evaluators: TensorFlow knows one at most")
        else:
            _note("the evaluator is taken out of the cluster: strategies would wait for a server it never starts")
    if not jobs:
        raise TFConfigError(f"'cluster' is {shown(cluster)}, and has no address of a chief or worker. Write {_SAMPLE}")
    return jobs


def _read_addresses(job: str, value: object) -> tuple[object, ...]:
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, dict):
        sample = f"[{json.dumps(value)}]" if isinstance(value, str) and len(value) < 100 else '["host:port"]'
        raise TFConfigError(f"the addresses of job {job} are {_described(value)}: write a list, {sample}")
    _check_once(value, f"job {job}")
    for index in value:
        if not _is_index(index):
            raise TFConfigError(f"the job {job} has the index {shown(index)}: indexes are numbers, counted from 0")
    by_index = {int(index): address for index, address in value.items()}
    holes = [index for index in range(len(by_index)) if index not in by_index]
    if holes:
        raise TFConfigError(
            f"the job {job} has addresses up to index {max(by_index)} and none for index {holes[0]}: "
            "every task must know all addresses (with Kubeflow's TFJob, leave out enableDynamicWorker)"
        )
    if by_index:
        _note("the addresses of job %r, given by index, are read as a list", job)
    return tuple(by_index[index] for index in range(len(by_index)))


def _read_task(document: dict[str, object]) -> tuple[Task, dict[str, object]]:
    """The task, and what else the text says of it."""
    if "task" not in document:
        raise TFConfigError('there is a cluster and no \'task\': add "task": {"type": "worker", "index": 0}')
    task = document["task"]
    if not isinstance(task, dict):
        raise TFConfigError(f'\'task\' is {_described(task)}: write {{"type": "worker", "index": 0}}')
    _check_once(task, "'task'")
    for key in ("type", "index"):
        if task.get(key) is None:
            raise TFConfigError(f'\'task\' is {shown(task)}, without {key}: write {{"type": "worker", "index": 0}}')
    job, index = task["type"], task["index"]
    if job == "master":
        _note("the task 'master' is read as 'chief', its name in TensorFlow 2")
        job = "chief"
    check_job(job)
    if isinstance(index, str):
        if not _is_index(index):
            raise TFConfigError(f"the task's index is {shown(index)}: write a whole number, counted from 0")
        _note("the task's index %r, a text, is read as a number", index)
        index = int(index)
    return Task(str(job), index), {key: value for key, value in task.items() if key not in ("type", "index")}


def _read_rpc_layer(document: dict[str, object]) -> bool:
    """Whether the text names the one protocol that TensorFlow's servers still speak."""
    layer = document.get("rpc_layer")
    if layer not in (None, "", "grpc"):
        raise TFConfigError(f"'rpc_layer' is {shown(layer)}: write 'grpc', or leave it out")
    return layer == "grpc"


def _warn_of_loopback(cluster: Cluster) -> None:
    here = {task: _is_loopback(split_address(cluster.address(task))[0]) for task in cluster.tasks}
    if any(here.values()) and not all(here.values()):
        task = next(task for task, loopback in here.items() if loopback)
        _log.warning(
            "TF_CONFIG: %s has the address %s, which on every other host means that host itself: "
            "write the name under which the others reach it",
            task,
            cluster.address(task),
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def _is_index(text: str) -> bool:
    # One spelling per number ("01" would be a second 1), and no more digits than any cluster has.
    return text.isascii() and text.isdigit() and len(text) < 10 and (text == "0" or text[0] != "0")


def _check_once(value: dict[str, object], where: str) -> None:
    if isinstance(value, _Repeated):
        raise TFConfigError(f"the key {shown(value.key)} stands twice in {where}: keep one")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    repeated = _Repeated(value)
    seen: set[str] = set()
    repeated.key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
    return repeated


def _whole(digits: str) -> int:
    # Newer Pythons refuse long numbers by themselves, in a ValueError about sys.set_int_max_str_digits.
    if len(digits) > 600:
        raise TFConfigError(f"the number {shown(digits)} has too many digits")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    return number if abs(number) != float("inf") else _not_finite(digits)


def _not_finite(digits: str) -> float:
    raise TFConfigError(f"the number {shown(digits)} is not finite, and JSON has no such number")


def _keys(about_task: object) -> dict[str, object]:
    return dict(about_task) if isinstance(about_task, Mapping) else {}


def _described(value: object) -> str:
    """A JSON value with its kind: `a list, ['a:1']`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    names = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return f"{next(name for kind, name in names.items() if isinstance(value, kind))}, {shown(value)}"


def _note(message: str, *args: object) -> None:
    _log.info("TF_CONFIG: " + message, *args)
