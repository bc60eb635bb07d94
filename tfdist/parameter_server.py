"""A task of a parameter-server cluster -> the coordinator's strategy, or a server that ends with the coordinator.

All tasks run the same script. In the chief `create_strategy` returns a `tf.distribute.ParameterServerStrategy`; in
every worker and ps it serves here and leaves the process when the chief is done, which TensorFlow's own
`server.join()` never does. All tasks meet first, so that a missing one is named instead of waited for without a word.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import tensorflow as tf

from tfdist import devices, process
from tfdist.cluster import TFConfig
from tfdist.collectives import Group
from tfdist.internals import parameter_server as internals
from tfdist.placement import Placement
from tfdist.trainer import dispatch
from tfdist.trainer.asynchronous import AsynchronousEngine

logger = logging.getLogger(__name__)
# TensorFlow must not call a task that still listens for our own meeting: it would take the answer for a broken server.
SERVERS = "start of TensorFlow's servers"


def coordinate(
    config: TFConfig, group: Group, *, seed: int, step_timeout_s: float
) -> tf.distribute.ParameterServerStrategy:
    """Returns the chief's strategy; its constructor connects to the servers of all other tasks."""
    process.set_current(process.Current(config, None, group))
    group.barrier(SERVERS)
    strategy = make_strategy(_resolver(config), seed=seed, step_timeout_s=step_timeout_s)
    logger.info("%s coordinates %s", config.task, config.cluster.counts)
    return strategy


def make_strategy(resolver: Any, *, seed: int, step_timeout_s: float) -> tf.distribute.ParameterServerStrategy:
    """Returns a strategy whose models `fit` sends to the asynchronous engine; its servers run already."""
    process.keep_showing_decisions()
    # Never a variable_partitioner: Keras 3 can neither train nor save the sharded variables that it makes.
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=None)
    placement = Placement(internals.num_ps(strategy))
    internals.place(strategy, placement.choose)
    engine = AsynchronousEngine(strategy, placement, seed=seed, step_timeout_s=step_timeout_s)
    dispatch.register(strategy, engine)
    return strategy


def serve(config: TFConfig, group: Group) -> NoReturn:
    """Serves until the chief says goodbye, then ends this process with code 0.

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
    group.barrier(SERVERS)
    process.report("phase", phase="connected")
    logger.info("%s serves at %s until the chief is done", config.task, config.cluster.address(config.task))
    group.wait_until_left(config.cluster.tasks.index(config.cluster.chief))
    del server
    raise SystemExit(0)


def _resolver(config: TFConfig) -> Any:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({job: list(addresses) for job, addresses in config.cluster.jobs.items()}),
        task_type=config.task.type,
        task_id=config.task.index,
        rpc_layer="grpc",
        num_accelerators={"GPU": len(tf.config.get_visible_devices("GPU"))},
    )
