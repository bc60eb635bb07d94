"""Finds out which tasks really share memory; the others use TCP.

Names and addresses of hosts mislead (containers, namespaces), so tasks that the same kernel runs try it: each offers,
over the connections of the meeting, a Unix socket of a random name, where those after it connect. Both prove by what
only the job's tasks were told that they are who they say, the kernel says that they are of one user, each passes the
descriptors of its memory and of what wakes it, and what is read in that memory must be what its owner wrote there.
Whatever fails, fails for that pair, with a line that says why. Then all tell each other with whom they share.

The sockets are abstract (unix(7)): they belong to the network namespace, leave no file, and are closed in the end.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tfdist.collectives import segment
from tfdist.collectives.memory import Neighbour
from tfdist.collectives.segment import Segment

logger = logging.getLogger(__name__)

# For all of it; a task that is slower shares nothing.
DEADLINE_S = 5.0

_CREDENTIALS = struct.Struct("iII")  # process, user, group
_MAX_MESSAGE = 4096

# File descriptor -> connection, and which task it leads to, where that is known already.
_Waiting = dict[int, tuple[socket.socket, "int | None"]]


@dataclass(frozen=True)
class Shared:
    """What came of it.

    Attributes:
        groups: The tasks that share memory with each other, in order of their first; each task is in one.
        mine: This task; None where it shares with nobody.
        neighbours: The other tasks of its group.
    """

    groups: list[list[int]]
    mine: Neighbour | None
    neighbours: list[Neighbour]


@dataclass(frozen=True)
class _Offer:
    """What a task tells the others before it is asked; an empty host: it does not share."""

    host: str = ""
    name: str = ""
    proof: str = ""
    nonce: str = ""

    @staticmethod
    def read(data: bytes) -> _Offer:
        fields = json.loads(data)
        return _Offer(*(str(fields.get(key, "")) for key in ("host", "name", "proof", "nonce")))


def boot_id() -> str:
    """Returns what is the same for all processes of one kernel since it started, "" where that is not to be had."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def find(index: int, names: Sequence[str], *, allowed: bool, gather: Callable[[bytes, str], list[bytes]]) -> Shared:
    """Returns which tasks share memory; every task calls it, and all get the same groups.

    Args:
        index: This task.
        names: Of all tasks.
        allowed: Whether this task may share.
        gather: Returns the bytes of all tasks, given this task's and a tag.
    """
    with ExitStack() as stack:
        side = _Side(index, names, stack)
        mine = side.offer(allowed)
        offers = [_Offer.read(data) for data in gather(json.dumps(vars(mine)).encode(), "offers to share memory")]
        hosts = [offer.host for offer in offers if offer.host]
        if len(set(hosts)) == len(hosts):
            return Shared([[i] for i in range(len(names))], None, [])
        side.deadline = time.monotonic() + DEADLINE_S
        connected = side.connect(offers)
        reached = [json.loads(data) for data in gather(_numbers(connected), "connections to share memory")]
        later = {i for i, its in enumerate(reached) if i > index and index in its}
        sharing = side.exchange(offers, connected, later)
        lists = [set(json.loads(data)) for data in gather(_numbers(sharing), "proofs of shared memory")]
        groups = _groups(lists)
        group = next(group for group in groups if index in group)
        neighbours = [side.keep(i, sharing[i]) for i in group if i != index]
        own = Neighbour(index, side.segment, side.keep_wake()) if neighbours and side.segment is not None else None
    logger.info("tasks that share memory: %s", "; ".join(", ".join(names[i] for i in group) for group in groups))
    return Shared(groups, own, neighbours)


def _numbers(indices: Any) -> bytes:
    return json.dumps(sorted(indices)).encode()


def _groups(lists: Sequence[set[int]]) -> list[list[int]]:
    """Returns groups in which each task shares with each other, as both say."""
    groups: list[list[int]] = []
    for i in range(len(lists)):
        for group in groups:
            if all(i in lists[other] and other in lists[i] for other in group):
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


