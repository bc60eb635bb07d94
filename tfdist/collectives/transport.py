"""What a call asks of the way its bytes take: through memory, over TCP, or both."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

import numpy as np

from tfdist.collectives import calls
from tfdist.collectives.calls import Call, Made
from tfdist.collectives.layout import Terms
from tfdist.collectives.results import Bytes
from tfdist.errors import MismatchError

# Reads the opening of a peer's message, then returns the length of its payload.
OpeningReader = Generator[memoryview, None, int]


class Opening:
    """The first bytes of one call's messages, to write and to check.

    Args:
        call: The call.
        number: Which of this task's calls it is.
        index: This task.
        names: Of all tasks.
    """

    def __init__(self, call: Call, number: int, index: int, names: Sequence[str]) -> None:
        self._call, self._number, self._index, self._names = call, number, index, names

    @property
    def length(self) -> int:
        return calls.OPENING.size + len(self._call.description)

    def message(self, size: int) -> bytes:
        """Returns what goes before a payload of so many bytes."""
        return self._call.opening(self._number, size)

    def read(self, index: int) -> OpeningReader:
        """Reads and checks a peer's opening; returns the length of the payload that follows.

        Raises:
            MismatchError: The peer makes another call.
        """
        head = bytearray(calls.OPENING.size)
        yield memoryview(head)
        length, size, number = calls.parse_opening(head, self._names[index])
        description = bytearray(length)
        yield memoryview(description)
        if description != self._call.description or number != self._number:
            mine = Made(self._index, self._names[self._index], self._number, self._call.description)
            raise calls.mismatch(mine, Made(index, self._names[index], number, description))
        return size

    def body_size(self, index: int, size: int, reduced: int) -> int:
        """Returns how much of a peer's payload comes after the bytes that are reduced.

        Raises:
            MismatchError: The payload is too short.
        """
        if size < reduced:
            raise MismatchError(f"{self._names[index]} sent {size:,} bytes to {self._call}, less than {reduced:,}")
        return size - reduced


class Transport(Protocol):
    """Moves one call's bytes between tasks."""

    def exchange(self, opening: Opening, terms: Terms, out: Bytes, body: Sequence[memoryview]) -> dict[int, Bytes]:
        """Reduces the terms of all tasks into `out`, and returns the peers' bodies by index, in task order.

        Args:
            opening: Of the call.
            terms: This task's.
            out: As long as the terms' layout.
            body: Bytes that the peers get as they are; each task's may have a length of its own.

        Raises:
            GroupError: The tasks can not go on together.
        """

    def close(self) -> None:
        """Gives back what is not the group's: memory and descriptors."""


class Scratch:
    """Memory that is kept from call to call; fresh pages would cost more than the sum."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, int], Bytes] = {}

    def bytes(self, use: str, peer: int, size: int) -> Bytes:
        """Returns so many bytes with any content, valid until the same block is asked for again."""
        block = self._blocks.get((use, peer))
        if block is None or block.size < size:
            block = self._blocks[use, peer] = np.zeros(size, np.uint8)
        return block[:size]
