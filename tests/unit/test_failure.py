"""What is told of an exception that ends a task."""

from __future__ import annotations

import json

import pytest

from tfdist import failure
from tfdist.cluster import Task
from tfdist.errors import MeetingError, PeerLostError, WaitError


def raised(error, cause=None):
    try:
        raise error from cause
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "consequence", "lost"),
    [
        (ValueError("bad"), False, None),
        (WaitError("late"), False, None),
        (WaitError("worker 1 is late", task=Task("worker", 1)), True, "worker 1"),
        (PeerLostError("worker 1 died", task=Task("worker", 1)), True, "worker 1"),
        (PeerLostError("somebody died"), True, None),
        (raised(RuntimeError("step failed"), PeerLostError("gone", task=Task("ps", 0))), True, "ps 0"),
        (RuntimeError("UnknownError: PeerLostError: worker 1 left at step 5 with code 0\nTraceback"), True, "worker 1"),
        (MeetingError("worker 1 came, and ended"), True, None),
        (MeetingError("nobody came", timed_out=True), False, None),
        (raised(MeetingError("late", timed_out=True), WaitError("late", task=Task("worker", 1))), False, "worker 1"),
    ],
)
def test_an_error_about_another_task_is_told_as_such(error, consequence, lost):
    told = failure.describe(error, task="worker 0", code=1, step=3)
    assert (told["consequence"], told["lost"]) == (consequence, lost)


def test_what_is_told_is_plain_and_has_the_traceback():
    told = json.loads(json.dumps(failure.describe(raised(ValueError("bad")), task=None, code=1, step=None)))
    assert told["error"] == "ValueError"
    assert told["message"] == "bad"
    assert "raise error from cause" in told["traceback"]


def test_a_huge_message_is_cut():
    assert len(json.dumps(failure.describe(ValueError("x" * 10**6), task=None, code=1, step=None))) < 30_000


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("a\nb"), "ValueError: a"), (KeyError(), "KeyError"), (ValueError("  "), "ValueError")],
)
def test_one_line_names_the_kind(error, line):
    assert failure.one_line(error) == line
