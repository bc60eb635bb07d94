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


def mismatch(
    mine: Call, number: int, me: str, theirs: bytes | bytearray, their_number: int, peer: str
) -> MismatchError:
    """Returns the error that names both tasks' calls."""
    try:
        kind, tag, detail, arrays, size = _parse(theirs)
    except (ValueError, TypeError, RecursionError):
        return MismatchError(f"{peer} sent a call that can not be read: {bytes(theirs[:200])!r}")
    text = f"{me} called {_words(mine.kind, mine.tag, mine.detail, mine.arrays, mine.size)}, "
    text += f"{peer} called {_words(kind, tag, detail, arrays, size)}"
    if number != their_number:
        text += f" (their calls number {number} and {their_number})"
    elif (kind, tag) == (mine.kind, mine.tag) and len(arrays) == len(mine.arrays):
        different = [i for i, (a, b) in enumerate(zip(mine.arrays, arrays, strict=True)) if a != b]
        if different:
            first = different[0]
            text += f": array {first} is {mine.arrays[first]} in {me} and {arrays[first]} in {peer}"
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
