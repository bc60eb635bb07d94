"""Which failures may pass, and how often and when tasks are started again."""

from __future__ import annotations

import pytest

from tfdist.cluster import Task
from tfdist.launch.blame import Verdict, Words
from tfdist.launch.restarts import Restarts, is_retryable, is_retryable_end

A, B = Task("worker", 0), Task("worker", 1)


@pytest.mark.parametrize(
    ("code", "may_pass"),
    [(-9, True), (-11, True), (42, True), (75, True), (137, True), (192, True)]
    + [(1, False), (2, False), (3, False), (128, False), (193, False), (255, False)],
)
def test_an_end_may_pass_by_its_code(code, may_pass):
    assert is_retryable_end(code, None) == may_pass


def test_the_loss_of_another_may_pass_and_an_error_of_its_own_may_not():
    assert is_retryable_end(1, Words(at=0.0, code=1, consequence=True, lost="worker 1"))
    assert not is_retryable_end(1, Words(at=0.0, code=1))


def test_a_run_may_pass_by_its_first_failure():
    assert is_retryable(Verdict(A, "own"), -9, None)
    assert not is_retryable(Verdict(A, "own"), 1, Words(at=0.0, code=1))
    assert is_retryable(Verdict(A, "hearsay", B), 1, None)
    assert is_retryable(Verdict(A, "hearsay", A, elsewhere="worker 7"), 1, None)
    assert not is_retryable(Verdict(A, "left"), 0, None)


def test_pauses_double_up_to_a_limit_and_single_tasks_do_not_count():
    restarts = Restarts(20)
    assert restarts.take("worker 1", "it died") == "1 of 20"
    pauses = []
    for _ in range(7):
        pauses.append(restarts.pause_s)
        restarts.take(None, "it failed")
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert restarts.are_left


def test_there_are_no_more_than_were_allowed():
    restarts = Restarts(2)
    assert (restarts.take(None, "a"), restarts.are_left) == ("1 of 2", True)
    assert (restarts.take("ps 0", "b"), restarts.are_left) == ("2 of 2", False)
    assert [restart.why for restart in restarts.made] == ["a", "b"]
    assert not Restarts(0).are_left
