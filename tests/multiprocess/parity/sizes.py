"""Batches that divide, and those that do not."""

from __future__ import annotations

import keras

from parity.cases import Run, case, regression, trained

layers, optimizers, losses = keras.layers, keras.optimizers, keras.losses


@case(core=True)
def even(run: Run) -> dict:
    """Batches that all tasks share evenly."""
    return trained(
        run, rows=48, batch_size=12, validation_data=regression(20, 1), predict=regression(13, 2)[0], metrics=["mae"]
    )


@case(core=True)
def uneven(run: Run) -> dict:
    """Batches that no number of tasks shares evenly, the last one smaller."""
    return trained(run, validation_data=regression(7, 1), predict=regression(7, 2)[0], metrics=["mae"])


@case
def one_batch_of_13(run: Run) -> dict:
    """One batch."""
    return trained(run, rows=13, epochs=3)


@case(core=True)
def fewer_rows_than_tasks(run: Run) -> dict:
    """Fewer rows than tasks."""
    return trained(
        run, rows=5, batch_size=2, epochs=3, validation_data=regression(1, 1), predict=regression(1)[0], metrics=["mae"]
    )


@case
def batches_of_one(run: Run) -> dict:
    """Batches of one row."""
    return trained(run, rows=4, batch_size=1, metrics=["mae"])
