"""Plain values -> a file that holds no code -> the same values: how arguments, results and errors travel.

What travels: None, truth values, numbers, text, bytes, paths, `Task`; NumPy arrays and scalars of any dtype, bfloat16
and text too; lists, tuples, sets and dicts of these. TensorFlow's tensors, variables and Keras' variables arrive as
NumPy arrays. The file is one .npz: the values as JSON, and the arrays beside it. Nothing is pickled.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from tfdist.cluster import Task
from tfdist.collectives.reduction import dtype_named
from tfdist.errors import TravelError

Array = npt.NDArray[Any]
# Longer ones are no values but something that refers to itself.
DEEPEST = 100
TRAVELS = "numbers, text, bytes, paths, arrays and tensors, and lists, tuples, sets and dicts of them"


def write(path: str, value: object, *, what: str = "the value") -> None:
    """Writes `value` to `path`, whole or not at all.

    Raises:
        TravelError: Something in it can not be sent; the message says where it is, by `what` and the keys to it.
    """
    arrays: list[Array] = []
    text = json.dumps(encode(value, arrays, what=what))
    named = {f"array {i}": array for i, array in enumerate(arrays)}
    with open(path + ".part", "wb") as file:
        np.savez(file, allow_pickle=False, text=np.frombuffer(text.encode(), np.uint8), **named)
    os.replace(path + ".part", path)


def read(path: str) -> Any:
    """Returns what `write` wrote to `path`."""
    with np.load(path, allow_pickle=False) as file:
        return decode(json.loads(file["text"].tobytes()), lambda i: file[f"array {i}"])


def encode(value: Any, arrays: list[Array], *, what: str, depth: int = 0) -> Any:
    """Returns `value` as JSON, its arrays appended to `arrays`.

    A list is a list, and every other value that JSON lacks an object with one item: {kind: content}.
    """
    if depth > DEEPEST:
        raise TravelError(f"{what} is nested deeper than {DEEPEST} levels")

    def inner(item: Any, where: str) -> Any:
        return encode(item, arrays, what=f"{what}{where}", depth=depth + 1)

    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [inner(item, f"[{i}]") for i, item in enumerate(value)]
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [inner(item, f"[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        return {"dict": [[inner(key, f" (the key {key!r})"), inner(item, f"[{key!r}]")] for key, item in value.items()]}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, PurePath):
        return {"path": str(value)}
    if isinstance(value, Task):
        return {"task": [value.type, value.index]}
    if isinstance(value, np.generic):
        return {"scalar": _encode_array(np.asarray(value), arrays, what)}
    if isinstance(value, np.ndarray) or (hasattr(value, "__array__") and hasattr(value, "dtype")):
        return {"array": _encode_array(_to_array(value, what), arrays, what)}
    raise TravelError(f"{what} is {_named(value)}, which can not be sent between a test and its tasks; {_hint(value)}")


def _to_array(value: Any, what: str) -> Array:
    try:
        return np.asarray(value)
    except Exception as error:
        # A symbolic tensor, a distributed value.
        raise TravelError(f"{what} is {_named(value)}, which is no array yet: {error}") from error


def _encode_array(array: Array, arrays: list[Array], what: str) -> Any:
    if array.dtype.kind in "biufcSUmM":
        arrays.append(array)
        return len(arrays) - 1
    if array.dtype.kind == "O":
        # TensorFlow's strings.
        items = [encode(item, arrays, what=f"{what}.ravel()[{i}]", depth=1) for i, item in enumerate(array.ravel())]
        return {"shape": array.shape, "items": items}
    try:
        dtype_named(array.dtype.name)
    except (TypeError, ValueError):
        raise TravelError(f"{what} is an array of dtype {array.dtype}; send its fields one by one") from None
    arrays.append(np.frombuffer(array.tobytes(), np.uint8))
    return {"shape": array.shape, "dtype": array.dtype.name, "number": len(arrays) - 1}


def decode(value: Any, array: Callable[[int], Array]) -> Any:
    """Returns the value that `encode` encoded; `array` returns the array of a number."""
    if isinstance(value, list):
        return [decode(item, array) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "array":
        return _decode_array(content, array)
    if kind == "scalar":
        return _decode_array(content, array)[()]
    content = decode(content, array)
    return _DECODERS[kind](content)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "complex": lambda parts: complex(*parts),
    "bytes": base64.b64decode,
    "path": Path,
    "task": lambda parts: Task(*parts),
}


def _decode_array(content: Any, array: Callable[[int], Array]) -> Array:
    if isinstance(content, int):
        return array(content)
    if "items" in content:
        flat: Array = np.empty(len(content["items"]), object)
        flat[:] = [decode(item, array) for item in content["items"]]
    else:
        flat = array(content["number"]).view(dtype_named(content["dtype"]))
    shaped: Array = flat.reshape(content["shape"])
    return shaped


def _named(value: object) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _hint(value: object) -> str:
    if hasattr(value, "get_weights") and hasattr(value, "compile"):
        return "return model.get_weights(), or save it with tfdist.save and return the path"
    if type(value).__name__ == "History":
        return "return its .history"
    if callable(value):
        return "make it inside the function that runs on the tasks"
    return f"send {TRAVELS}"
