"""The sums and bodies of one call through memory that the tasks of a host share.

A message crosses in pieces. For each piece a task copies its own into its segment, publishes the number, waits until
all have published theirs, and reads them there. Pieces take two places in turn: whoever has published piece n has read
all pieces n - 1, so that piece n + 1 may take their place.

Up to three tasks each sum all pieces for themselves. More sum in shares: task i sums the i-th part of a piece, and puts
the result into its segment as its next piece. Both add in task order, so they give the same bits.

A wait looks at the numbers for some microseconds, then sleeps until a peer writes to this task's eventfd or the group
wants to be asked. Each publication writes to the peers' eventfds, whether they sleep or not: so no wake-up is lost.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from tfdist.collectives import segment
from tfdist.collectives.layout import Terms, aligned
from tfdist.collectives.results import Bytes
from tfdist.collectives.segment import PLACES, Segment
from tfdist.collectives.transport import Opening
from tfdist.collectives.waiting import Wait, Watch
from tfdist.errors import MismatchError

# More tasks than this sum in shares: each would read more than it saves in waiting.
MAX_DIRECT = 3
# Sums up to this size are not worth a second round.
DIRECT_BYTES = 64 * 1024
# A peer that comes later than this is slept for. As long as a wake-up takes: longer would cost others the processor.
SPIN_S = 50e-6


class Neighbour:
    """A task of this host: its segment, and what wakes it."""

    def __init__(self, index: int, its_segment: Segment, wake_fd: int) -> None:
        self.index, self.segment, self.wake_fd = index, its_segment, wake_fd


class Memory:
    """Calls between this task and its neighbours.

    Args:
        mine: This task; its wake_fd becomes readable when a neighbour has published.
        neighbours: The others.
        watch: What to ask while waiting.
    """

    def __init__(self, mine: Neighbour, neighbours: Sequence[Neighbour], watch: Watch) -> None:
        self._mine, self._neighbours, self._watch = mine, list(neighbours), watch
        self._all = sorted([mine, *neighbours], key=lambda task: task.index)
        self._number = 0
        self._spin_s = SPIN_S if _processors() > 1 else 0.0
        self._poll = select.poll()
        self._poll.register(mine.wake_fd, select.POLLIN)
        self._poll.register(watch.wake_fd, select.POLLIN)

    def exchange(self, opening: Opening, terms: Terms, out: Bytes, body: Sequence[memoryview]) -> dict[int, Bytes]:
        call = _Call(self, opening, terms, out, body)
        if len(self._all) > MAX_DIRECT and terms.layout.nbytes > DIRECT_BYTES:
            return call.in_shares()
        return call.directly()

    def close(self) -> None:
        for task in self._all:
            os.close(task.wake_fd)
        self._all, self._neighbours = [], []
        del self._mine  # with the segments

    # For _Call

    @property
    def members(self) -> list[Neighbour]:
        return self._all

    @property
    def me(self) -> Neighbour:
        return self._mine

    @property
    def place(self) -> int:
        """The place of the piece that is written next, or was published last and is read now."""
        return self._number % PLACES

    def wait(self) -> Wait:
        return Wait(self._watch)

    def next_place(self) -> int:
        self._number += 1
        return self.place

    def meet(self, wait: Wait) -> None:
        """Publishes the piece in this place, and returns when all have published theirs."""
        self._mine.segment.publish(self._number)
        for task in self._neighbours:
            os.eventfd_write(task.wake_fd, 1)
        self._await(wait)
        segment.fence()

    def _pending(self) -> list[int]:
        return [task.index for task in self._neighbours if task.segment.published[0] < self._number]

    def _await(self, wait: Wait) -> None:
        if self._spin():
            return
        wait.moved()  # this task, for one
        pending = self._pending()
        while pending:
            events = self._poll.poll(wait.poll_ms)
            before, ends_soon = len(pending), False
            for fd, _ in events:
                if fd == self._watch.wake_fd:
                    ends_soon = wait.woken(pending)
                else:
                    with suppress(BlockingIOError):
                        os.eventfd_read(fd)
            pending = self._pending()
            if len(pending) < before:
                wait.moved()
            if pending and ends_soon and self._watch.check(pending):
                # Of a peer that is gone all that it published is seen here already.
                raise self._watch.late(pending)
            if pending and not events:
                wait.look(pending)

    def _spin(self) -> bool:
        """Returns whether all others publish within some microseconds."""
        until, number = time.perf_counter() + self._spin_s, self._number
        for task in self._neighbours:
            published = task.segment.published
            while published[0] < number:
                if time.perf_counter() > until:
                    return False
        return True


class _Call:
    """One call: its stream (the terms' bytes, then the body), and how far it has got."""

    def __init__(self, memory: Memory, opening: Opening, terms: Terms, out: Bytes, body: Sequence[memoryview]) -> None:
        self._memory, self._opening, self._terms, self._out = memory, opening, terms, out
        self._body = [np.frombuffer(view, np.uint8) for view in body if len(view)]
        self._body_size = sum(view.size for view in self._body)
        self._body_at = aligned(terms.layout.nbytes)
        self._bodies: dict[int, Bytes] = {}
        self._wait = memory.wait()
        self._is_open = False

    def directly(self) -> dict[int, Bytes]:
        """Every task sums everything."""
        layout, at, end = self._terms.layout, 0, 1
        while at < end:
            size = min(max(0, layout.nbytes - at), segment.PIECE_BYTES)
            parts = self._pass(at, size)
            if size:
                layout.reduce(self._out[at : at + size], parts, at)
            at += segment.PIECE_BYTES
            end = self._end()
        return dict(sorted(self._bodies.items()))

    def in_shares(self) -> dict[int, Bytes]:
        """Every task sums its share of each piece."""
        layout, count = self._terms.layout, len(self._memory.members)
        mine = self._memory.members.index(self._memory.me)
        for at in range(0, layout.nbytes, segment.PIECE_BYTES):
            size = min(layout.nbytes - at, segment.PIECE_BYTES)
            bounds = [min(size, aligned(size * i // count)) for i in range(count)] + [size]
            low, high = bounds[mine], bounds[mine + 1]
            parts = self._pass(at, size, with_body=False)
            place = self._memory.next_place()
            share = self._memory.me.segment.pieces[place][: high - low]
            layout.reduce(share, [part[low:high] for part in parts], at + low)
            self._memory.meet(self._wait)
            for task, first, last in zip(self._memory.members, bounds, bounds[1:], strict=False):
                self._out[at + first : at + last] = task.segment.pieces[place][: last - first]
        for at in range(self._body_at, self._end(), segment.PIECE_BYTES):
            self._pass(at, 0)
        return dict(sorted(self._bodies.items()))

    def _pass(self, at: int, size: int, *, with_body: bool = True) -> list[Bytes]:
        """Passes the stream's piece that begins at `at`; returns its terms, `size` bytes of each task."""
        place = self._memory.next_place()
        mine = self._memory.me.segment.pieces[place]
        is_first, self._is_open = not self._is_open, True
        if is_first:
            message = self._opening.message(self._body_size)
            self._memory.me.segment.heads[place][: len(message)] = message
        if size:
            self._terms.copy(mine[:size], at)
        if with_body and self._body_size:
            self._copy_body(mine, at)
        self._memory.meet(self._wait)
        if is_first:
            self._read_openings(place)
        if with_body:
            for task in self._memory.members:
                self._read_body(task, place, at)
        return [task.segment.pieces[place][:size] for task in self._memory.members]

    def _copy_body(self, piece: Bytes, at: int) -> None:
        start = self._body_at - at  # of each view, from the piece's beginning
        for view in self._body:
            first, last = max(0, start), min(piece.size, start + view.size)
            if first < last:
                piece[first:last] = view[first - start : last - start]
            start += view.size

    def _read_openings(self, place: int) -> None:
        length = self._opening.length
        mine = bytes(self._memory.me.segment.heads[place][:length])
        for task in self._memory.members:
            if task is self._memory.me:
                continue
            theirs = task.segment.heads[place]
            size = self._body_size if theirs[:length] == mine else _read(self._opening, task.index, theirs)
            self._bodies[task.index] = np.empty(size, np.uint8)

    def _read_body(self, task: Neighbour, place: int, at: int) -> None:
        body = self._bodies.get(task.index)
        if body is None or not body.size:
            return
        start = self._body_at - at
        first, last = max(0, start), min(segment.PIECE_BYTES, start + body.size)
        if first < last:
            body[first - start : last - start] = task.segment.pieces[place][first:last]

    def _end(self) -> int:
        """Returns where the longest stream ends."""
        longest = max([self._body_size, *(body.size for body in self._bodies.values())])
        return self._body_at + longest if longest else self._terms.layout.nbytes


def _read(opening: Opening, index: int, head: memoryview) -> int:
    """Returns the length of the body that a peer's opening announces.

    Raises:
        MismatchError: The peer makes another call.
    """
    reader, at = opening.read(index), 0
    try:
        wanted = next(reader)
        while True:
            if at + len(wanted) > len(head):
                raise MismatchError("a peer wrote an opening that is too long")
            wanted[:] = head[at : at + len(wanted)]
            at += len(wanted)
            wanted = next(reader)
    except StopIteration as end:
        size: int = end.value
        return size


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
