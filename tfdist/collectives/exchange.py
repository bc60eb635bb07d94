"""Moves the bytes of one call: sends to and receives from all peers at once, on non-blocking sockets.

What to receive is written as a generator per peer: it yields the memory to fill next and runs on when that is full.
It may append to any link's `outbox` meanwhile. Nothing here can deadlock on full socket buffers, since no side stops
reading in order to write.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

# Memory to fill with the peer's next bytes; ends when the peer has sent all.
Reader = Generator[memoryview, None, None]

_READ = select.POLLIN | select.POLLHUP | select.POLLERR
_MAX_VIEWS = 16  # per sendmsg; the kernel allows 1,024
_READS_PER_TURN = 4  # then the other links get their turn
FIRST_WORD_S, NEXT_WORD_S = 30.0, 60.0


@dataclass(eq=False)
class Link:
    """The data connection to one peer."""

    index: int
    name: str
    sock: socket.socket
    outbox: deque[memoryview] = field(default_factory=deque)
    reader: Reader | None = None
    wanted: memoryview | None = None
    watched: int = 0

    def __post_init__(self) -> None:
        self.sock.setblocking(False)
        self.fd = self.sock.fileno()

    def advance(self) -> None:
        """Asks the reader what to fill next; memory of no size is full already."""
        assert self.reader is not None
        self.wanted = None
        for wanted in self.reader:
            if len(wanted):
                self.wanted = wanted
                return


class Exchange:
    """Runs calls over the links of one group.

    Args:
        links: One per peer.
        wake_fd: Readable when `check` should be asked at once.
        check: Given the peers still waited for, raises if the call can not end; returns whether to expect that soon.
        lost: Returns the error for a peer whose connection ended.
        late: Returns the error for peers that did not come in time.
    """

    def __init__(
        self,
        links: Sequence[Link],
        *,
        wake_fd: int,
        check: Callable[[Sequence[int]], bool],
        lost: Callable[[int], Exception],
        late: Callable[[Sequence[int]], Exception],
    ) -> None:
        self._links = links
        self._by_fd = {link.fd: link for link in links}
        self._check, self._lost, self._late = check, lost, late
        self._wake_fd = wake_fd
        self._poll = select.poll()
        self._poll.register(wake_fd, select.POLLIN)

    def run(
        self,
        messages: Mapping[int, Sequence[memoryview]],
        readers: Mapping[int, Reader],
        *,
        timeout_s: float,
        on_wait: Callable[[Sequence[str], float], None],
    ) -> None:
        """Sends `messages` and runs `readers` to their ends, both by the peer's index.

        The time-out counts from the last byte that moved in either direction.
        """
        try:
            for link in self._links:
                link.outbox.extend(view for view in messages[link.index] if len(view))
                link.reader = readers[link.index]
                link.advance()
            self._move(timeout_s, on_wait)
        finally:
            for link in self._links:
                link.outbox.clear()
                link.reader = link.wanted = None
                self._watch(link, 0)

    def _move(self, timeout_s: float, on_wait: Callable[[Sequence[str], float], None]) -> None:
        started = moved = time.monotonic()
        word_at, patience = started + FIRST_WORD_S, timeout_s
        while True:
            busy = False
            for link in self._links:
                if link.outbox:
                    self._flush(link)
                events = (_READ if link.wanted is not None else 0) | (select.POLLOUT if link.outbox else 0)
                busy = busy or bool(events)
                if events != link.watched:
                    self._watch(link, events)
            if not busy:
                return
            until = min(moved + patience, word_at)
            events_by_fd = self._poll.poll(max(0.0, until - time.monotonic()) * 1000 + 1)
            now = time.monotonic()
            for fd, events in events_by_fd:
                if fd == self._wake_fd:
                    os.read(fd, 4096)
                    if self._check(self._pending()):
                        patience = min(patience, 2.0)
                    continue
                moved = now
                link = self._by_fd[fd]
                if events & _READ and link.wanted is not None:
                    self._fill(link)
                elif events & (select.POLLHUP | select.POLLERR):
                    raise self._lost(link.index)
            if events_by_fd:
                continue
            if now >= moved + patience:
                self._check(())
                raise self._late(self._pending())
            if now >= word_at:
                word_at = now + NEXT_WORD_S
                on_wait([link.name for link in self._links if self._is_pending(link)], now - started)

    @staticmethod
    def _is_pending(link: Link) -> bool:
        return link.wanted is not None or bool(link.outbox)

    def _pending(self) -> list[int]:
        return [link.index for link in self._links if self._is_pending(link)]

    def _watch(self, link: Link, events: int) -> None:
        # A link that needs nothing is not polled at all: POLLHUP can't be masked and would spin.
        if events:
            self._poll.register(link.fd, events)
        elif link.watched:
            self._poll.unregister(link.fd)
        link.watched = events

    def _flush(self, link: Link) -> None:
        outbox = link.outbox
        while outbox:
            views = [outbox[i] for i in range(min(len(outbox), _MAX_VIEWS))]
            try:
                sent = link.sock.sendmsg(views)
            except BlockingIOError:
                return
            except OSError:
                # The peer is gone, but what it sent before may still be read; its end shows there.
                outbox.clear()
                if link.wanted is None:
                    raise self._lost(link.index) from None
                return
            for view in views:
                if sent < len(view):
                    outbox[0] = view[sent:]
                    return
                sent -= len(view)
                outbox.popleft()

    def _fill(self, link: Link) -> None:
        for _ in range(_READS_PER_TURN):
            wanted = link.wanted
            if wanted is None:
                return
            try:
                got = link.sock.recv_into(wanted)
            except BlockingIOError:
                return
            except OSError:
                raise self._lost(link.index) from None
            if got == 0:
                raise self._lost(link.index)
            if got < len(wanted):
                link.wanted = wanted[got:]
                return
            link.advance()
