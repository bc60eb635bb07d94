"""Moves the bytes of one call: sends to and receives from all peers at once, on non-blocking sockets.

What to receive is written as a generator per peer: it yields the memory to fill next and runs on when that is full.
It may append to any link's `outbox` meanwhile. Nothing here can deadlock on full socket buffers, since no side stops
reading in order to write.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

from tfdist.collectives.waiting import Wait, Watch

# Memory to fill with the peer's next bytes; ends when the peer has sent all.
Reader = Generator[memoryview, None, None]

_READ = select.POLLIN | select.POLLHUP | select.POLLERR
_MAX_VIEWS = 16  # per sendmsg; the kernel allows 1,024
_READS_PER_TURN = 4  # then the other links get their turn


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
        watch: What to ask while waiting.
    """

    def __init__(self, links: Sequence[Link], watch: Watch) -> None:
        self.links = links
        self._by_fd = {link.fd: link for link in links}
        self._watch = watch
        self._poll = select.poll()
        self._poll.register(watch.wake_fd, select.POLLIN)

    def run(self, messages: Mapping[int, Sequence[memoryview]], readers: Mapping[int, Reader]) -> None:
        """Sends `messages` and runs `readers` to their ends, both by the peer's index.

        The time-out counts from the last byte that moved in either direction.
        """
        try:
            for link in self.links:
                link.outbox.extend(view for view in messages[link.index] if len(view))
                link.reader = readers[link.index]
                link.advance()
            self._move()
        finally:
            for link in self.links:
                link.outbox.clear()
                link.reader = link.wanted = None
                self._register(link, 0)

    def _move(self) -> None:
        wait = Wait(self._watch)
        while True:
            busy = False
            for link in self.links:
                if link.outbox:
                    self._flush(link)
                events = (_READ if link.wanted is not None else 0) | (select.POLLOUT if link.outbox else 0)
                busy = busy or bool(events)
                if events != link.watched:
                    self._register(link, events)
            if not busy:
                return
            events_by_fd = self._poll.poll(wait.poll_ms)
            for fd, events in events_by_fd:
                if fd == self._watch.wake_fd:
                    wait.woken(self._pending())
                    continue
                wait.moved()
                link = self._by_fd[fd]
                if events & _READ and link.wanted is not None:
                    self._fill(link)
                elif events & (select.POLLHUP | select.POLLERR):
                    raise self._watch.faults.lost(link.index)
            if not events_by_fd:
                wait.look(self._pending())

    def _pending(self) -> list[int]:
        return [link.index for link in self.links if link.wanted is not None or link.outbox]

    def _register(self, link: Link, events: int) -> None:
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
                    raise self._watch.faults.lost(link.index) from None
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
                raise self._watch.faults.lost(link.index) from None
            if got == 0:
                raise self._watch.faults.lost(link.index)
            if got < len(wanted):
                link.wanted = wanted[got:]
                return
            link.advance()
