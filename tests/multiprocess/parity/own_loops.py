"""Loops of the user's own, as TensorFlow's guides have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from parity.cases import Run, case, dense, regression

layers, optimizers, losses = keras.layers, keras.optimizers, keras.losses


def _own_loop(run: Run, distribute: Callable[[Any], Any]) -> dict:
    """A training and a test loop: `strategy.run`, `strategy.reduce`, a Keras optimizer, Keras metrics."""
    strategy = run.strategy or tf.distribute.get_strategy()
    with run.scope():
        model = dense()
        optimizer = optimizers.Adam(0.01)
        error = keras.metrics.MeanAbsoluteError()
        per_row = losses.MeanSquaredError(reduction=None)
        optimizer.build(model.trainable_variables)

    def average(y: Any, y_pred: Any) -> Any:
        return tf.nn.compute_average_loss(per_row(y, y_pred), global_batch_size=12)

    @tf.function
    def train(batch: Any) -> Any:
        def replica(data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = model(x, training=True)
                loss = average(y, y_pred)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            error.update_state(y, y_pred)
            return loss

        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica, args=(batch,)), axis=None)

    @tf.function
    def test(batch: Any) -> Any:
        def replica(data: Any) -> Any:
            x, y = data
            return average(y, model(x, training=False))

        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica, args=(batch,)), axis=None)

    training, testing = distribute(regression(48)), distribute(regression(24, 1))
    logs = []
    for _ in range(2):
        trained_losses = [float(train(batch)) for batch in training]
        logs.append([sum(trained_losses) / 4, float(error.result()), sum(float(test(batch)) for batch in testing) / 2])
        error.reset_state()
    return {"logs": np.array(logs), **{f"weight {i}": w for i, w in enumerate(model.get_weights())}}


@case(core=True)
def own_loop_over_a_distributed_dataset(run: Run) -> dict:
    """`strategy.run` over `experimental_distribute_dataset`."""

    def distribute(arrays: Any) -> Any:
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
        data = tf.data.Dataset.from_tensor_slices(arrays).batch(12).with_options(options)
        return (run.strategy or tf.distribute.get_strategy()).experimental_distribute_dataset(data)

    return _own_loop(run, distribute)


@case
def own_loop_over_datasets_from_a_function(run: Run) -> dict:
    """`strategy.run` over `distribute_datasets_from_function`."""

    def distribute(arrays: Any) -> Any:
        def mine(context: tf.distribute.InputContext) -> tf.data.Dataset:
            # Rows of one global batch stay together, whatever the number of tasks.
            size = context.get_per_replica_batch_size(12)
            data = tf.data.Dataset.from_tensor_slices(arrays).batch(size)
            return data.shard(context.num_input_pipelines, context.input_pipeline_id)

        return (run.strategy or tf.distribute.get_strategy()).distribute_datasets_from_function(mine)

    return _own_loop(run, distribute)
