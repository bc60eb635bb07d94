"""Which task failed first, by what the launcher knows."""

from __future__ import annotations

import pytest

from tfdist.cluster import Task
from tfdist.launch.blame import Seen, Verdict, Words, first_failure

A, B, C, D = (Task("worker", i) for i in range(4))


def lost(at, task):
    return Words(at=at, code=1, consequence=True, lost=str(task))


@pytest.mark.parametrize(
    ("tasks", "verdict"),
    [
        ([Seen(A), Seen(B)], None),
        ([Seen(A, 0, 1.0), Seen(B)], None),
        ([Seen(A, 3, 2.0), Seen(B, 4, 1.0)], Verdict(B, "own")),
        ([Seen(A), Seen(B, -9, 1.0)], Verdict(B, "own")),
        # Its words come before its death, and count.
        ([Seen(A, 1, 1.5), Seen(B, words=Words(at=1.0, code=1))], Verdict(B, "own")),
        # A consequence is heard first where the cause leaves no words.
        ([Seen(A, 1, 1.0, words=lost(0.9, B)), Seen(B, -11, 1.1)], Verdict(B, "own")),
        ([Seen(A, words=lost(0.9, B)), Seen(B)], Verdict(B, "hearsay", A)),
        ([Seen(A, words=lost(0.9, B)), Seen(B, 0, 0.5)], Verdict(B, "left")),
        ([Seen(A, words=lost(0.9, B)), Seen(B, 0, 0.5), Seen(C, 5, 0.4)], Verdict(C, "own")),
        ([Seen(A, words=lost(0.9, C)), Seen(B, words=lost(0.8, A)), Seen(C)], Verdict(C, "hearsay", A)),
        ([Seen(A, words=lost(0.9, B)), Seen(B, words=lost(0.8, A))], Verdict(B, "hearsay", B)),
        ([Seen(A, words=Words(at=0.9, code=1, consequence=True)), Seen(B)], Verdict(A, "hearsay", A)),
        # A task of another host.
        ([Seen(A, words=lost(0.9, D)), Seen(B, words=lost(0.8, A))], Verdict(A, "hearsay", A, elsewhere="worker 3")),
        ([Seen(A, words=lost(0.9, D)), Seen(B, -9, 1.0)], Verdict(B, "own")),
        # What we stopped does not count.
        ([Seen(A, -15, 1.0, stopped=True), Seen(B)], None),
        ([Seen(A, -15, 1.0, stopped=True), Seen(B, 2, 3.0)], Verdict(B, "own")),
        # What the run went on without is to blame only for what is lost for want of it.
        ([Seen(A, -9, 1.0, spared=True), Seen(B)], None),
        ([Seen(A, -9, 1.0, spared=True), Seen(B, 3, 2.0)], Verdict(B, "own")),
        ([Seen(A, -9, 1.0, spared=True), Seen(B, words=lost(2.0, A))], Verdict(A, "own")),
        ([Seen(A, -9, 1.0, spared=True), Seen(B, words=lost(2.0, C)), Seen(C)], Verdict(C, "hearsay", B)),
    ],
)
def test_the_first_failure_is_the_cause_and_not_the_consequence(tasks, verdict):
    assert first_failure(tasks) == verdict
