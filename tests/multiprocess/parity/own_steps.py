"""Steps of the user's own: `train_step`, several optimizers, metrics and variables updated by hand."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from parity.cases import Run, case, dense, fitted, regression

layers, optimizers, losses = keras.layers, keras.optimizers, keras.losses


class TwoOptimizers(keras.Model):
    """A small GAN: two optimizers in a train_step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = dense(6), dense(1)
        self.generator_loss = keras.metrics.Mean(name="generator")
        self.critic_loss = keras.metrics.Mean(name="critic")

    def compile(self) -> None:
        super().compile(jit_compile=False)
        self.generator_optimizer = optimizers.Adam(1e-2, clipnorm=0.1)
        self.critic_optimizer = optimizers.SGD(0.05, momentum=0.9)
        self.crossentropy = losses.BinaryCrossentropy(from_logits=True)

    @property
    def metrics(self) -> list:
        return [self.generator_loss, self.critic_loss]

    def train_step(self, data: Any) -> dict:
        x, y = data
        ones, zeros = tf.ones((tf.shape(x)[0], 1)), tf.zeros((tf.shape(x)[0], 1))
        with tf.GradientTape() as tape:
            judged = self.critic(tf.concat([x, self.generator(x)], 0))
            critic_loss = self.crossentropy(tf.concat([ones, zeros], 0), judged)
        weights = self.critic.trainable_weights
        self.critic_optimizer.apply_gradients(zip(tape.gradient(critic_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            made = self.generator(x)
            loss = self.crossentropy(ones, self.critic(made)) + tf.reduce_mean((made[:, :1] - y) ** 2)
        weights = self.generator.trainable_weights
        self.generator_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.generator_loss.update_state(loss)
        self.critic_loss.update_state(critic_loss)
        return {"generator": self.generator_loss.result(), "critic": self.critic_loss.result(), "raw": critic_loss}


@case
def two_optimizers(run: Run) -> dict:
    """A `train_step` with two optimizers."""
    x, y = regression(40)
    with run.scope():
        model = TwoOptimizers()
        model.compile()
        model.built = True
    return fitted(model, x, y, batch_size=13)


class GuideStep(keras.Model):
    """The train_step of Keras' own guide: it logs every metric under its name, the compiled ones as one."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = dense()

    def call(self, x: Any, training: bool = False) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


@case(core=True)
def train_step_of_the_guide(run: Run) -> dict:
    """The `train_step` of Keras' guide."""
    x, y = regression(40)
    with run.scope():
        model = GuideStep()
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    history = model.fit(x, y, batch_size=13, epochs=2, verbose=0, shuffle=False)
    logs = {f"log {name}": np.array([_numbers(v) for v in values]) for name, values in history.history.items()}
    return {**logs, **{f"weight {i}": w for i, w in enumerate(model.get_weights())}}


def _numbers(value: Any) -> list[float]:
    return [float(v) for v in keras.tree.flatten(value)]


class OwnLogs(GuideStep):
    """Logs numbers of its own, one of them under the name of a metric that it never updates."""

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "twice": 2 * loss}


@case
def train_step_with_logs_of_its_own(run: Run) -> dict:
    """A `train_step` with logs of its own."""
    x, y = regression(40)
    with run.scope():
        model = OwnLogs()
        model.compile("adam", "mse", jit_compile=False)
    return fitted(model, x, y, batch_size=13)


class Counting(GuideStep):
    """Counts its steps in a variable that it updates inside tf.cond."""

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(name="count", initializer="zeros", trainable=False)

    def train_step(self, data: Any) -> dict:
        tf.cond(self.optimizer.iterations >= 0, lambda: self.count.assign_add(1.0), lambda: self.count.assign(0.0))
        return super().train_step(data)


@case
def variable_updated_inside_a_cond(run: Run) -> dict:
    """A variable updated inside a `tf.cond`."""
    x, y = regression(40)
    with run.scope():
        model = Counting()
        model.build((None, 6))
        model.compile("adam", "mse", jit_compile=False)
    model.fit(x, y, batch_size=13, epochs=2, verbose=0, shuffle=False)
    return {f"weight {i}": w for i, w in enumerate(model.get_weights())}


class TakingTurns(GuideStep):
    """Trains two layers of the same shape, each with an optimizer of its own in some of the steps."""

    def build(self, shape: Any) -> None:
        self.first, self.second = layers.Dense(1), layers.Dense(1)
        self.first.build(shape)
        self.second.build(shape)
        self.steps = self.add_weight(name="steps", dtype="int32", initializer="zeros", trainable=False)

    def call(self, x: Any, training: Any = None) -> Any:
        return self.first(tf.sin(x)) + self.second(x)

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        step = tf.identity(self.steps)
        self.steps.assign_add(1)
        turns = ((self.other, self.second, step % 2 == 0), (self.optimizer, self.first, step % 3 != 1))
        for optimizer, layer, is_its_turn in turns:
            gradients = tape.gradient(loss, layer.trainable_variables)

            def update(optimizer: Any = optimizer, layer: Any = layer, gradients: Any = gradients) -> bool:
                optimizer.apply(gradients, layer.trainable_variables)
                return True

            tf.cond(is_its_turn, update, lambda: False)
        return {"error": loss}


@case
def optimizers_inside_a_cond(run: Run) -> dict:
    """A `train_step` that runs its optimizers inside a `tf.cond`, each in some of the steps."""
    x, y = regression(60)
    with run.scope():
        model = TakingTurns()
        model.build((None, 6))
        model.other = optimizers.SGD(0.05)
        model.compile(optimizers.SGD(0.05), "mse", jit_compile=False)
        model.other.build(model.second.trainable_variables)
        model.optimizer.build(model.first.trainable_variables)
    return fitted(model, x, y, batch_size=7)


class LoggingItsLoss(GuideStep):
    """Logs its loss under the name of a metric that has not seen it."""

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        return {"loss": loss}


@case
def train_step_that_logs_its_loss(run: Run) -> dict:
    """A `train_step` that logs its loss, and updates no metric."""
    x, y = regression(40)
    with run.scope():
        model = LoggingItsLoss()
        model.compile("adam", "mse", jit_compile=False)
    return fitted(model, x, y, batch_size=13)
