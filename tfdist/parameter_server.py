"""A task of a parameter-server cluster -> the coordinator's strategy, or a server that ends with the coordinator.

All tasks run the same script. In the chief `create_strategy` returns a `tf.distribute.ParameterServerStrategy`; in
every worker and ps it serves here and leaves the process when the chief is done, which TensorFlow's own
`server.join()` never does. All tasks meet first, so that a missing one is named instead of waited for without a word.

The chief keeps its address of the cluster for itself: a worker that starts anew, whoever starts it, finds the chief
there and serves again. TensorFlow's server of the chief, which the others hardly call, has a port of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import portpicker
import tensorflow as tf

from tfdist import devices, process
from tfdist.attendance import KILL_S, START_AGAIN, Attendance
from tfdist.cluster import Task, TFConfig
from tfdist.collectives import Group
from tfdist.collectives.monitor import MAX_BEAT_S
from tfdist.errors import PeerLostError
from tfdist.internals import parameter_server as internals
from tfdist.placement import Placement
from tfdist.trainer import dispatch
from tfdist.trainer.asynchronous import AsynchronousEngine

logger = logging.getLogger(__name__)
# TensorFlow must not call a task that still listens for our own meeting: it would take the answer for a broken server.
SERVERS = "start of TensorFlow's servers"
PORTS = 5  # to try
T = TypeVar("T")


def coordinate(
    config: TFConfig, group: Group, *, seed: int, start_timeout_s: float, step_timeout_s: float, has_launcher: bool
) -> tf.distribute.ParameterServerStrategy:
    """Returns the chief's strategy; its constructor connects to the servers of all other tasks."""
    process.set_current(process.Current(config, None, group))
    group.barrier(SERVERS)
    assert group.door is not None
    group.door.open(lambda index: _why_not_back(group.tasks[index]))
    attendance = Attendance(group, has_launcher=has_launcher, start_timeout_s=start_timeout_s)
    with attendance.needed():
        strategy = _at_a_free_port(
            config,
            lambda resolver: make_strategy(resolver, seed=seed, step_timeout_s=step_timeout_s, attendance=attendance),
        )
    logger.info("%s coordinates %s", config.task, config.cluster.counts)
    return strategy


def _why_not_back(task: Task) -> str:
    if task.type == "worker":
        return ""
    return (
        f"{task} is started anew in a run that has begun: the variables on it were lost with the {task} before it; "
        f"{START_AGAIN}"
    )


def _at_a_free_port(config: TFConfig, make: Callable[[Any], T]) -> T:
    """Returns what `make` returns for a resolver that gives TensorFlow's server of the chief a port of its own."""
    host = config.cluster.address(config.task).rpartition(":")[0]
    for attempt in range(PORTS):
        address = f"{host}:{portpicker.pick_unused_port()}"
        try:
            return make(_resolver(config, chief=address))
        except tf.errors.UnknownError as error:
            # Somebody else took it just now.
            if "Could not start gRPC server" not in str(error) or attempt == PORTS - 1:
                raise
    raise AssertionError


def make_strategy(
    resolver: Any, *, seed: int, step_timeout_s: float, attendance: Attendance | None = None
) -> tf.distribute.ParameterServerStrategy:
    """Returns a strategy whose models `fit` sends to the asynchronous engine; its servers run already."""
    process.keep_showing_decisions()
    # Never a variable_partitioner: Keras 3 can neither train nor save the sharded variables that it makes.
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=None)
    placement = Placement(internals.num_ps(strategy))
    internals.place(strategy, placement.choose)
    internals.let_updates_exclude_each_other(strategy)
    engine = AsynchronousEngine(strategy, placement, seed=seed, step_timeout_s=step_timeout_s)
    engine.coordination.attendance = attendance
    dispatch.register(strategy, engine)
    return strategy


def serve(config: TFConfig, group: Group) -> NoReturn:
    """Serves until the chief says goodbye, then ends this process with code 0.

    A worker that was started anew, after the others have met, does the same.

    Raises:
        PeerLostError: The chief is gone without a goodbye, or left because of an error.
    """
    process.set_current(process.Current(config, None, group))
    resolver = _resolver(config)
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=config.task.type,
        task_index=config.task.index,
        protocol=resolver.rpc_layer,
        config=devices.server_config(),
        start=True,
    )
    if not group.has_come_back:
        group.barrier(SERVERS)
    process.report("phase", phase="connected")
    logger.info("%s serves at %s until the chief is done", config.task, config.cluster.address(config.task))
    _wait_for_end(config, group)
    del server
    raise SystemExit(0)


def _wait_for_end(config: TFConfig, group: Group) -> None:
    """Returns when the chief has said goodbye.

    A chief that calls a task which hangs may itself be silent: TensorFlow holds the GIL while it tells every server of
    a function. Then that other task is to blame, and whoever hears it no more tells the launcher, which ends it.
    """
    chief = config.cluster.chief
    index = config.cluster.tasks.index(chief)
    while True:
        try:
            group.wait_until_left(index)
        except PeerLostError:
            if chief not in group.silent():
                raise
            # The silence of another may show a heartbeat later.
            if group.is_heard_again(index, wait_s=2 * MAX_BEAT_S):
                continue
            others = [task for task in group.silent() if task != chief]
            if not others:
                raise
            names = " and ".join(map(str, others))
            for task in others:
                process.report("lost", task=str(task), why=f"{task} has been silent, and {chief} waits for it")
            if not group.is_heard_again(index, wait_s=KILL_S):
                raise PeerLostError(
                    f"{names} and {chief} have been silent (stopped, or their hosts are lost)", task=others[0]
                ) from None
        else:
            return


def _resolver(config: TFConfig, chief: str | None = None) -> Any:
    jobs = {job: list(addresses) for job, addresses in config.cluster.jobs.items()}
    if chief is not None:
        jobs["chief"] = [chief]
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs),
        task_type=config.task.type,
        task_id=config.task.index,
        rpc_layer="grpc",
        num_accelerators={"GPU": len(tf.config.get_visible_devices("GPU"))},
    )
