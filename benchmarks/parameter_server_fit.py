"""Trains through two workers and two ps, all servers of this process: `parameter_server_fit.py ours|tf_keras STEPS`.

Each line read is the name of one of WAYS; the answer is the seconds that so many steps took. The first of each name
also traces. `parameter_servers.py` runs it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
if sys.argv[1] == "tf_keras":
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tf_keras as keras
else:
    import keras

import numpy as np
import portpicker
import tensorflow as tf

BATCH_SIZE = 64
WAYS = {"own data, k=1": ("own", 1), "own data, k=8": ("own", 8), "fed arrays, k=1": ("fed", 1)}
SERVERS: list[Any] = []


def main(kind: str, steps: int) -> None:
    strategy = strategy_of(kind, start_servers())
    fits: dict[str, Callable[[], None]] = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in fits:
            fits[name] = trainer(kind, strategy, *WAYS[name], steps)
        start = time.perf_counter()
        fits[name]()
        print(f"took {time.perf_counter() - start}", flush=True)


def start_servers() -> Any:
    """Returns the resolver of a cluster."""
    jobs = {"worker": 2, "ps": 2}
    spec = tf.train.ClusterSpec(
        {job: [f"127.0.0.1:{portpicker.pick_unused_port()}" for _ in range(n)] for job, n in jobs.items()}
    )
    # A step occupies a thread while it waits for a variable, and the servers of one process share their threads.
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=5)
    for job, count in jobs.items():
        for index in range(count):
            SERVERS.append(tf.distribute.Server(spec, job_name=job, task_index=index, config=config))
    return tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")


def strategy_of(kind: str, resolver: Any) -> Any:
    if kind == "tf_keras":
        return tf.distribute.ParameterServerStrategy(resolver)
    from tfdist.parameter_server import make_strategy

    return make_strategy(resolver, seed=1, step_timeout_s=120)


def trainer(kind: str, strategy: Any, source: str, steps_per_execution: int, steps: int) -> Callable[[], None]:
    """Returns a function that trains for so many steps."""
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH_SIZE * (64 if source == "own" else steps), 20)).astype("float32")
    y = (x.sum(axis=1, keepdims=True) > 0).astype("float32")

    def share(context: tf.distribute.InputContext) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices((x, y)).shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.repeat().batch(BATCH_SIZE, drop_remainder=True).prefetch(8)

    with strategy.scope():
        inner = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(64, activation="relu")]
        model = keras.Sequential([keras.Input((20,)), *inner, keras.layers.Dense(1, activation="sigmoid")])
        metrics = ["accuracy", keras.metrics.AUC()]
        model.compile("adam", "binary_crossentropy", metrics=metrics, steps_per_execution=steps_per_execution)

    def fit() -> None:
        if source == "fed":
            model.fit(x, y, batch_size=BATCH_SIZE, verbose=0)
            return
        data = tf.keras.utils.experimental.DatasetCreator(share) if kind == "tf_keras" else share
        model.fit(data, steps_per_epoch=steps, verbose=0)

    return fit


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
