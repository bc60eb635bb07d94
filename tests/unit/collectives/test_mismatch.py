"""Tasks that make different calls get an error with the words of both, on every task."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.collectives.calls import MAX_TAG
from tfdist.errors import GroupError, MismatchError

ONE = np.ones(256, np.float32)


def reduce(tag="gradients", arrays=(ONE,), op="sum"):
    return lambda group: group.all_reduce(list(arrays), op=op, tag=tag)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            reduce(),
            lambda group: group.barrier("end"),
            "worker 0 called all_reduce 'gradients' (sum, float32, 1 array, 1,024 bytes), "
            "worker 1 called barrier 'end'",
        ),
        (reduce("loss"), reduce("accuracy"), "all_reduce 'accuracy'"),
        (reduce(op="sum"), reduce(op="max"), "all_reduce 'gradients' (max,"),
        (reduce(), reduce(arrays=[ONE.astype(np.float64)]), "array 0 is float32[256] in worker 0 and float64[256]"),
        (
            reduce(arrays=[ONE, ONE]),
            reduce(arrays=[ONE, ONE.reshape(2, 128)]),
            "array 1 is float32[256] in worker 0 and float32[2,128] in worker 1",
        ),
        (reduce(), reduce(arrays=[ONE, ONE]), "2 arrays, 2,048 bytes"),
        (reduce(), reduce(arrays=[np.ones(1 << 20)]), "float64, 1 array, 8,388,608 bytes"),
        (reduce(arrays=[]), reduce(), "1 array"),
        (
            lambda group: group.all_gather(np.ones(2, np.int32), tag="rows"),
            lambda group: group.all_gather(np.ones(2, np.int64), tag="rows"),
            "all_gather 'rows' (int64)",
        ),
        (
            lambda group: group.broadcast([ONE], root=0, tag="w"),
            lambda group: group.broadcast([ONE], root=1, tag="w"),
            "broadcast 'w' (from worker 1)",
        ),
        (
            lambda group: group.all_gather_bytes(b"x", tag="t"),
            lambda group: group.all_gather(np.ones(1), tag="t"),
            "all_gather_bytes 't'",
        ),
        (
            reduce(arrays=[ONE] * 5000),
            reduce(arrays=[ONE] * 4999 + [ONE.reshape(16, 16)]),
            "5,120,000 bytes",
        ),
    ],
    ids=[
        "kind",
        "tag",
        "op",
        "dtype",
        "shape",
        "count",
        "size",
        "none and one",
        "gathered dtype",
        "root",
        "gathers",
        "thousands of arrays",
    ],
)
def test_different_calls_are_named_on_both_tasks(make_together, first, second, message):
    errors = make_together(2).run(first, second)
    assert [type(error) for error in errors] == [MismatchError, MismatchError]
    assert message in str(errors[0])
    assert all("worker 0 called" in str(error) and "worker 1 called" in str(error) for error in errors)


def test_one_different_task_among_three_is_an_error_on_all(make_together):
    errors = make_together(3).run(reduce(), reduce(), reduce("other"))
    assert [type(error) for error in errors] == [MismatchError] * 3
    assert all("worker 2 called all_reduce 'other'" in str(error) for error in errors)


def test_a_broken_group_raises_the_same_error_for_ever(make_together):
    together = make_together(2)
    first = together.run(reduce("a"), reduce("b"))
    again = together.run(lambda group: group.barrier("after"))
    assert [(type(e), str(e)) for e in again] == [(type(e), str(e)) for e in first]


@pytest.mark.parametrize("tag", ["x" * (MAX_TAG + 1), 5, None])
def test_a_tag_is_a_short_text(make_together, tag):
    together = make_together(2)
    errors = together.run(lambda group: group.barrier(tag))
    assert all("a tag is a text of at most 200 characters" in str(error) for error in errors)
    together.values(lambda group: group.barrier("still whole"))


def test_no_call_can_follow_a_goodbye(make_together):
    together = make_together(2)
    together.values(lambda group: group.leave(0))
    errors = together.run(lambda group: group.barrier("late"))
    assert all(isinstance(error, GroupError) and "has left the group" in str(error) for error in errors)
