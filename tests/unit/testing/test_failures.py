"""An exception of another process becomes itself again, or honestly none."""

from __future__ import annotations

import os

import pytest
import tensorflow as tf

from tfdist.cluster import Task
from tfdist.errors import MeetingError, PeerLostError
from tfdist.testing import failures


class WithNames(Exception):
    def __init__(self, reason, *, count):
        super().__init__(f"{reason}: {count}")
        self.count = count


class WithText(Exception):
    def __str__(self):
        return "always this"


class Unsendable(Exception):
    def __init__(self, thing):
        super().__init__(thing)
        self.thing = thing

    def __str__(self):
        return f"about {type(self.thing).__name__}"


def raised(make):
    try:
        make()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def sent(error, folder):
    path = str(folder / "failure.npz")
    failures.write(path, error)
    return failures.rebuild(failures.read(path))


@pytest.mark.parametrize(
    "make",
    [
        lambda: {}["key"],
        lambda: 1 / 0,
        lambda: int("x"),
        lambda: os.stat("/no/such/file"),
        lambda: b"\xff".decode(),
        lambda: pytest.skip("not today"),
        lambda: pytest.fail("no"),
        lambda: tf.reshape(tf.zeros(3), (2, 2)),
        lambda: tf.constant([1]) + tf.constant([1.0]),
    ],
    ids=["key", "division", "value", "file", "unicode", "skip", "fail", "invalid argument", "two dtypes"],
)
def test_an_exception_is_rebuilt_with_its_type_text_and_arguments(make, tmp_path):
    error = raised(make)
    got = sent(error, tmp_path)
    assert type(got) is type(error)
    assert str(got) == str(error)
    assert got.args == error.args


def test_what_an_exception_holds_comes_with_it(tmp_path):
    assert sent(FileNotFoundError(2, "no", "name"), tmp_path).filename == "name"
    assert sent(WithNames("full", count=3), tmp_path).count == 3
    assert sent(MeetingError("late", timed_out=True), tmp_path).timed_out is True
    assert sent(PeerLostError("gone", task=Task("worker", 1)), tmp_path).task == Task("worker", 1)
    assert str(sent(WithText(), tmp_path)) == "always this"


@pytest.mark.parametrize(
    "error",
    [Unsendable(object()), SystemExit(0), KeyboardInterrupt(), GeneratorExit()],
    ids=lambda error: type(error).__name__,
)
def test_one_that_can_not_be_rebuilt_or_would_end_the_test_is_none(error, tmp_path):
    assert sent(error, tmp_path) is None


def test_a_type_that_is_not_to_be_found_is_none(tmp_path):
    class Local(Exception):
        pass

    assert sent(Local("x"), tmp_path) is None


def test_only_exceptions_are_made(tmp_path):
    called = failures.Failure("builtins", "print", "", ("called",), {}, 0.0)
    assert failures.rebuild(called) is None
