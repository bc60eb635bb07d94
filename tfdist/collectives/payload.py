"""Arrays as the bytes of a message and back, where tasks bring arrays of differing shapes."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.collectives.reduction import Array, dtype_named
from tfdist.collectives.results import Bytes
from tfdist.errors import MismatchError

_MAX_DIMENSIONS = 64  # NumPy's own limit


def view_bytes(array: Array) -> memoryview:
    """Returns the memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def pack_array(array: Array) -> list[memoryview]:
    """Returns an array's shape and data; the dtype is agreed on elsewhere."""
    shape = struct.pack(f"!B{array.ndim}Q", array.ndim, *array.shape)
    return [memoryview(shape), view_bytes(array)]


def unpack_array(body: Bytes, dtype: np.dtype[Any], peer: str) -> Array:
    """Returns the array that `pack_array` packed.

    Raises:
        MismatchError: The body is something else.
    """
    try:
        (dimensions,) = struct.unpack_from("!B", body.data)
        shape = struct.unpack_from(f"!{dimensions}Q", body.data, 1)
        return _unpack(body[1 + 8 * dimensions :], dtype, shape)
    except (struct.error, ValueError) as error:
        raise MismatchError(f"{peer} sent an array that can not be read: {error}") from None


def pack_arrays(arrays: Sequence[Array]) -> list[memoryview]:
    """Returns dtypes, shapes and data of several arrays."""
    heading = json.dumps([[array.dtype.name, array.shape] for array in arrays]).encode()
    return [memoryview(struct.pack("!I", len(heading)) + heading), *map(view_bytes, arrays)]


def unpack_arrays(body: Bytes, peer: str) -> list[Array]:
    """Returns the arrays that `pack_arrays` packed.

    Raises:
        MismatchError: The body is something else, or holds a dtype that this task does not know.
    """
    try:
        (length,) = struct.unpack_from("!I", body.data)
        at, arrays = 4 + length, []
        for name, shape in json.loads(body[4:at].tobytes()):
            dtype = dtype_named(name)
            size = math.prod(shape) * dtype.itemsize
            arrays.append(_unpack(body[at : at + size], dtype, shape))
            at += size
        if at != body.size:
            raise ValueError(f"{body.size:,} bytes where {at:,} were announced")
    except (struct.error, ValueError, TypeError, ImportError, RecursionError) as error:
        raise MismatchError(f"{peer} sent arrays that can not be read: {error}") from None
    return arrays


def _unpack(data: Bytes, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    if len(shape) > _MAX_DIMENSIONS or math.prod(shape) * dtype.itemsize != data.size:
        raise ValueError(f"{data.size:,} bytes for an array of shape {tuple(shape)} and dtype {dtype}")
    # The data lies behind a heading of any length: copied, it is aligned again.
    array: Array = data.copy().view(dtype)
    return array.reshape(shape)
