"""Takes in whoever connects to this task, a limited number at a time, and finds out who it is."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tfdist import wire
from tfdist.collectives.identity import CHANNELS, Channel, Identity
from tfdist.errors import MeetingError

logger = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
# Handshakes at a time; strangers beyond wait in the listener's queue.
MAX_HANDSHAKES = 64


@dataclass(frozen=True)
class Arrival:
    """A connection that is through the handshake.

    Attributes:
        sock: The connection.
        identity: What the peer proved to be; its "channel" is the connector's word.
    """

    sock: socket.socket
    identity: Mapping[str, Any]


class Reception:
    """Threads that accept connections, each of which is received in a thread of its own.

    Args:
        listeners: Listening sockets, closed by `close`.
        receive: Called with a connection and the address it came from; it closes what it does not keep.
    """

    def __init__(
        self, listeners: Sequence[socket.socket], receive: Callable[[socket.socket, tuple[Any, ...]], None]
    ) -> None:
        self._listeners, self._take = listeners, receive
        self._closed = threading.Event()
        self._slots = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._acceptors = [_start(self._accept, listener) for listener in listeners]

    def close(self, wait_s: float = 0.0) -> None:
        """Accepts nobody any more, and waits at most so long for those who are being received."""
        self._closed.set()
        for listener in self._listeners:
            with suppress(OSError):  # wakes the thread in accept()
                listener.shutdown(socket.SHUT_RDWR)
        for acceptor in self._acceptors:
            # Else it might accept on whatever gets the descriptor's number next.
            acceptor.join()
        for listener in self._listeners:
            listener.close()
        if wait_s:
            deadline = time.monotonic() + wait_s
            for _ in range(MAX_HANDSHAKES):
                self._slots.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(0.2)  # where shutting down does not wake it (macOS)
        while not self._closed.is_set():
            if not self._slots.acquire(timeout=0.2):
                continue
            try:
                sock, address = listener.accept()
            except OSError as error:
                self._slots.release()
                if not isinstance(error, TimeoutError):
                    self._closed.wait(0.05)  # a shortage of descriptors passes
                continue
            wire.close_in_forked_child(sock)
            _start(self._receive, sock, address)

    def _receive(self, sock: socket.socket, address: tuple[Any, ...]) -> None:
        try:
            self._take(sock, address)
        finally:
            self._slots.release()


def _start(function: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, name=f"tfdist-{function.__name__.strip('_')}", daemon=True)
    thread.start()
    return thread


def shake_hands(
    sock: socket.socket,
    handshake: Callable[..., dict[str, Any]],
    channel: Channel | None,
    *,
    me: Identity,
    secret: bytes | None,
    deadline: float,
    reply: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> Arrival:
    """Returns who is at the other end of a connection, a task of the same job.

    Args:
        sock: The connection; closed if its other end does not belong to this job.
        handshake: `wire.greet` or `wire.answer`.
        channel: What the connection is for; None where the other side says it.
        me: This task.
        secret: The job's.
        deadline: For the job's start, of time.monotonic(); a handshake has less time.
        reply: What this task says of itself to a given peer, where that is not the same for all.

    Raises:
        MeetingError: It is of the same job, and differs.
        wire.WireError, OSError: It is no task of this job, or the connection ended.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    deadline = min(time.monotonic() + HANDSHAKE_S, deadline)
    identity = reply or me.message(channel or "data")
    theirs = handshake(sock, secret=secret, identity=identity, deadline=deadline)
    difference = me.difference(theirs)
    if difference:
        sock.close()
        raise MeetingError(difference)
    if channel is None and theirs.get("channel") not in CHANNELS:
        raise wire.WireError(f"asked for the unknown channel {theirs.get('channel')!r}")
    # Both sides put the connector's word for the channel.
    return Arrival(sock, {**theirs, "channel": channel or theirs["channel"]})


def log_dropped(name: str, dropped: str, error: Exception) -> None:
    """Logs that a task dropped a connection: anybody may connect, also a left-over task of an earlier run."""
    # A health check that only connects may come every second.
    level = logging.INFO if str(error) == "closed the connection" else logging.WARNING
    logger.log(level, "%s dropped %s", name, dropped)
