"""A parameter-server cluster in one process: the chief and the servers of all workers and ps, for tests.

TensorFlow's side of it is whole: gRPC between servers, closures, variables on ps. But nobody can die alone, and
Python's state is one for all.

A process that had such a cluster is no good for anything else: TensorFlow renames its device from localhost to chief,
so that every variable, model, lookup table and iterator made before is lost ("unknown device"), and servers never end:
each cluster keeps some 450 threads, 13 sockets and 200 MB. So a local cluster gives it a process of its own (`task`).
"""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from tfdist import devices, process, tf_config
from tfdist.cluster import Task, TFConfig
from tfdist.launch.ports import HeldPorts
from tfdist.parameter_server import make_strategy

# A server ends with its process, and holds its port until then.
_running: list[Any] = []


def start(workers: int, ps: int, *, seed: int, step_timeout_s: float) -> tf.distribute.ParameterServerStrategy:
    """Starts servers in this process and returns a strategy on them; this process is their chief from now on.

    Call it before anything else of TensorFlow, and once: see above.
    """
    ports = HeldPorts(1 + workers + ps)
    cluster = tf_config.local_cluster(chief=True, workers=workers, ps=ps, ports=ports.ports)
    os.environ["TF_GRPC_REUSE_PORT"] = "1"  # a server binds the port that is held for it
    os.environ["TF_CONFIG"] = tf_config.build(cluster, cluster.chief)
    process.set_current(process.Current(TFConfig(cluster, cluster.chief)))
    # Each server would take a GPU's memory as its own.
    tf.config.set_visible_devices([], "GPU")
    config = devices.server_config()
    # A step occupies a thread while it waits for a variable, and the servers of one process share their threads.
    config.inter_op_parallelism_threads = workers + ps + 1
    served = {job: list(addresses) for job, addresses in cluster.jobs.items() if job != "chief"}
    spec = tf.train.ClusterSpec(served)
    tasks = [Task(job, index) for job, addresses in served.items() for index in range(len(addresses))]
    servers = [tf.distribute.Server(spec, job_name=task.type, task_index=task.index, config=config) for task in tasks]
    _running.extend((ports, *servers))
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    return make_strategy(resolver, seed=seed, step_timeout_s=step_timeout_s)
