"""The sums and bodies of one call over TCP connections, in two ways.

In one round every task sends everything to every other and sums for itself. In shares task i sums the i-th share of
the stream and sends the result to all: two rounds, but each byte is added once and crosses the network twice. Both add
in task order, so they give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdist.collectives.exchange import Exchange, Reader
from tfdist.collectives.layout import Terms, aligned
from tfdist.collectives.results import Bytes
from tfdist.collectives.transport import Opening, Scratch

# Up to this many bytes a task sends everything to every peer, in one round; more is summed in shares, in two rounds.
ONE_ROUND_BYTES = 128 * 1024
# Summed and sent on as soon as it has come from all tasks, while it is in the cache and the next is under way.
PIECE_BYTES = 256 * 1024


class TCP:
    """Calls between this task and those its links lead to.

    Args:
        exchange: Moves the bytes.
        index: This task.
    """

    def __init__(self, exchange: Exchange, index: int) -> None:
        self._exchange, self._links, self._index = exchange, exchange.links, index
        self._members = sorted([index, *(link.index for link in self._links)])
        self._scratch = Scratch()

    def exchange(self, opening: Opening, terms: Terms, out: Bytes, body: Sequence[memoryview]) -> dict[int, Bytes]:
        if terms.layout.nbytes * len(self._links) <= ONE_ROUND_BYTES:
            return self._in_one_round(opening, terms, out, body)
        return self._in_shares(opening, terms, out, body)

    def close(self) -> None:
        """The links are the group's."""

    def _in_one_round(self, opening: Opening, terms: Terms, out: Bytes, body: Sequence[memoryview]) -> dict[int, Bytes]:
        size, bodies = terms.layout.nbytes, {}
        parts = {link.index: self._scratch.bytes("part", link.index, size) for link in self._links}
        parts[self._index] = mine = self._stream(terms)

        def read(index: int) -> Reader:
            length = opening.body_size(index, (yield from opening.read(index)), size)
            yield parts[index].data
            bodies[index] = np.empty(length, np.uint8)
            yield bodies[index].data

        message = [memoryview(opening.message(size + sum(map(len, body)))), mine.data, *body]
        self._exchange.run(
            {link.index: message for link in self._links}, {link.index: read(link.index) for link in self._links}
        )
        terms.layout.reduce(out, [parts[member] for member in self._members], 0)
        return dict(sorted(bodies.items()))

    def _in_shares(self, opening: Opening, terms: Terms, out: Bytes, body: Sequence[memoryview]) -> dict[int, Bytes]:
        size, count, stream = terms.layout.nbytes, len(self._members), self._stream(terms)
        bounds = [min(size, aligned(size * i // count)) for i in range(count)] + [size]
        share = {member: slice(bounds[i], bounds[i + 1]) for i, member in enumerate(self._members)}
        low, own = bounds[self._members.index(self._index)], share[self._index]
        length = own.stop - own.start
        # What comes from a single peer is summed at once: a piece of memory that stays in the cache will do.
        kept = length if len(self._links) > 1 else min(length, PIECE_BYTES)
        parts = {link.index: self._scratch.bytes("part", link.index, kept) for link in self._links}
        parts[self._index] = stream[own]
        pieces = [slice(at, min(at + PIECE_BYTES, length)) for at in range(0, length, PIECE_BYTES)]
        missing = [len(self._links)] * len(pieces)
        bodies: dict[int, Bytes] = {}

        def read(index: int) -> Reader:
            bodies[index] = np.empty(opening.body_size(index, (yield from opening.read(index)), length), np.uint8)
            for number, piece in enumerate(pieces):
                part = parts[index][piece] if kept == length else parts[index][: piece.stop - piece.start]
                yield part.data
                missing[number] -= 1
                if missing[number] == 0:
                    done = out[own][piece]
                    each = [part if m == index else parts[m][piece] for m in self._members]
                    terms.layout.reduce(done, each, low + piece.start)
                    for other in self._links:
                        other.outbox.append(done.data)
            yield bodies[index].data
            yield out[share[index]].data

        messages = {}
        for link in self._links:
            part = stream[share[link.index]]
            messages[link.index] = [
                memoryview(opening.message(part.size + sum(map(len, body)))),
                part.data,
                *body,
            ]
        self._exchange.run(messages, {link.index: read(link.index) for link in self._links})
        return dict(sorted(bodies.items()))

    def _stream(self, terms: Terms) -> Bytes:
        """Returns this task's stream; where it is one array, without a copy."""
        if terms.stream is not None:
            return terms.stream
        if terms.layout.is_one_array:
            return terms.values[0].reshape(-1).view(np.uint8)
        stream = self._scratch.bytes("stream", self._index, terms.layout.nbytes)
        terms.copy(stream, 0)
        return stream
