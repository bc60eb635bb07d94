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
from dataclasses import dataclass

import numpy as np

from tfdist.collectives import segment
from tfdist.collectives.layout import MAX_CUTS, Cut, Terms, aligned
from tfdist.collectives.reduction import Array
from tfdist.collectives.results import Bytes
from tfdist.collectives.segment import PLACES, Segment
from tfdist.collectives.transport import Opening
from tfdist.collectives.waiting import Wait, Watch
from tfdist.errors import MismatchError

# More tasks than this sum in shares: each would read more than it saves in waiting.
MAX_DIRECT = 3
# Sums up to this size are not worth a second round.
DIRECT_BYTES = 64 * 1024
# A peer that comes later than this is slept for: a few times what a wake-up costs both sides.
SPIN_S = 200e-6
_NOTHING: Bytes = np.empty(0, np.uint8)


class Neighbour:
    """A task of this host: its segment, and what wakes it."""

    def __init__(self, index: int, its_segment: Segment, wake_fd: int) -> None:
        self.index, self.segment, self.wake_fd = index, its_segment, wake_fd


@dataclass(frozen=True)
class _Views:
    """A cut of the stream in one place: where this task's arrays go, and every task's bytes to reduce."""

    cut: Cut
    places: list[Array]
    parts: list[list[Array]]


class Memory:
    """Calls between this task and its neighbours.

    Args:
        mine: This task; its wake_fd becomes readable when a neighbour has published.
        neighbours: The others.
        watch: What to ask while waiting.

    Attributes:
        me, neighbours, members: The tasks, all of them in task order.
    """

    def __init__(self, mine: Neighbour, neighbours: Sequence[Neighbour], watch: Watch) -> None:
        self.me, self.neighbours, self._watch = mine, sorted(neighbours, key=_index), watch
        self.members = sorted([mine, *neighbours], key=_index)
        self._pieces = {task.index: task.segment.pieces for task in neighbours}
        self._views: dict[tuple[Cut, int], _Views] = {}
        self._number = 0
        self._spin_s = SPIN_S if len(self.members) <= (os.cpu_count() or 1) else 0.0
        self._poll = select.poll()
        self._poll.register(mine.wake_fd, select.POLLIN)
        self._poll.register(watch.wake_fd, select.POLLIN)

    def exchange(self, opening: Opening, terms: Terms, out: Bytes, body: Sequence[memoryview]) -> dict[int, Bytes]:
        call = _Call(self, opening, terms, out, body)
        if len(self.members) > MAX_DIRECT and terms.layout.nbytes > DIRECT_BYTES:
            return call.in_shares()
        return call.directly()

    def close(self) -> None:
        for task in self.members:
            os.close(task.wake_fd)
        self._views, self._pieces = {}, {}
        self.members, self.neighbours = [], []
        del self.me  # with the segments

    # For _Call

    def next_place(self) -> int:
        """Returns the place of the next piece."""
        self._number += 1
        return self._number % PLACES

    def meet(self) -> None:
        """Publishes this task's next piece, and returns when all have published theirs."""
        self.me.segment.publish(self._number)
        for task in self.neighbours:
            os.eventfd_write(task.wake_fd, 1)
        if not self._spin():
            self._sleep()
        segment.fence()

    def pieces(self, index: int, place: int) -> Bytes:
        """Returns what a neighbour has in a place."""
        return self._pieces[index][place]

    def views(self, cut: Cut, place: int, size: int) -> _Views:
        """Returns a cut's arrays in a place; making them anew for each call would cost more than a small sum."""
        views = self._views.get((cut, place))
        if views is None:
            if len(self._views) >= MAX_CUTS:
                self._views.clear()
            places = cut.places(self.me.segment.pieces[place][:size])
            parts = [cut.views(task.segment.pieces[place][:size]) for task in self.members]
            views = self._views[cut, place] = _Views(cut, places, parts)
        return views

    def _pending(self) -> list[int]:
        return [task.index for task in self.neighbours if task.segment.published[0] < self._number]

    def _sleep(self) -> None:
        wait, pending = Wait(self._watch), self._pending()
        # What happened before was told once, maybe while another peer was waited for.
        ends_soon = self._watch.faults.check(pending)
        while True:
            before, pending = len(pending), self._pending()
            if not pending:
                return
            if len(pending) < before:
                wait.moved()
            if ends_soon and self._watch.faults.check(pending):
                # All that a peer that is gone published was seen just now.
                raise self._watch.faults.late(pending)
            events = self._poll.poll(wait.poll_ms)
            if not events:
                wait.look(pending)
            ends_soon = False
            for fd, _ in events:
                if fd == self._watch.wake_fd:
                    ends_soon = wait.woken(pending)
                else:
                    with suppress(BlockingIOError):
                        os.eventfd_read(fd)

    def _spin(self) -> bool:
        """Returns whether all others publish within some microseconds."""
        number, until, spin_s = self._number, 0.0, self._spin_s
        for task in self.neighbours:
            published = task.segment.published
            while published[0] < number:
                now = time.perf_counter()
                until = until or now + spin_s
                if now > until:
                    return False
        return True