class _Side:
    """This task's part; what it does not keep is closed with `stack`."""

    def __init__(self, index: int, names: Sequence[str], stack: ExitStack) -> None:
        self._index, self._names, self._stack = index, names, stack
        self._fds: list[int] = []
        self._proof = secrets.token_hex(16)
        self._listener: socket.socket | None = None
        self.segment: Segment | None = None
        self.deadline = 0.0

    def offer(self, allowed: bool) -> _Offer:
        """Makes the segment, and listens."""
        host, lacks = boot_id(), segment.missing()
        if not allowed or not host or lacks:
            why = "it was told not to" if not allowed else f"this system has no {lacks or 'boot_id'}"
            logger.debug("%s shares no memory: %s", self._names[self._index], why)
            return _Offer()
        name = f"tfdist-{secrets.token_hex(16)}"
        try:
            self.segment, fd = segment.create()
            self._fds = [fd, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)]
            self._stack.callback(self._close_fds)
            self._listener = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            self._listener.bind(f"\0{name}")
            self._listener.listen(len(self._names) + 8)
            self._listener.setblocking(False)
        except (OSError, ValueError) as error:
            logger.info("%s shares no memory: %s", self._names[self._index], str(error))
            return _Offer()
        return _Offer(host, name, self._proof, self.segment.nonce.hex())

    def connect(self, offers: Sequence[_Offer]) -> dict[int, socket.socket]:
        """Connects to the tasks before this one, and sends each what it needs."""
        connected = {}
        for i in range(self._index):
            if not offers[i].host or offers[i].host != offers[self._index].host:
                continue
            sock = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            try:
                sock.setblocking(False)
                sock.connect(f"\0{offers[i].name}")
                self._send(sock)
            except OSError as error:
                self._say(i, f"its socket can not be reached ({error.strerror}): another network namespace?")
                continue
            connected[i] = sock
        return connected

    def exchange(
        self, offers: Sequence[_Offer], connected: dict[int, socket.socket], later: set[int]
    ) -> dict[int, Neighbour]:
        """Takes what the tasks after this one (`later`) send and answers them, then the answers of those before it."""
        found: dict[int, Neighbour] = {}
        poll = select.poll()
        waiting: _Waiting = {sock.fileno(): (sock, i) for i, sock in connected.items()}
        if self._listener is not None and later:
            poll.register(self._listener, select.POLLIN)
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        missing = set(connected) | later
        while missing:
            left_s = self.deadline - time.monotonic()
            events = poll.poll(left_s * 1000) if left_s > 0 else []
            if not events:
                break
            for fd, _ in events:
                if fd not in waiting:
                    self._accept(poll, waiting)
                    continue
                sock, expected = waiting.pop(fd)
                poll.unregister(fd)
                neighbour = self._take(sock, offers, expected, missing)
                if neighbour is None:
                    missing -= set() if expected is None else {expected}
                    sock.close()  # whoever waits there needs to wait no longer
                    continue
                self._stack.callback(os.close, neighbour.wake_fd)
                if expected is not None or self._answer(sock, neighbour.index):
                    found[neighbour.index] = neighbour
        for i in missing:
            self._say(i, f"it did not answer within {DEADLINE_S:g} s")
        return found

    def keep(self, index: int, neighbour: Neighbour) -> Neighbour:
        """Returns a neighbour that outlives this."""
        return Neighbour(index, neighbour.segment, os.dup(neighbour.wake_fd))

    def keep_wake(self) -> int:
        return os.dup(self._fds[1])

    def _accept(self, poll: select.poll, waiting: _Waiting) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        self._stack.enter_context(sock)
        sock.setblocking(False)
        waiting[sock.fileno()] = (sock, None)
        poll.register(sock, select.POLLIN)

    def _take(
        self, sock: socket.socket, offers: Sequence[_Offer], expected: int | None, missing: set[int]
    ) -> Neighbour | None:
        """Returns who is at the other end, if it is one of the tasks and its memory is what it should be."""
        fds: list[int] = []
        try:
            _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            if user != os.geteuid():
                raise ValueError(f"it belongs to user {user}")
            data, fds, flags, _ = socket.recv_fds(sock, _MAX_MESSAGE, 2, socket.MSG_CMSG_CLOEXEC)
            if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(fds) != 2:
                raise ValueError(f"it sent {len(fds)} descriptors and {len(data)} bytes")
            message = json.loads(data)
            index, proof = message["index"], message["proof"]
            if index not in missing or (index < self._index if expected is None else index != expected):
                raise ValueError(f"it says that it is number {index!r}")
            if not secrets.compare_digest(str(proof), offers[index].proof):
                raise ValueError("it does not know what it should")
            missing.remove(index)
            expected = index
            its_segment = Segment(fds[0], is_mine=False)
            if its_segment.nonce.hex() != offers[index].nonce:
                raise ValueError("its memory is not what it sees itself")
            return Neighbour(index, its_segment, os.dup(fds[1]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            if expected is None:
                logger.info("%s dropped a connection to its memory: %s", self._names[self._index], str(error))
            else:
                self._say(expected, str(error))
            return None
        finally:
            for fd in fds:
                os.close(fd)

    def _answer(self, sock: socket.socket, index: int) -> bool:
        try:
            self._send(sock)
        except OSError as error:
            self._say(index, f"it can not be answered ({error.strerror})")
            return False
        return True

    def _send(self, sock: socket.socket) -> None:
        message = json.dumps({"index": self._index, "proof": self._proof}).encode()
        socket.send_fds(sock, [message], self._fds)

    def _say(self, index: int, why: str) -> None:
        logger.info("%s shares no memory with %s: %s", self._names[self._index], self._names[index], why)

    def _close_fds(self) -> None:
        for fd in self._fds:
            os.close(fd)
