"""Tasks that leave, late or early, in peace or with an error; and what the others are told."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tfdist.cluster import Task
from tfdist.collectives import waiting
from tfdist.errors import GroupError, PeerLostError, WaitError


def wait_in_barrier(group):
    group.progress(7)
    group.barrier("end")


def test_a_task_that_left_with_code_0_is_missed_by_those_who_wait_for_it(make_together):
    def leave(group):
        group.progress(5)
        group.leave(0)

    _, error = make_together(2).run(leave, wait_in_barrier)
    assert isinstance(error, PeerLostError)
    assert error.task == Task("worker", 0)
    expected = "worker 0 left at step 5 with code 0, while worker 1 waited for it in barrier 'end' at step 7"
    assert str(error) == expected


def test_the_reason_of_a_goodbye_is_passed_on(make_together):
    together = make_together(2)
    _, error = together.run(lambda group: group.leave(1, "ValueError: bad shape"), wait_in_barrier)
    assert str(error).startswith("worker 0 left with code 1: ValueError: bad shape, while worker 1 waited")


@pytest.mark.parametrize(
    ("leave", "words"),
    [
        (lambda group: group.close(), "worker 0 left, while"),
        (lambda group: group.__exit__(ValueError, ValueError("bad"), None), "worker 0 left: ValueError: bad, while"),
    ],
    ids=["close", "an error in a with block"],
)
def test_closing_says_goodbye(make_together, leave, words):
    error = make_together(2).run(leave, wait_in_barrier)[1]
    assert str(error).startswith(words)


def test_a_task_that_leaves_in_peace_after_its_last_call_disturbs_nobody(make_together):
    """Worker 0 is through with the call, and gone, while the data is still on its way to worker 1."""
    brought = np.ones(1 << 20, np.float32)

    def last_call(group):
        (total,) = group.all_reduce([brought], tag="last")
        group.leave(0)
        group.close()
        return float(total.sum())

    assert make_together(3).values(last_call) == [3.0 * (1 << 20)] * 3


def test_leaving_waits_until_the_others_have_said_goodbye(make_together):
    may_leave = threading.Event()
    order = []

    def first(group):
        threading.Timer(0.1, may_leave.set).start()
        group.leave(0, wait_s=20)
        order.append("first")

    def second(group):
        assert may_leave.wait(10)
        order.append("second")
        group.leave(0, wait_s=20)

    make_together(2).values(first, second)
    assert order == ["second", "first"]


def test_leaving_waits_no_longer_than_told(make_together):
    together = make_together(2)
    together.groups[0].leave(0, wait_s=0.1)
    together.groups[0].leave(0)  # the second goodbye is none


def test_leaving_does_not_wait_for_the_dead(make_together):
    together = make_together(2)
    together.groups[1].close()
    together.groups[0].leave(0, wait_s=60)


def test_leaving_ends_a_call_in_another_thread(make_together):
    together = make_together(2)
    group = together.groups[0]
    errors = []

    def wait():
        try:
            group.barrier("never")
        except GroupError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    group.leave(1, "stopped")
    waiting.join(10)
    assert errors
    assert "worker 0 has left the group" in errors[0]


def test_a_live_task_that_does_not_come_is_named_with_what_it_does(make_together):
    together = make_together(2, step_timeout_s=0.5, heartbeat_timeout_s=1.0)
    together.values(lambda group: group.barrier("start"))
    over = threading.Event()

    def absent(group):
        group.progress(3)
        assert over.wait(10)
        return "came back"

    def waits(group):
        try:
            group.all_reduce([1.0], tag="gradients")
        finally:
            over.set()

    back, error = together.run(absent, waits)
    assert back == "came back"
    assert isinstance(error, WaitError)
    assert "did not come to all_reduce 'gradients' within 0.5 s, while worker 1 waited there" in str(error)
    assert str(error).startswith("worker 0 (alive, at step 3, after barrier 'start')")


def test_a_task_that_comes_too_late_is_told_that_it_was_given_up(make_together):
    together = make_together(2, step_timeout_s=0.3)
    assert isinstance(together.run(lambda group: None, wait_in_barrier)[1], WaitError)

    def comes_late(group):
        # Worker 1's part of the first call is here; it may be through before it hears that worker 1 gave up.
        wait_in_barrier(group)
        wait_in_barrier(group)

    late = together.run(comes_late, lambda group: None)[0]
    assert isinstance(late, WaitError)
    assert "worker 1 gave up" in str(late)


def test_waiting_long_in_a_call_is_logged(make_together, monkeypatch, caplog):
    monkeypatch.setattr(waiting, "FIRST_WORD_S", 0.05)
    monkeypatch.setattr(waiting, "NEXT_WORD_S", 0.1)
    make_together(2, step_timeout_s=0.4).run(lambda group: None, wait_in_barrier)
    words = [record.message for record in caplog.records if "is waiting for" in record.message]
    assert 2 <= len(words) <= 4
    assert words[0].startswith("worker 1 is waiting for worker 0 in barrier 'end' at step 7 (0 s of 0 s)")


def test_an_error_of_one_task_is_blamed_by_all_others(make_together):
    """Worker 2 comes when worker 1, which it hears of, has already ended because of worker 0."""
    together = make_together(3)
    together.groups[0].leave(1, "ValueError: first cause")
    error = together.run(lambda g: None, wait_in_barrier, lambda g: None)[1]
    assert error.task == Task("worker", 0)
    together.groups[1].leave(1, f"PeerLostError: {error}")
    together.groups[1].close()
    last = together.run(lambda g: None, lambda g: None, wait_in_barrier)[2]
    assert isinstance(last, PeerLostError)
    assert last.task == Task("worker", 0)
    assert "ValueError: first cause" in str(last)
