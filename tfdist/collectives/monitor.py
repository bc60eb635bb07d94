"""Watches the peers on their control connections: a daemon thread that sends heartbeats and sees who dies or leaves.

The end of a process is seen at once (its kernel closes the connection), a stopped process or a lost host when it has
been silent for the heartbeat time-out, and a peer that leaves says so, with its exit code and reason. When a task finds
a peer lost it tells the others whom it blames, so that all name the first cause and not each other. A peer that was
silent and speaks again is no trouble any more, nor is one whose connection was replaced because it was started anew.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tfdist import wire

logger = logging.getLogger(__name__)

MAX_BEAT_S = 2.0
ADMIT_S = 1.0
MAX_TEXT = 4000

DIED, SILENT, LEFT, BROKEN = "died", "silent", "left", "broken"

# (index of a peer, its trouble, or None where it is there again); None at the end.
Changes = queue.SimpleQueue["tuple[int, Trouble | None] | None"]


@dataclass(frozen=True)
class Trouble:
    """Why a peer can't take part any more.

    Attributes:
        source: Index of the peer that is out.
        kind: DIED, SILENT, LEFT or BROKEN (it is alive, but gave the group up).
        text: "worker 1 left at step 5 with code 0"
        blame: Index of the task at fault: the source, or whom it blames.
        error: Name of the error class to raise.
        clean: It left with code 0, or without a code: a fault only for those that still wait for it.
        told_by: Name of the peer whose account this is, where it is not about the peer itself.
    """

    source: int
    kind: str
    text: str
    blame: int
    error: str = "PeerLostError"
    clean: bool = False
    told_by: str = ""


class ControlLink:
    """The control connection to one peer, with the bytes that arrived on it but are no whole frame yet."""

    def __init__(self, index: int, name: str, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.index, self.name, self.sock = index, name, sock
        self.fd = sock.fileno()
        self.parser = wire.FrameParser(limit=wire.CONTROL_LIMIT)
        self.heard = time.monotonic()
        self.said: dict[str, Any] = {}  # the peer's last heartbeat
        self.ended = False
        self._lock = threading.Lock()
        self._clogged = False

    def send(self, kind: int, message: Mapping[str, Any]) -> None:
        """Sends a small frame without waiting; a peer that has stopped reading gets no more of them."""
        data = wire.pack(kind, wire.encode(message))
        with self._lock:
            if self._clogged:
                return
            try:
                self._clogged = self.sock.send(data) < len(data)
            except OSError:
                self._clogged = True

    def close(self) -> None:
        """Closes the connection, also while another thread is about to send."""
        with self._lock:
            self._clogged = True
            self.sock.close()

    def receive(self) -> list[wire.Frame]:
        """Returns the frames that have arrived; sets `ended` when no more can come.

        Raises:
            wire.WireError: The peer sent something that is no frame.
        """
        frames: list[wire.Frame] = []
        while not self.ended:
            try:
                data = self.sock.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.ended = True
                break
            self.heard = time.monotonic()
            frames += self.parser.feed(data)
        return frames


class Monitor:
    """Sends heartbeats and keeps what is known of each peer.

    Args:
        links: One per peer.
        me: Index of this task.
        timeout_s: Silence after which a peer counts as lost.
        beat_s: Time between heartbeats.
        status: Returns what a heartbeat says of this task.

    Attributes:
        changes: What has happened to the peers.
    """

    def __init__(
        self,
        links: Sequence[ControlLink],
        *,
        me: int,
        timeout_s: float,
        beat_s: float,
        status: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._links = {link.index: link for link in links}
        self._me, self._timeout_s, self._beat_s, self._status = me, timeout_s, beat_s, status
        self._changed = threading.Condition()
        self._troubles: dict[int, Trouble] = {}  # the first of each peer, in the order they came to be known
        self._over: set[int] = set()  # peers that said goodbye or are gone
        self.changes: Changes = queue.SimpleQueue()
        self._admitted: queue.SimpleQueue[ControlLink] = queue.SimpleQueue()
        self._stopping = False
        # The exchange polls the first pair's reading end; our own thread the second's.
        self.wake_fd, self._wake_write = _pipe()
        self._call_read, self._call_write = _pipe()
        self._thread = threading.Thread(target=self._run, name="tfdist-monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def connections(self) -> dict[int, str]:
        """File descriptor of each peer's control connection -> the peer's name."""
        return {link.fd: link.name for link in self._links.values()}

    def fatal(self) -> Trouble | None:
        """Returns the first trouble that ends the group for everybody, waiting or not."""
        with self._changed:
            return next((t for t in self._troubles.values() if not t.clean), None)

    def first(self) -> Trouble | None:
        """Returns the first trouble of any kind; faults go before clean goodbyes."""
        if not self._troubles:
            return None
        with self._changed:
            troubles = list(self._troubles.values())
        return next((t for t in troubles if not t.clean), troubles[0] if troubles else None)

    def of(self, index: int, *, wait_s: float | None = 0.0) -> Trouble | None:
        """Returns what is known of one peer, after waiting for its last words; None waits as long as it takes."""
        with self._changed:
            self._changed.wait_for(lambda: index in self._troubles, timeout=wait_s)
            return self._troubles.get(index)

    def silent(self) -> list[int]:
        """Returns the peers that are silent now."""
        with self._changed:
            return [index for index in self._troubles if self._is_silent(index)]

    def is_heard_again(self, index: int, *, wait_s: float) -> bool:
        """Returns whether a silent peer speaks within this time; what ends it otherwise ends the wait."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_silent(index), timeout=wait_s)
            return index not in self._troubles

    def is_alive(self, index: int, *, wait_s: float) -> bool | None:
        """Returns whether a peer lives, by what is heard of it from now on; None where that is nothing in this time."""
        asked = time.monotonic()

        def known() -> bool:
            return index in self._over or self._links[index].heard > asked

        with self._changed:
            return index not in self._over if self._changed.wait_for(known, timeout=wait_s) else None

    def admit(self, link: ControlLink, *, beat_s: float) -> None:
        """Lets a new connection to a peer take the place of the former one; it is there on return.

        Args:
            link: The new connection.
            beat_s: How often it wants to hear from us at least.
        """
        self._beat_s = min(self._beat_s, beat_s)
        self._admitted.put(link)
        self._call()
        with self._changed:
            self._changed.wait_for(lambda: self._links[link.index] is link, timeout=ADMIT_S)

    def said(self, index: int) -> dict[str, Any]:
        """Returns the last heartbeat of a peer."""
        return self._links[index].said

    def tell(self, kind: int, message: Mapping[str, Any]) -> None:
        """Sends a frame to every peer."""
        for link in self._links.values():
            link.send(kind, message)

    def wait_until_over(self, timeout_s: float) -> list[int]:
        """Waits until every peer said goodbye or is gone; returns those that did not."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._over) == len(self._links), timeout=timeout_s)
            return [index for index in self._links if index not in self._over]

    def stop(self) -> None:
        """Ends the thread and closes the connections."""
        self._stopping = True
        self._call()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for link in self._links.values():
            # Closing with unread bytes resets the connection, which on some systems discards our goodbye on its way.
            with suppress(OSError, wire.WireError):
                link.sock.shutdown(socket.SHUT_WR)
                link.receive()
            link.close()
        for fd in (self.wake_fd, self._wake_write, self._call_read, self._call_write):
            os.close(fd)

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # without a watcher nobody would see a peer die
            logger.exception("the thread that watches the peers failed")
            for index in self._links:
                self._note(Trouble(index, DIED, f"the watch over the peers failed: {error!r}", self._me))

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._call_read, select.POLLIN)
        by_fd: dict[int, ControlLink] = {}

        def watch(link: ControlLink) -> None:
            by_fd[link.fd] = link
            poll.register(link.fd, select.POLLIN)

        def forget(link: ControlLink) -> None:
            if by_fd.pop(link.fd, None) is not None:
                poll.unregister(link.fd)

        for link in self._links.values():
            watch(link)
        now = last = next_beat = time.monotonic()
        while not self._stopping:
            if now >= next_beat:
                self.tell(wire.HEARTBEAT, self._status())
                next_beat = now + self._beat_s
            events = poll.poll(max(0.0, next_beat - time.monotonic()) * 1000 + 1)
            now, last = time.monotonic(), now
            if now - last > self._beat_s + self._timeout_s / 2:
                # This process itself was stopped, or starved: silence proves nothing.
                for link in by_fd.values():
                    link.heard = now
            for fd, _ in events:
                if fd == self._call_read:
                    os.read(fd, 4096)
                elif self._hear(by_fd[fd]):
                    forget(by_fd[fd])
            while not self._admitted.empty():
                link = self._admitted.get()
                forget(self._links[link.index])
                self._replace(link)
                watch(link)
            for link in by_fd.values():
                if now - link.heard > self._timeout_s and link.index not in self._over:
                    text = f"{link.name} has been silent for {now - link.heard:.0f} s (stopped, or its host is lost)"
                    self._note(Trouble(link.index, SILENT, text, link.index))

    def _hear(self, link: ControlLink) -> bool:
        """Takes in what a peer sent; returns whether it is gone."""
        before = link.heard
        try:
            frames = link.receive()
            if link.heard > before:
                self._note_life(link.index)
            for frame in frames:
                self._take(link, frame)
        except wire.WireError as error:
            self._note(Trouble(link.index, DIED, f"{link.name} broke the control connection: it {error}", link.index))
            return True
        if link.ended:
            text = f"{link.name} is gone: its connection closed without a goodbye (killed or crashed?)"
            self._note(Trouble(link.index, DIED, text, link.index))
        return link.ended

    def _replace(self, link: ControlLink) -> None:
        with self._changed:
            former, self._links[link.index] = self._links[link.index], link
            self._troubles.pop(link.index, None)
            self._over.discard(link.index)
            self.changes.put((link.index, None))
            self._changed.notify_all()
        former.close()

    def _take(self, link: ControlLink, frame: wire.Frame) -> None:
        message = wire.decode(frame.body)
        if frame.kind == wire.HEARTBEAT:
            link.said = message
        elif frame.kind == wire.GOODBYE:
            self._note(goodbye(link, message))
        elif frame.kind == wire.BROKEN:
            blame = message.get("blame")
            if not isinstance(blame, int):
                blame = link.index
            why, error = str(message.get("why"))[:MAX_TEXT], str(message.get("error"))
            self._note(Trouble(link.index, BROKEN, why, blame, error=error, told_by=link.name))

    def _note(self, trouble: Trouble) -> None:
        with self._changed:
            known = self._troubles.get(trouble.source)
            if known is None or (known.kind == SILENT and trouble.kind != SILENT):
                self._troubles[trouble.source] = trouble
                self.changes.put((trouble.source, trouble))
            if trouble.kind != BROKEN:
                self._over.add(trouble.source)
            self._changed.notify_all()
        self.wake()

    def _note_life(self, index: int) -> None:
        with self._changed:
            if self._is_silent(index):
                del self._troubles[index]
                self._over.discard(index)
                self.changes.put((index, None))
            self._changed.notify_all()

    def _is_silent(self, index: int) -> bool:
        trouble = self._troubles.get(index)
        return trouble is not None and trouble.kind == SILENT

    def _call(self) -> None:
        """Lets our own thread look up."""
        with suppress(BlockingIOError):  # it has been called already
            os.write(self._call_write, b"x")

    def wake(self) -> None:
        """Makes a running exchange look for trouble at once."""
        with suppress(BlockingIOError):  # the exchange has not read the former ones yet: it is awake
            os.write(self._wake_write, b"x")


def goodbye(link: ControlLink, message: Mapping[str, Any]) -> Trouble:
    """Returns what a peer's goodbye means to those who wait for it."""
    code, reason, step = message.get("code"), str(message.get("reason") or "")[:MAX_TEXT], message.get("step")
    text = f"{link.name} left" + (f" at step {step}" if step is not None else "")
    text += (f" with code {code}" if code is not None else "") + (f": {reason}" if reason else "")
    return Trouble(link.index, LEFT, text, link.index, clean=code in (0, None) and not reason)


def _pipe() -> tuple[int, int]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    return read, write
