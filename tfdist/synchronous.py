"""Tasks that train in step -> their strategy, whose models `fit` sends to the synchronous engine.

Three kinds, one engine: one task alone, TensorFlow's MultiWorkerMirroredStrategy, and a small strategy of our own for
CPUs that starts no server. The evaluator beside them is one task alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import evaluator, lookout
from tfdist.cluster import TFConfig
from tfdist.collectives import Group
from tfdist.errors import StrategyError
from tfdist.internals import tensorflow as internals
from tfdist.trainer import dispatch
from tfdist.trainer.reduction import ThroughGroup, ThroughStrategy
from tfdist.trainer.synchronous import SynchronousEngine

logger = logging.getLogger(__name__)

# TensorFlow's own heartbeat must not cut in before ours has named the task that is gone.
COORDINATION_HEARTBEAT_TIMEOUT_S = 60.0


class OneTaskStrategy(tf.distribute.Strategy):
    """One task, one device."""

    def __init__(self, device: str) -> None:
        super().__init__(internals.SynchronousExtended(self, device, 1, 0, list, lambda value: value))


class SynchronousStrategy(tf.distribute.Strategy):
    """Several tasks, one device each; sums go through the hosts' sockets, and there is no server of TensorFlow's."""

    def __init__(self, device: str, reduction: ThroughGroup) -> None:
        group = reduction.group

        def all_sum(tensors: Any) -> list[tf.Tensor]:
            return reduction.sum(tensors, "strategy.reduce")

        extended = internals.SynchronousExtended(self, device, group.size, group.index, all_sum, _from_chief(group))
        super().__init__(extended)


def _from_chief(group: Group) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function of a tensor in every task that gives the chief's in every task."""

    def from_chief(value: tf.Tensor) -> tf.Tensor:
        return tf.convert_to_tensor(group.broadcast([np.asarray(value)], root=0, tag="initial value")[0])

    return from_chief


def alone(device: str, *, seed: int, step_timeout_s: float) -> OneTaskStrategy:
    """Returns the strategy of a task that trains alone."""
    strategy = OneTaskStrategy(device)
    dispatch.register(strategy, SynchronousEngine(strategy, seed=seed, step_timeout_s=step_timeout_s))
    logger.info("one task on %s", device)
    return strategy


def beside(device: str, *, seed: int, step_timeout_s: float) -> OneTaskStrategy:
    """Returns the strategy of the evaluator, whose `fit` evaluates what the cluster's tasks train."""
    strategy = OneTaskStrategy(device)
    engine = SynchronousEngine(strategy, seed=seed, step_timeout_s=step_timeout_s)
    engine.is_chief = False  # that one writes and shows
    dispatch.register(strategy, engine, fit=evaluator.fit)
    logger.info("the evaluator, on %s", device)
    return strategy


def small(group: Group, device: str, way: str, *, seed: int, step_timeout_s: float) -> SynchronousStrategy:
    """Returns our own strategy for several tasks.

    Raises:
        StrategyError: Another way than "host" is asked for, and it has no other.
    """
    if way != "host":
        raise StrategyError(f"kind='synchronous' adds up on the host; communication={way!r} needs kind=None")
    reduction = ThroughGroup(group)
    strategy = SynchronousStrategy(device, reduction)
    _register(strategy, group, reduction, seed=seed, step_timeout_s=step_timeout_s)
    return strategy


def multi_worker_mirrored(
    config: TFConfig,
    group: Group,
    way: str,
    *,
    seed: int,
    start_timeout_s: float,
    step_timeout_s: float,
    heartbeat_timeout_s: float,
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Returns TensorFlow's own strategy, of which all tasks make one at the same time; `way` as in `devices`."""
    jobs = {job: len(addresses) for job, addresses in config.cluster.jobs.items() if job in ("chief", "worker")}
    internals.configure_coordination_service(
        jobs,
        heartbeat_timeout_s=max(COORDINATION_HEARTBEAT_TIMEOUT_S, 2 * heartbeat_timeout_s),
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
        num_accelerators={"GPU": len(tf.config.get_visible_devices("GPU"))},
    )
    logger.info(
        "TensorFlow's servers listen on all network interfaces without authentication; "
        'tfdist.create_strategy("synchronous") starts none'
    )
    for handler in logging.getLogger("tfdist").handlers:
        handler.flush()
    internals.let_mirrored_variables_be_numbers()
    # The constructor waits for its peers holding the GIL: no Python thread, handler or Ctrl-C runs meanwhile. All tasks
    # met a moment ago, so only a peer that died in between makes it wait for long.
    with lookout.looking_out(str(group.task), group.connections, start_timeout_s):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver, communication_options=options)
    internals.broadcast_other_initial_values(strategy, _from_chief(group))
    reduction = ThroughGroup(group) if way == "host" else ThroughStrategy(group, strategy)
    _register(strategy, group, reduction, seed=seed, step_timeout_s=step_timeout_s)
    return strategy


def _register(
    strategy: tf.distribute.Strategy, group: Group, reduction: ThroughGroup, *, seed: int, step_timeout_s: float
) -> None:
    engine = SynchronousEngine(strategy, group, reduction, seed=seed, step_timeout_s=step_timeout_s)
    dispatch.register(strategy, engine)
