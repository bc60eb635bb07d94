"""What of each worker's share was counted: nothing twice, and what is missing is known."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.trainer.shares import Reading, Share


def test_what_was_counted_does_not_count_again():
    share = Share()
    assert share.count(0, 4)
    assert not share.count(2, 4), "two of them were counted"
    assert share.next == 4


def test_a_gap_is_missing_until_it_is_counted():
    share = Share()
    share.count(0, 2)
    share.count(5, 2)
    share.ended = True
    assert list(share.missing()) == [2, 3, 4]
    assert not share.is_whole
    assert share.count(2, 3)
    assert share.is_whole
    assert share.next == 7


def test_without_a_known_end_everything_behind_is_missing():
    share = Share()
    share.count(1, 1)
    assert list(itertools.islice(share.missing(), 3)) == [0, 2, 3]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5))))
def test_each_element_counts_once_in_any_order(results):
    share, counted = Share(), []
    for first, count in results:
        if share.count(first, count):
            counted += range(first, first + count)
    assert len(counted) == len(set(counted))
    share.ended = True
    assert set(share.missing()) == set(range(max(counted, default=-1) + 1)) - set(counted)


@pytest.fixture
def reading():
    """Two workers, four closures in flight, each of two steps."""

    def of(steps: int | None) -> Reading:
        return Reading([Share(), Share()], steps, 4)

    return of


def test_an_epoch_of_given_steps_asks_for_no_more(reading):
    epoch = reading(5)
    asked = []
    while count := epoch.next_count(2):
        epoch.begin(count)
        asked.append(count)
    assert asked == [2, 2, 1]
    epoch.end(0, 2, 0, 1, goes_on=True)
    assert epoch.next_count(2) == 1, "one step was not found"


def test_a_closure_that_found_nothing_is_not_replaced_until_another_one_found_something(reading):
    """Else a worker whose share has ended would take closure after closure while the other one works."""
    epoch = reading(None)
    for _ in range(4):
        epoch.begin(2)
    epoch.end(0, 2, -1, 0, goes_on=False)
    assert epoch.next_count(2) == 0
    epoch.end(1, 2, 0, 2, goes_on=True)
    assert epoch.next_count(2) == 2


def test_an_epoch_is_over_when_those_that_are_there_have_ended(reading):
    epoch = reading(None)
    epoch.begin(2)
    epoch.end(0, 2, 0, 1, goes_on=False)
    assert not epoch.is_over(missing_workers=set())
    assert epoch.is_over(missing_workers={1})
    assert not epoch.is_over(missing_workers={0, 1}), "nobody is there: one must come back"


def test_rows_that_a_worker_read_once_more_do_not_count(reading):
    epoch = reading(6)
    for _ in range(2):
        epoch.begin(2)
    assert epoch.end(0, 2, 0, 2, goes_on=True)
    assert not epoch.end(0, 2, 0, 2, goes_on=True)
    assert epoch.steps_left() == 4
