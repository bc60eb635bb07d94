"""Plain values and arrays come out of the file as they went in; nothing else goes in."""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from pathlib import Path

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfdist.cluster import Task
from tfdist.errors import TravelError
from tfdist.testing import values


def sent(value, folder):
    path = str(folder / "value.npz")
    values.write(path, value)
    return values.read(path)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        1 << 80,
        2.5,
        math.inf,
        "text\n\ud800",
        b"\x00\xff",
        1 + 2j,
        [],
        (),
        {},
        [1, (2, [3, {"a": None}])],
        {1: "int", (2, 3): "tuple", None: "none", "x": {4, 5}},
        {"list": 1},
        {"dict": [1]},
        frozenset({"a"}),
        Path("a/b"),
        Task("worker", 1),
    ],
    ids=repr,
)
def test_a_plain_value_comes_back_equal_and_of_its_type(value, tmp_path):
    got = sent(value, tmp_path)
    assert got == value
    assert type(got) is type(value) or isinstance(value, Path)


def test_nan_and_minus_zero_come_back(tmp_path):
    nan, zero = sent([math.nan, -0.0], tmp_path)
    assert math.isnan(nan)
    assert math.copysign(1, zero) == -1


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="int8").reshape(2, 3),
        np.zeros((0, 4), "float32"),
        np.array(2.5, "float16"),
        np.array([[1, 2]], ">i4"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([1.5, -2], ml_dtypes.bfloat16),
        np.array([[0.5]], ml_dtypes.float8_e4m3fn),
        np.array(["a", "bcd"]),
        np.array([b"x", b""]),
        np.array(["2026-01-02"], "datetime64[D]"),
        np.array([b"a", "b", None], object),
        np.array([True, False]),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_an_array_comes_back_with_its_dtype_shape_and_elements(array, tmp_path):
    got = sent({"x": [array]}, tmp_path)["x"][0]
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert got.tolist() == array.tolist()


@pytest.mark.parametrize("scalar", [np.float32(0.1), np.int64(-3), np.bool_(True), ml_dtypes.bfloat16(1.5)], ids=repr)
def test_a_numpy_scalar_stays_one(scalar, tmp_path):
    got = sent(scalar, tmp_path)
    assert type(got) is type(scalar)
    assert got == scalar


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.constant([1.0, 2.0]),
        lambda: tf.Variable([1.0, 2.0]),
        lambda: keras.Variable([1.0, 2.0]),
        lambda: keras.ops.convert_to_tensor([1.0, 2.0]),
    ],
    ids=["tensor", "variable", "keras variable", "keras tensor"],
)
def test_tensors_and_variables_arrive_as_arrays(make, tmp_path):
    got = sent(make(), tmp_path)
    assert type(got) is np.ndarray
    assert got.tolist() == [1.0, 2.0]


def test_tensors_of_text_arrive_as_bytes(tmp_path):
    assert sent(tf.constant(["a", "é"]), tmp_path).tolist() == [b"a", "é".encode()]


def test_a_subclass_of_dict_arrives_as_a_dict(tmp_path):
    assert type(sent(OrderedDict(a=1), tmp_path)) is dict


def nested():
    value: list = []
    value.append(value)
    return value


def model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


REFUSED = {
    "an object": (lambda: {"a": [1, object()]}, r"it\['a'\]\[1\] is an object.*; send numbers, text"),
    "a key": (lambda: {object: 1}, r"it \(the key <class 'object'>\) is a type"),
    "a function": (lambda: [print], r"it\[0\] is a builtin_function_or_method.*make it inside the function"),
    "a model": (lambda: {"m": model()}, r"it\['m'\] is a keras\..*return model.get_weights\(\)"),
    "a history": (keras.callbacks.History, r"it is a keras\..*History.*return its .history"),
    "a symbolic tensor": (lambda: keras.Input((2,)), "it is a keras"),
    "objects in an array": (lambda: np.array([object()]), r"it.ravel\(\)\[0\] is an object"),
    "records": (lambda: np.zeros(2, "i4,f4"), r"it is an array of dtype .*; send its fields"),
    "itself": (nested, "is nested deeper than 100 levels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_sent_is_named_with_its_place_and_the_way_out(name, tmp_path):
    make, message = REFUSED[name]
    with pytest.raises(TravelError, match=message):
        values.write(str(tmp_path / "value.npz"), make(), what="it")
    assert list(tmp_path.iterdir()) == []


def test_a_pickle_in_the_file_is_not_read(tmp_path):
    path = tmp_path / "value.npz"
    with open(path, "wb") as file:
        np.savez(file, text=np.frombuffer(b'{"array": 0}', np.uint8), **{"array 0": np.array([{}], object)})
    with pytest.raises(ValueError, match="allow_pickle"):
        values.read(str(path))
    path.write_bytes(pickle.dumps(1))
    with pytest.raises(ValueError, match="allow_pickle"):
        values.read(str(path))
