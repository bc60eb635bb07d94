"""TF_CONFIG -> a `tf.distribute` strategy whose tasks have met, ready to train.

Synopsis, the same script alone and on any number of tasks:

    strategy = tfdist.create_strategy()
    with strategy.scope():
        model = build()
        model.compile("adam", "mse")
    model.fit(x, y)

With ps tasks in the cluster it is a `ParameterServerStrategy`; with two or more training tasks a
`MultiWorkerMirroredStrategy`; with one task, or none named, a strategy of one device. So has the evaluator,
whose `fit` evaluates what the others train (`tfdist.evaluator`).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import random
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from tfdist import first_use, process, proxies, tf_config
from tfdist.cluster import Task, TFConfig
from tfdist.collectives import Group, meet
from tfdist.errors import ClusterError, StrategyError

logger = logging.getLogger(__name__)

KINDS = ("multi_worker_mirrored", "parameter_server", "synchronous")
COMMUNICATIONS = ("auto", "host", "nccl", "ring")
HEARTBEAT_TIMEOUT_S = 30.0
START_TIMEOUT_S = 300.0


def create_strategy(
    kind: str | None = None,
    *,
    expected_tasks: int | None = None,
    communication: str = "auto",
    deterministic: bool = False,
    seed: int | None = None,
    start_timeout_s: float | None = None,
    step_timeout_s: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> Any:
    """Returns the strategy of this process's cluster, with all its tasks met.

    Call it before anything else of TensorFlow, on every task. A ps, or a worker of a parameter-server cluster, serves
    inside this call and leaves the process when the chief is done.

    Args:
        kind: "multi_worker_mirrored", "parameter_server", or "synchronous": our small strategy for CPUs, which starts
            in a moment, opens no port of TensorFlow's and obeys SIGTERM. By default the cluster decides. The evaluator
            is none of its tasks.
        expected_tasks: How many training tasks there must be; another number is an error.
        communication: How gradients cross tasks: "host" (our sockets), "nccl", "ring" (TensorFlow's own, slow), or
            "auto": NCCL where every task has a GPU of its own, else host.
        deterministic: Two runs on as many tasks then give the same numbers to the last bit: TensorFlow's ops are made
            deterministic, at some cost in speed, and the seed is 0 where there is no other. (On CPUs two runs with one
            seed were the same without it, too, for all models that were tried; nothing promises it.)
        seed: The seed of all tasks. By default the script's own (`keras.utils.set_random_seed`) where it set one, else
            the chief draws one: tasks that shuffle by different seeds would lose and double rows.
        start_timeout_s: How long tasks wait for each other here; 300 s, or what the launcher was told.
        step_timeout_s: How long one step may take, and a task wait for another in it; 1,800 s, or what the launcher was
            told.
        environ: Where TF_CONFIG is read; by default `os.environ`.

    Returns:
        A `tf.distribute.Strategy`. Models made in its scope train on all tasks with plain `model.fit`.

    Raises:
        ClusterError: TF_CONFIG names no cluster that such a strategy could run on.
        StrategyError: TensorFlow has been used before, the number of tasks is not the expected one, the Keras backend
            is not TensorFlow, or a device is shared in a way that can't work.
        MeetingError: Tasks are missing or do not belong together; the message names them.

    Example:
        >>> strategy = tfdist.create_strategy()
        >>> strategy.num_replicas_in_sync
        1
    """
    process.install_exit_hooks()
    environ = os.environ if environ is None else environ
    process.show_decisions(environ)  # the launcher's tasks do so before the script
    info = process.LaunchInfo.read(environ)
    start_timeout_s = start_timeout_s or info.start_timeout_s or START_TIMEOUT_S
    process.report("phase", phase="strategy", start_timeout_s=start_timeout_s)
    step_timeout_s = step_timeout_s or info.step_timeout_s or process.DEFAULT_STEP_TIMEOUT_S
    if kind is not None and kind not in KINDS:
        raise StrategyError(f"kind={kind!r}; it must be one of {', '.join(map(repr, KINDS))}, or None")
    if communication not in COMMUNICATIONS:
        raise StrategyError(
            f"communication={communication!r}; it must be one of {', '.join(map(repr, COMMUNICATIONS))}"
        )
    _check_keras(environ)
    config = tf_config.resolve(environ)
    kind = _choose_kind(kind, config)
    tasks = _training_tasks(config)
    if not _is_evaluator(config):
        _check_count(tasks, expected_tasks, config)
    if config is not None and kind is not None:
        tf_config.validate_for(config, kind)
    if kind == "parameter_server":
        if config is None:
            raise ClusterError(
                "kind='parameter_server' needs a cluster of a chief, workers and ps, and TF_CONFIG names none; start "
                f"it with: python -m tfdist.run --workers 2 --ps 1 {sys.argv[0] or 'train.py'}"
            )
        return _kept(_create_parameter_server(config, info, deterministic, seed, start_timeout_s, step_timeout_s))
    strategy = _create_synchronous(
        config,
        kind,
        tasks,
        info,
        communication=communication,
        deterministic=deterministic,
        seed=seed,
        start_timeout_s=start_timeout_s,
        step_timeout_s=step_timeout_s,
    )
    process.report("phase", phase="connected")
    return _kept(strategy)


def _kept(strategy: Any) -> Any:
    """Lets `tfdist.load` find the strategy."""
    process.set_current(dataclasses.replace(process.current() or process.Current(), strategy=strategy))
    return strategy


# -- which strategy


def _is_evaluator(config: TFConfig | None) -> bool:
    return config is not None and config.is_evaluator


def _choose_kind(kind: str | None, config: TFConfig | None) -> str | None:
    if _is_evaluator(config):
        return None  # whatever the others make
    if kind is not None or config is None:
        return kind
    if config.cluster.has_ps:
        return "parameter_server"
    return "multi_worker_mirrored" if len(config.cluster.training_tasks) > 1 else None


def _training_tasks(config: TFConfig | None) -> Sequence[Task]:
    return () if config is None or _is_evaluator(config) else config.cluster.training_tasks


def _check_count(tasks: Sequence[Task], expected: int | None, config: TFConfig | None) -> None:
    count = max(1, len(tasks))
    if expected is None or expected == count:
        return
    where = "TF_CONFIG names no cluster" if config is None else "TF_CONFIG's cluster"
    raise StrategyError(
        f"expected_tasks={expected}, but this process is one of {count} training task{'s' * (count > 1)} ({where}); "
        f"start it with: python -m tfdist.run --workers {expected} {sys.argv[0] or 'train.py'}"
    )


def _check_keras(environ: Mapping[str, str]) -> None:
    if environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        raise StrategyError(
            "TF_USE_LEGACY_KERAS is set, so tf.keras is legacy Keras 2, which tfdist does not train; "
            "unset it on every task and use Keras 3"
        )
    backend = environ.get("KERAS_BACKEND") or "tensorflow"
    if "keras" in sys.modules or backend == "tensorflow":  # else its import may fail for want of that backend
        import keras

        backend = keras.backend.backend()
    if backend != "tensorflow":
        raise StrategyError(
            f"the Keras backend is {backend!r}; tfdist trains with TensorFlow: set KERAS_BACKEND=tensorflow before "
            "keras is imported"
        )
    from tfdist.internals import keras as internals

    missing = internals.missing()
    if missing:
        raise StrategyError(
            f"Keras {keras.version()} lacks {', '.join(map(str, missing))} (last read in Keras {internals.READ_IN}); "
            f"install keras=={internals.READ_IN} or a newer tfdist"
        )


# -- parameter servers


def _create_parameter_server(
    config: TFConfig,
    info: process.LaunchInfo,
    deterministic: bool,
    seed: int | None,
    start_timeout_s: float,
    step_timeout_s: float,
) -> Any:
    """Returns the strategy in the chief; serves in every other task, and ends its process."""
    import tensorflow as tf

    from tfdist import devices, parameter_server

    _check_first("parameter_server")
    devices.configure(several=True, computes=config.trains)
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    if seed is not None:
        _set_seed(seed)
    # Tasks that start anew are let in at a door, and share no memory.
    group = _meet(config, config.cluster.tasks, info, start_timeout_s, step_timeout_s, share_memory=False)
    _pass_proxies(config)
    if config.task != config.cluster.chief:
        parameter_server.serve(config, group)
    strategy = parameter_server.coordinate(
        config,
        group,
        seed=_fresh_seed() if seed is None else seed,
        start_timeout_s=start_timeout_s,
        step_timeout_s=step_timeout_s,
        has_launcher=info.run_dir is not None,
    )
    process.report("phase", phase="connected")
    return strategy


# -- synchronous strategies


def _create_synchronous(
    config: TFConfig | None,
    kind: str | None,
    tasks: Sequence[Task],
    info: process.LaunchInfo,
    *,
    communication: str,
    deterministic: bool,
    seed: int | None,
    start_timeout_s: float,
    step_timeout_s: float,
) -> Any:
    import tensorflow as tf

    from tfdist import devices, synchronous

    several = len(tasks) > 1
    if several:
        _check_first(kind)
    device = devices.configure(several)
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    if not several:
        if seed is None and deterministic and _script_seed() is None:
            seed = 0
        if seed is not None:
            _set_seed(seed)
        process.set_current(process.Current(config, None))
        make = synchronous.beside if _is_evaluator(config) else synchronous.alone
        return make(device, seed=_fresh_seed() if seed is None else seed, step_timeout_s=step_timeout_s)

    assert config is not None
    group = _meet(config, tasks, info, start_timeout_s, step_timeout_s)
    try:
        process.set_current(process.Current(config, group))
        agreed = _agree_on_seed(group, seed, otherwise=0 if deterministic else _fresh_seed())
        way = devices.choose_communication(
            "host" if kind == "synchronous" and communication == "auto" else communication,
            group.tasks,
            [text.decode() for text in group.all_gather_bytes(devices.identity().encode(), tag="devices")],
        )
        if kind == "synchronous":
            strategy = synchronous.small(group, device, way, seed=agreed, step_timeout_s=step_timeout_s)
        else:
            _pass_proxies(config)
            strategy = synchronous.multi_worker_mirrored(
                config,
                group,
                way,
                seed=agreed,
                start_timeout_s=start_timeout_s,
                step_timeout_s=step_timeout_s,
                heartbeat_timeout_s=info.heartbeat_timeout_s or HEARTBEAT_TIMEOUT_S,
            )
    except BaseException as error:
        group.leave(None, f"{type(error).__name__}: {error}")
        group.close()
        process.set_current(None)
        raise
    logger.info(
        "%s of %d tasks has met the others; %s; gradients through %s",
        config.task,
        group.size,
        "SynchronousStrategy" if kind == "synchronous" else "MultiWorkerMirroredStrategy",
        devices.WAYS[way],
    )
    return strategy


def _check_first(kind: str | None) -> None:
    """A process joins one cluster, and before TensorFlow has started."""
    from tfdist.internals import tensorflow as internals

    if process.current() is not None and process.current().group is not None:  # type: ignore[union-attr]
        raise StrategyError(
            "this process has a strategy already; a task joins one cluster, once: keep the first strategy"
        )
    if kind != "synchronous" and internals.is_initialized():
        line = first_use.line()
        first = f" The first use was\n    {line}\n" if line else " "
        raise StrategyError(
            f"TensorFlow was used before create_strategy(), so this process can no longer join a cluster.{first}"
            "Making a tensor, a dataset or a layer, or listing logical devices, is use. Move tfdist.create_strategy() "
            "above it, right below the imports"
        )


def _meet(
    config: TFConfig,
    tasks: Sequence[Task],
    info: process.LaunchInfo,
    start_timeout_s: float,
    step_timeout_s: float,
    *,
    share_memory: bool = True,
) -> Group:
    def waiting(message: str) -> None:
        logger.warning("%s", message)
        process.report("phase", phase="waiting", **{"for": message})

    import keras

    versions = (
        f"tfdist {version('tfdist')}, TensorFlow {version('tensorflow')}, Keras {keras.version()}, "
        f"Python {platform.python_version()}"
    )
    return meet(
        [config.cluster.address(task) for task in tasks],
        tasks,
        tasks.index(config.task),
        secret=info.secret,
        start_timeout_s=start_timeout_s,
        step_timeout_s=step_timeout_s,
        heartbeat_timeout_s=info.heartbeat_timeout_s or HEARTBEAT_TIMEOUT_S,
        on_wait=waiting,
        fingerprint=versions,
        share_memory=share_memory,
    )


def _pass_proxies(config: TFConfig) -> None:
    """Lets this process's gRPC reach the tasks directly; our own sockets ask no proxy."""
    hosts = [config.cluster.address(task).rpartition(":")[0].strip("[]") for task in config.cluster.tasks]
    changed = proxies.exceptions(os.environ, hosts)
    if changed:
        # gRPC, in C++, reads this process's environment.
        os.environ["no_grpc_proxy"] = changed["no_grpc_proxy"]  # noqa: SIM112


# -- seeds


def _fresh_seed() -> int:
    return random.SystemRandom().randrange(1, 2**31 - 1)


def _set_seed(seed: int) -> None:
    import keras

    keras.utils.set_random_seed(seed)


def _script_seed() -> int | None:
    from tfdist.internals import keras as internals

    seed: int | None = internals.RANDOM_SEED.find()()
    return seed


def _agree_on_seed(group: Group, seed: int | None, *, otherwise: int) -> int:
    """Gives every task one seed: the argument, the script's own, or what the chief has for it otherwise."""
    import json

    script = _script_seed()
    mine = {"argument": seed, "script": script, "otherwise": otherwise}
    every = [json.loads(text) for text in group.all_gather_bytes(json.dumps(mine).encode(), tag="seed")]
    for name, words in (("argument", "seed="), ("script", "keras.utils.set_random_seed")):
        for task, theirs in zip(group.tasks, every, strict=True):
            if theirs[name] != every[0][name]:
                raise StrategyError(
                    f"{words} is {every[0][name]} on {group.tasks[0]} and {theirs[name]} on {task}; use one seed on "
                    "all tasks (dropout and other draws differ between tasks all the same)"
                )
    if seed is None and script is not None:
        return int(script)
    agreed = int(every[0]["otherwise"] if seed is None else seed)
    _set_seed(agreed)
    return agreed
