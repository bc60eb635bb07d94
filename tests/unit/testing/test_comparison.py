"""How far apart two results are: one number an array, the worst first."""

from __future__ import annotations

import doctest

import ml_dtypes
import numpy as np
import pytest

import tfdist
from tfdist.testing import comparison
from tfdist.testing.comparison import compare, flatten

INF = float("inf")
NAN = float("nan")


@pytest.mark.parametrize(
    ("got", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),  # of the largest, not of each
        ([1e-8, 100.0], [0.0, 100.0], 1e-10),
        ([1e-8], [0.0], 1e-6),  # the floor
        ([NAN, 1.0], [NAN, 1.0], 0.0),
        ([NAN], [1.0], INF),
        ([1.0], [NAN], INF),
        ([INF], [INF], 0.0),
        ([INF], [-INF], INF),
        ([INF, 1.5], [INF, 1.0], 0.5),
        ([3], [2], 0.5),
        ([True], [False], 100.0),
        ([1 + 1j], [1 + 1j], 0.0),
        (np.zeros((0, 3)), np.zeros((0, 3)), 0.0),
        (np.array([1.5], ml_dtypes.bfloat16), np.array([1.0], "float32"), 0.5),
        (np.array([255], "uint8"), np.array([0], "uint8"), 25500.0),
        (["a", "b"], ["a", "b"], 0.0),
        (["a", "b"], ["a", "c"], INF),
        (np.zeros(3), np.zeros(4), INF),
    ],
)
def test_the_error_of_an_array(got, expected, error):
    assert compare({"x": got}, {"x": expected}).worst == pytest.approx(error)


def test_what_one_of_them_lacks_is_infinitely_far():
    assert str(compare({"a": 1}, {"b": 1})).split() == ["b", "missing", "a", "not", "expected"]


def test_a_shape_and_a_text_that_differ_are_said():
    assert "shape (3,), expected (4,)" in str(compare({"x": np.zeros(3)}, {"x": np.zeros(4)}))
    assert "'b', expected 'c'" in str(compare(["a", "b"], ["a", "c"]))


def test_the_worst_arrays_come_first_and_only_those_too_far_are_shown():
    compared = compare({"a": 1.1, "b": 2.0, "c": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0})
    assert not compared
    assert [difference.name for difference in compared.differences] == ["b", "a", "c"]
    assert [line.split() for line in str(compared).splitlines()] == [["b", "1.0e+00"], ["a", "1.0e-01"]]


def test_a_long_table_is_cut():
    lines = str(compare(dict.fromkeys("abcdefghijklmnopqrstuvwxyz", 2), {})).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "and 6 more"


def test_tolerance_and_floor_are_the_callers():
    assert compare({"x": 1.05}, {"x": 1.0}, tolerance=0.1)
    assert compare({"x": 0.05}, {"x": 0.0}, tolerance=0.1, floor=1.0)
    assert not compare({"x": 0.05}, {"x": 0.0}, tolerance=0.1)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (3, ["result"]),
        ([1, 2], ["result"]),
        ([np.zeros(2), 1], ["[0]", "[1]"]),
        ({"log": {"loss": [1.0, 2.0]}, "w": [np.zeros(2), np.ones(3)]}, ["log.loss", "w[0]", "w[1]"]),
        ({"pairs": [(1, 2), (3, 4)]}, ["pairs[0]", "pairs[1]"]),
        ({"weights": []}, ["weights"]),
        ({}, []),
    ],
)
def test_arrays_are_named_by_their_place(value, names):
    assert list(flatten(value)) == names


def test_examples_print_what_they_say():
    assert doctest.testmod(comparison, extraglobs={"tfdist": tfdist}).failed == 0
