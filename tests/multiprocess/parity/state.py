"""Layers with a state or random numbers."""

from __future__ import annotations

import keras

from parity.cases import Run, case, regression, trained

layers, optimizers, losses = keras.layers, keras.optimizers, keras.losses


def batch_norm(synchronized: bool, epsilon: float = 1e-3) -> keras.Model:
    norm = {"momentum": 0.8, "synchronized": synchronized, "epsilon": epsilon}
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, use_bias=False),
            layers.BatchNormalization(**norm),
            layers.Activation("tanh"),
            layers.Dense(8, use_bias=False),
            layers.BatchNormalization(**norm),
            layers.Dense(1),
        ]
    )


@case(core=True)
def batch_norm_synchronized(run: Run) -> dict:
    return trained(
        run,
        optimizer=lambda: optimizers.SGD(0.05),
        model=lambda: batch_norm(True),
        epochs=3,
        validation_data=regression(9, 3),
        predict=regression(9, 2)[0],
    )


@case
def batch_norm_synchronized_with_few_rows(run: Run) -> dict:
    # Two rows normalise to -1 and 1 whatever they were, and rounding is all that is left of the gradient: one process
    # in float32 then differs by 1e-4 from itself in float64. A large epsilon makes it a fair question.
    return trained(
        run,
        optimizer=lambda: optimizers.SGD(0.05),
        model=lambda: batch_norm(True, epsilon=1.0),
        rows=5,
        batch_size=2,
        epochs=3,
    )


@case(differs="moving statistics are the share-weighted mean of the tasks' own; each task normalizes by its own rows")
def batch_norm_plain(run: Run) -> dict:
    return trained(run, optimizer=lambda: optimizers.SGD(0.05), model=lambda: batch_norm(False), rows=48, batch_size=24)


@case(differs="each task draws its own numbers, from one seed")
def dropout(run: Run) -> dict:
    def model() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), layers.Dense(16), layers.Dropout(0.5, seed=3), layers.Dense(1)])

    return trained(run, model=model, rows=48, batch_size=12)
