"""TF_CONFIG -> a `tf.distribute` strategy whose tasks have met, ready to train.

Synopsis, the same script alone and on any number of tasks:

    strategy = tfdist.create_strategy()
    with strategy.scope():
        model = build()
        model.compile("adam", "mse")
    model.fit(x, y)

With ps tasks in the cluster it is a `ParameterServerStrategy`; with two or more training tasks a
`MultiWorkerMirroredStrategy`; with one task, or none named, a strategy of one device.
"""

from __future__ import annotations

import logging
import os
import platform
import random
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from tfdist import first_use, lookout, process, proxies, tf_config
from tfdist.cluster import Task, TFConfig
from tfdist.collectives import Group, meet
from tfdist.errors import ClusterError, StrategyError

logger = logging.getLogger(__name__)

KINDS = ("multi_worker_mirrored", "parameter_server", "synchronous")
COMMUNICATIONS = ("auto", "host", "nccl", "ring")
HEARTBEAT_TIMEOUT_S = 30.0
# TensorFlow's own heartbeat must not cut in before ours has named the task that is gone.
COORDINATION_HEARTBEAT_TIMEOUT_S = 60.0
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
            in a moment, opens no port of TensorFlow's and obeys SIGTERM. By default the cluster decides.
        expected_tasks: How many training tasks there must be; another number is an error.
        communication: How gradients cross tasks: "host" (our sockets), "nccl", "ring" (TensorFlow's own, slow), or
            "auto": NCCL where every task has a GPU of its own, else host.
        deterministic: Makes TensorFlow's ops deterministic, at some cost in speed.
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
    tasks = _training_tasks(config, kind)
    _check_count(tasks, expected_tasks, config)
    if config is not None and kind is not None:
        tf_config.validate_for(config, kind)
    if kind == "parameter_server":
        if config is None:
            raise ClusterError(
                "kind='parameter_server' needs a cluster of a chief, workers and ps, and TF_CONFIG names none; start "
                f"it with: python -m tfdist.run --workers 2 --ps 1 {sys.argv[0] or 'train.py'}"
            )
        return _create_parameter_server(config, info, deterministic, seed, start_timeout_s, step_timeout_s)
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
    return strategy


# -- which strategy


def _choose_kind(kind: str | None, config: TFConfig | None) -> str | None:
    if kind is not None:
        return kind
    if config is None or config.task.type == "evaluator":
        return None
    if config.cluster.has_ps:
        return "parameter_server"
    return "multi_worker_mirrored" if len(config.cluster.training_tasks) > 1 else None


def _training_tasks(config: TFConfig | None, kind: str | None) -> Sequence[Task]:
    if config is None or config.task.type == "evaluator":
        return ()
    return config.cluster.training_tasks


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


# -- devices


def _configure_devices(several: bool) -> str:
    """Chooses this task's one device, lets its memory grow, and returns its name."""
    import tensorflow as tf

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


def _gpu_identity() -> str:
    """Names this task's GPU so that tasks which share one can tell; empty without a GPU."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return ""
    details = tf.config.experimental.get_device_details(gpus[0])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    return f"{platform.node()}/{visible}/{details.get('device_name', 'GPU')}"


def _choose_communication(wanted: str, group: Group) -> str:
    """Decides how gradients cross tasks; the same everywhere, since every task sees every device."""
    gpus = [text.decode() for text in group.all_gather_bytes(_gpu_identity().encode(), tag="devices")]
    own_gpu_each = all(gpus) and len(set(gpus)) == len(gpus)
    if wanted == "nccl" and not own_gpu_each:
        described = ", ".join(f"{task}: {gpu or 'no GPU'}" for task, gpu in zip(group.tasks, gpus, strict=True))
        raise StrategyError(f"communication='nccl' needs a GPU of its own in every task ({described})")
    if wanted != "auto":
        return wanted
    return "nccl" if own_gpu_each else "host"


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

    from tfdist import parameter_server

    _check_first("parameter_server")
    _configure_devices(several=True)
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    if seed is not None:
        _set_seed(seed)
    group = _meet(config, config.cluster.tasks, info, start_timeout_s, step_timeout_s)
    _pass_proxies(config)
    if config.task != config.cluster.chief:
        parameter_server.serve(config, group)
    strategy = parameter_server.coordinate(config, group)
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

    from tfdist.trainer import dispatch
    from tfdist.trainer.reduction import ThroughGroup, ThroughStrategy
    from tfdist.trainer.synchronous import SynchronousEngine

    several = len(tasks) > 1
    if several:
        _check_first(kind)
    device = _configure_devices(several)
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    if not several:
        if seed is not None:
            _set_seed(seed)
        strategy = _one_device_strategy(device)
        dispatch.register(
            strategy,
            SynchronousEngine(strategy, seed=_fresh_seed() if seed is None else seed, step_timeout_s=step_timeout_s),
        )
        process.set_current(process.Current(config, None))
        logger.info("one task on %s", device)
        return strategy

    assert config is not None
    group = _meet(config, tasks, info, start_timeout_s, step_timeout_s)
    try:
        process.set_current(process.Current(config, group))
        agreed = _agree_on_seed(group, seed)
        way = _choose_communication(communication, group)
        through_group = ThroughGroup(group)
        if kind == "synchronous":
            strategy = _several_tasks_strategy(device, through_group)
            if way in ("nccl", "ring"):
                raise StrategyError(f"kind='synchronous' adds up on the host; communication={way!r} needs kind=None")
            reduction: ThroughGroup = through_group
        else:
            strategy = _multi_worker_mirrored(config, group, info, way, start_timeout_s)
            reduction = through_group if way == "host" else ThroughStrategy(group, strategy)
    except BaseException as error:
        group.leave(None, f"{type(error).__name__}: {error}")
        group.close()
        process.set_current(None)
        raise
    dispatch.register(
        strategy, SynchronousEngine(strategy, group, reduction, seed=agreed, step_timeout_s=step_timeout_s)
    )
    logger.info(
        "%s is one of %d tasks (%s); %s; gradients through %s",
        config.task,
        group.size,
        ", ".join(f"{task} {config.cluster.address(task)}" for task in group.tasks[:8])
        + (" ..." if group.size > 8 else ""),
        type(strategy).__name__,
        {"host": "sockets of the hosts", "nccl": "NCCL", "ring": "TensorFlow's ring"}[way],
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
    config: TFConfig, tasks: Sequence[Task], info: process.LaunchInfo, start_timeout_s: float, step_timeout_s: float
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
    )


def _pass_proxies(config: TFConfig) -> None:
    """Lets this process's gRPC reach the tasks directly; our own sockets ask no proxy."""
    hosts = [config.cluster.address(task).rpartition(":")[0].strip("[]") for task in config.cluster.tasks]
    changed = proxies.exceptions(os.environ, hosts)
    if changed:
        # gRPC, in C++, reads this process's environment.
        os.environ["no_grpc_proxy"] = changed["no_grpc_proxy"]  # noqa: SIM112


def _one_device_strategy(device: str) -> Any:
    import tensorflow as tf

    from tfdist.internals.tensorflow import SynchronousExtended

    class OneTaskStrategy(tf.distribute.Strategy):
        """One task, one device."""

        def __init__(self) -> None:
            super().__init__(SynchronousExtended(self, device, 1, 0, list, lambda value: value))

    return OneTaskStrategy()


def _several_tasks_strategy(device: str, reduction: Any) -> Any:
    import numpy as np
    import tensorflow as tf

    from tfdist.internals.tensorflow import SynchronousExtended

    group = reduction.group

    def from_chief(value: Any) -> Any:
        return tf.convert_to_tensor(group.broadcast([np.asarray(value)], root=0, tag="initial value")[0])

    class SynchronousStrategy(tf.distribute.Strategy):
        """Several tasks, one device each; sums go through the hosts' sockets."""

        def __init__(self) -> None:
            extended = SynchronousExtended(
                self, device, group.size, group.index, lambda t: reduction.sum(t, "strategy.reduce"), from_chief
            )
            super().__init__(extended)

    return SynchronousStrategy()


def _multi_worker_mirrored(
    config: TFConfig, group: Group, info: process.LaunchInfo, way: str, start_timeout_s: float
) -> Any:
    import tensorflow as tf

    from tfdist.internals import tensorflow as internals

    jobs = {job: len(addresses) for job, addresses in config.cluster.jobs.items() if job in ("chief", "worker")}
    internals.configure_coordination_service(
        jobs,
        heartbeat_timeout_s=max(COORDINATION_HEARTBEAT_TIMEOUT_S, 2 * (info.heartbeat_timeout_s or 0)),
        register_timeout_s=start_timeout_s,
    )
    implementations = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=implementations.NCCL if way == "nccl" else implementations.RING
    )
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({job: list(config.cluster.jobs[job]) for job in jobs}),
        task_type=config.task.type,
        task_id=config.task.index,
        rpc_layer="grpc",
        # Counted without starting the runtime, which must not run yet.
        num_accelerators={"GPU": len(tf.config.list_physical_devices("GPU"))},
    )
    _pass_proxies(config)
    logger.info(
        "all tasks have met; starting TensorFlow's servers, which listen on all interfaces without authentication "
        "(kind='synchronous' has none)"
    )
    for handler in logging.getLogger("tfdist").handlers:
        handler.flush()
    internals.let_mirrored_variables_be_numbers()
    # The constructor waits for its peers holding the GIL: no Python thread, handler or Ctrl-C runs meanwhile. All tasks
    # met a moment ago, so only a peer that died in between makes it wait for long.
    with lookout.looking_out(str(group.task), group.connections, start_timeout_s):
        return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver, communication_options=options)


# -- seeds


def _fresh_seed() -> int:
    return random.SystemRandom().randrange(1, 2**31 - 1)


def _set_seed(seed: int) -> None:
    import keras

    keras.utils.set_random_seed(seed)


def _agree_on_seed(group: Group, seed: int | None) -> int:
    """Gives every task one seed: the argument, the script's own, or one that the chief draws."""
    import json

    from tfdist.internals import keras as internals

    script = internals.RANDOM_SEED.find()()
    mine = {"argument": seed, "script": script, "drawn": _fresh_seed()}
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
    agreed = every[0]["argument"] or every[0]["drawn"]
    _set_seed(agreed)
    return int(agreed)
