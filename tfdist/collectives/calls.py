"""What a collective call says of itself to the peers, so that a difference becomes an error with both sides' words.

Every message of a call opens with a fixed header and the call's description: kind, tag, and what all tasks must agree
on. Equal descriptions are equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tfdist.collectives.reduction import Array
from tfdist.errors import MismatchError

OPENING = struct.Struct("!4sIQQ")  # magic, length of the description, number of the call, length of the payload
MAGIC = b"tfdc"

MAX_TAG = 200
# Longer lists of arrays travel as a digest: still compared exactly, but the first difference can't be named.
MAX_DESCRIPTION = 32768
# An all_gather's payload is allocated as announced; this only stops what can not be meant.
MAX_PAYLOAD = 1 << 40


@dataclass(frozen=True)
class Call:
    """One collective call as this task makes it.

    Attributes:
        kind: Name of the method.
        tag: The caller's name for it.
        detail: What else must agree: op, root, dtype.
        arrays: "float32[3,4]" for each array, where all tasks must bring the same.
        size: Bytes of all arrays.
    """

    kind: str
    tag: str
    detail: str = ""
    arrays: tuple[str, ...] = ()
    size: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.tag, str) or len(self.tag) > MAX_TAG:
            raise ValueError(f"a tag is a text of at most {MAX_TAG} characters, not {self.tag!r:.300}")

    def __str__(self) -> str:
        return f"{self.kind} {self.tag!r}"

    @cached_property
    def description(self) -> bytes:
        arrays: Any = self.arrays
        description = _dump(self, arrays)
        if len(description) > MAX_DESCRIPTION:
            arrays = hashlib.sha256(json.dumps(arrays).encode()).hexdigest()
            description = _dump(self, [len(self.arrays), arrays])
        return description

    def opening(self, number: int, payload: int) -> bytes:
        """Returns the first bytes of this call's message to a peer."""
        return OPENING.pack(MAGIC, len(self.description), number, payload) + self.description


def _dump(call: Call, arrays: Any) -> bytes:
    return json.dumps([call.kind, call.tag, call.detail, arrays, call.size]).encode()


def array_text(array: Array) -> str:
    """Returns "float32[3,4]"."""
    return f"{array.dtype.name}[{','.join(map(str, array.shape))}]"


def parse_opening(opening: bytes | bytearray, peer: str) -> tuple[int, int, int]:
    """Returns the lengths of the description and of the payload, and the call's number."""
    magic, length, number, payload = OPENING.unpack(opening)
    if magic != MAGIC or length > 2 * MAX_DESCRIPTION or payload > MAX_PAYLOAD:
        raise MismatchError(f"{peer} sent bytes that open no call: {bytes(opening)!r}")
    return length, payload, number


@dataclass(frozen=True)
class Made:
    """A call as one task made it: what was made, by whom, and which of its calls it was."""

    index: int
    name: str
    number: int
    description: bytes | bytearray


def mismatch(one: Made, other: Made) -> MismatchError:
    """Returns the error that names two tasks' calls; both tasks say it in the same words."""
    first, second = sorted((one, other), key=lambda made: made.index)
    texts, arrays = [], []
    for made in (first, second):
        try:
            kind, tag, detail, its_arrays, size = _parse(made.description)
        except (ValueError, TypeError, RecursionError):
            return MismatchError(f"{made.name} sent a call that can not be read: {bytes(made.description[:200])!r}")
        number = f" as its call number {made.number}" if one.number != other.number else ""
        texts.append(f"{made.name} called {_words(kind, tag, detail, its_arrays, size)}{number}")
        arrays.append(its_arrays)
    text = ", ".join(texts)
    if len(arrays[0]) == len(arrays[1]):
        different = [i for i, (a, b) in enumerate(zip(*arrays, strict=True)) if a != b]
        if different and len(arrays[0][different[0]]) < 64:  # else it is a digest
            i = different[0]
            text += f": array {i} is {arrays[0][i]} in {first.name} and {arrays[1][i]} in {second.name}"
    return MismatchError(f"{text}. All tasks must make the same calls in the same order")


def _parse(description: bytes | bytearray) -> tuple[str, str, str, list[str], int]:
    kind, tag, detail, arrays, size = json.loads(description)
    return str(kind)[:80], str(tag)[:MAX_TAG], str(detail)[:80], [str(array)[:200] for array in arrays], int(size)


def _words(kind: str, tag: str, detail: str, arrays: Sequence[str], size: int) -> str:
    facts = [detail] if detail else []
    if arrays:
        names = sorted({array.partition("[")[0] for array in arrays})
        facts += [", ".join(names[:4]), f"{len(arrays)} array{'s' if len(arrays) != 1 else ''}", f"{size:,} bytes"]
    return f"{kind} {tag!r}" + (f" ({', '.join(facts)})" if facts else "")