class _Call:
    """One call: its stream (the terms' bytes, then the body), and how far it has got."""

    def __init__(self, memory: Memory, opening: Opening, terms: Terms, out: Bytes, body: Sequence[memoryview]) -> None:
        self._memory, self._opening, self._terms, self._out = memory, opening, terms, out
        self._body = [np.frombuffer(view, np.uint8) for view in body if len(view)] if body else ()
        self._body_size = sum([view.size for view in self._body]) if body else 0
        self._body_at = aligned(terms.layout.nbytes)
        self._bodies: dict[int, Bytes] = {}
        self._head: bytes | None = None

    def directly(self) -> dict[int, Bytes]:
        """Every task sums everything."""
        layout, at, end = self._terms.layout, 0, 1
        while at < end:
            place = self._memory.next_place()
            size = min(max(0, layout.nbytes - at), segment.PIECE_BYTES)
            views = self._memory.views(layout.cut(at, size), place, size)
            views.cut.fill(views.places, self._terms.values, self._terms.weight)
            self._pass(place, at)
            out = self._out if size == self._out.size else self._out[at : at + size]
            views.cut.reduce(views.cut.views(out), views.parts)
            at += segment.PIECE_BYTES
            end = self._end()
        return self._all_bodies()

    def in_shares(self) -> dict[int, Bytes]:
        """Every task sums its share of each piece."""
        memory, layout, count = self._memory, self._terms.layout, len(self._memory.members)
        mine = memory.members.index(memory.me)
        for at in range(0, layout.nbytes, segment.PIECE_BYTES):
            size = min(layout.nbytes - at, segment.PIECE_BYTES)
            bounds = [min(size, aligned(size * i // count)) for i in range(count)] + [size]
            share = slice(bounds[mine], bounds[mine + 1])
            place = memory.next_place()
            self._terms.copy(memory.me.segment.pieces[place][:size], at)
            self._pass(place, None)
            parts = [task.segment.pieces[place][share] for task in memory.members]
            place = memory.next_place()
            layout.reduce(memory.me.segment.pieces[place][: share.stop - share.start], parts, at + share.start)
            self._pass(place, None)
            for task, first, last in zip(memory.members, bounds, bounds[1:], strict=False):
                self._out[at + first : at + last] = task.segment.pieces[place][: last - first]
        for at in range(self._body_at, self._end(), segment.PIECE_BYTES):
            self._pass(memory.next_place(), at)
        return self._all_bodies()

    def _pass(self, place: int, body_from: int | None) -> None:
        """Publishes what is in this place, and waits for the others.

        Args:
            place: Which.
            body_from: Which byte of the stream lies first in it, where the bodies' bytes that follow cross too.
        """
        is_first = self._head is None
        mine = self._memory.me.segment
        if is_first:
            self._head = self._opening.message(self._body_size)
            mine.heads[place][: len(self._head)] = self._head
        if body_from is not None and self._body_size:
            self._write_body(mine.pieces[place], self._body_at - body_from)
        self._memory.meet()
        if is_first:
            self._read_heads(place)
        if body_from is not None:
            for index, body in self._bodies.items():
                self._read_body(body, self._memory.pieces(index, place), self._body_at - body_from)

    def _write_body(self, piece: Bytes, start: int) -> None:
        for view in self._body:
            first, last = max(0, start), min(piece.size, start + view.size)
            if first < last:
                piece[first:last] = view[first - start : last - start]
            start += view.size

    def _read_heads(self, place: int) -> None:
        head = self._head
        assert head is not None
        for task in self._memory.neighbours:
            theirs = task.segment.heads[place]
            size = self._body_size if bytes(theirs[: len(head)]) == head else _read(self._opening, task.index, theirs)
            if size:
                self._bodies[task.index] = np.empty(size, np.uint8)

    @staticmethod
    def _read_body(body: Bytes, piece: Bytes, start: int) -> None:
        first, last = max(0, start), min(piece.size, start + body.size)
        if first < last:
            body[first - start : last - start] = piece[first:last]

    def _all_bodies(self) -> dict[int, Bytes]:
        return {task.index: self._bodies.get(task.index, _NOTHING) for task in self._memory.neighbours}

    def _end(self) -> int:
        """Returns where the longest stream ends."""
        if not self._body_size and not self._bodies:
            return self._terms.layout.nbytes
        longest = max([self._body_size, *[body.size for body in self._bodies.values()]])
        return self._body_at + longest


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


def _index(task: Neighbour) -> int:
    return task.index
