"""What tasks get together, for any pipeline."""

from __future__ import annotations

import pytest
import tensorflow as tf


def rows_of(dataset):
    """Per step: the rows that count, as Python values, and the rows of the whole batch."""
    steps = []
    for data, rows, total in dataset:
        part = tf.nest.flatten(data)[0]
        assert part.shape[0] >= 1, "a task without rows still needs one to run"
        steps.append((part[: int(rows)].numpy().ravel().tolist(), int(total)))
    return steps


def _in_order(pipeline, size, **place):
    parts = [rows_of(pipeline.for_task(index, size, **place)) for index in range(size)]
    assert len({len(part) for part in parts}) == 1, "every task must make the same number of steps"
    batches = []
    for step in zip(*parts, strict=True):
        sizes = [len(rows) for rows, _ in step]
        assert max(sizes) - min(sizes) <= 1, "no task may get much more than another"
        assert {total for _, total in step} == {sum(sizes)}
        batches.append([row for rows, _ in step for row in rows])
    return batches


@pytest.fixture(scope="session")
def in_order():
    """(pipeline, size, epoch=, start_step=) -> the whole batches, put together from every task's part."""
    return _in_order


@pytest.fixture(scope="session")
def cut():
    """(order, batch size) -> its batches."""

    def batches(order, batch_size, drop_remainder=False):
        order = list(order)
        whole = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
        return whole[: len(order) // batch_size] if drop_remainder else whole

    return batches
