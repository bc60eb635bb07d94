"""The tasks of one job, connected: collective calls on NumPy arrays, with deadlines and the names of those that fail.

A call that fails on one task fails on all, in that call or (where a task had all it needed) in the next. After an error
the group is broken: what is still in the connections belongs to no call any more, so each later call raises the same.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tfdist import wire
from tfdist.cluster import Task
from tfdist.collectives import payload
from tfdist.collectives.calls import Call
from tfdist.collectives.exchange import Exchange, Link
from tfdist.collectives.faults import Faults, Now, copy_of, names_text
from tfdist.collectives.hierarchy import through
from tfdist.collectives.layout import EMPTY, Layout, Terms
from tfdist.collectives.monitor import MAX_BEAT_S, MAX_TEXT, Changes, ControlLink, Monitor
from tfdist.collectives.reduction import Array, Op, as_numbers
from tfdist.collectives.results import Bytes, Results
from tfdist.collectives.sharing import Shared
from tfdist.collectives.sums import Sums
from tfdist.collectives.tcp import TCP
from tfdist.collectives.transport import Opening, Transport
from tfdist.collectives.waiting import Watch
from tfdist.errors import GroupError, PeerLostError

if TYPE_CHECKING:
    from tfdist.collectives.door import Door

logger = logging.getLogger(__name__)

_NOTHING: Bytes = np.empty(0, np.uint8)
_T = TypeVar("_T")


class Group:
    """Collective calls between the tasks of one job; made by `meet`.

    Calls may come from any thread, one at a time, and in the same order on every task.

    Attributes:
        size: Number of tasks.
        index: Which of them this process is.
        task: Its name, `tasks[index]`.
        tasks: All of them, in the order of every result.
        sharing: The tasks that share memory with each other, as indices; each task is in one of the groups.
        has_come_back: Whether the others had met before: then it takes part in no call, and knows only of the task that
            let it in.
        door: Where tasks of the job that start anew can be let in.
    """

    door: Door | None = None

    def __init__(
        self,
        tasks: Sequence[Task],
        index: int,
        *,
        data: Mapping[int, socket.socket],
        control: Sequence[ControlLink],
        step_timeout_s: float,
        heartbeat_timeout_s: float,
        beat_s: float = MAX_BEAT_S,
    ) -> None:
        self.tasks, self.index, self.size = tuple(tasks), index, len(tasks)
        self.task = self.tasks[index]
        self.sharing = [[i] for i in range(self.size)]
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._now = Now(step_timeout_s)
        self._known_calls: dict[Any, tuple[Call, Layout]] = {}
        self._error: GroupError | None = None
        self._closed = False
        self._results = Results()
        self._names = [str(task) for task in self.tasks]
        self._links = [Link(i, self._names[i], sock) for i, sock in sorted(data.items())]
        self.has_come_back = self.size > 1 and not self._links
        self._monitor: Monitor | None = None
        if not control:
            return
        self._monitor = Monitor(
            control, me=index, timeout_s=heartbeat_timeout_s, beat_s=beat_s, status=self._now.status
        )
        self._faults = Faults(self.tasks, index, self._now, self._monitor)
        self._watch = Watch(self._monitor.wake_fd, self._faults, self._now)
        self._transport: Transport = TCP(Exchange(self._links, self._watch), index)
        self._monitor.start()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.leave(None, f"{type(error).__name__}: {error}")
        self.close()

    def __repr__(self) -> str:
        return f"<Group of {self.size} tasks, this is {self.task}>"

    # Collective calls

    def all_reduce(
        self, arrays: Sequence[Any], *, op: Op | Sequence[Op] = "sum", weight: float = 1.0, tag: str
    ) -> list[Array]:
        """Returns new arrays: element by element the sum, mean, maximum or minimum over all tasks.

        Every dtype is reduced in itself (16-bit floats in float32, rounded once), always in the same order, so that the
        results are the same bits on all tasks and in every run: in task order, where all tasks share memory or none
        does; else the tasks that share memory are added up first, in task order, and then these sums, in the order of
        their first tasks. All tasks must bring the same shapes and dtypes.

        Args:
            arrays: This task's.
            op: Of all arrays, or one for each: sum, mean, max, min, or weighted_sum, the sum of weight x array, where a
                task whose weight is 0 adds 0, whatever its arrays hold.
            weight: This task's.
            tag: The caller's name for the call, the same on all tasks.

        Raises:
            TypeError: `op` has no exact meaning for a dtype (mean of integers, sum of bool, max of complex).
            PeerLostError, MismatchError, WaitError: The tasks can not go on together.
        """
        return self._sum("all_reduce", Sums(arrays, op, weight, ()), tag)[0]

    def exchange(
        self,
        arrays: Sequence[Any],
        *,
        op: Op | Sequence[Op] = "sum",
        weight: float = 1.0,
        rows: Sequence[Any] = (),
        tag: str,
    ) -> tuple[list[Array], list[Array]]:
        """Returns what `all_reduce` does, and the rows of all tasks, in task order, of further arrays; in one message.

        Args:
            arrays, op, weight, tag: As for `all_reduce`.
            rows: Arrays whose first dimension may differ from task to task, but nothing else.

        Raises:
            As `all_reduce`.
        """
        return self._sum("exchange", Sums(arrays, op, weight, rows), tag)

    def all_gather(self, array: Any, *, tag: str) -> list[Array]:
        """Returns the arrays of all tasks, in task order. Shapes may differ, the dtype must not."""
        value = as_numbers(array)
        if self.size == 1:
            return [value.copy()]

        def read(bodies: dict[int, Bytes]) -> list[Array]:
            results = [payload.unpack_array(other, value.dtype, self._names[i]) for i, other in bodies.items()]
            results.insert(self.index, value.copy())
            return results

        return self._gather(Call("all_gather", tag, value.dtype.name), payload.pack_array(value), read)

    def all_gather_bytes(self, data: bytes, *, tag: str) -> list[bytes]:
        """Returns the bytes of all tasks, in task order; lengths may differ."""
        if self.size == 1:
            return [bytes(data)]

        def read(bodies: dict[int, Bytes]) -> list[bytes]:
            results = [body.tobytes() for body in bodies.values()]
            results.insert(self.index, bytes(data))
            return results

        return self._gather(Call("all_gather_bytes", tag), [memoryview(data)], read)

    def broadcast(self, arrays: Sequence[Any] | None, *, root: int = 0, tag: str) -> list[Array]:
        """Returns new arrays with the root's values; what the other tasks pass is ignored (None will do)."""
        if not 0 <= root < self.size:
            raise ValueError(f"root must be the index of a task (0 to {self.size - 1}), not {root}")
        values = []
        if root == self.index:
            if arrays is None:
                raise ValueError(f"{self.task} is the root of broadcast {tag!r} and must pass the arrays")
            values = [as_numbers(array) for array in arrays]

        def read(bodies: dict[int, Bytes]) -> list[Array]:
            if root == self.index:
                return [value.copy() for value in values]
            return payload.unpack_arrays(bodies[root], self._names[root])

        if self.size == 1:
            return read({})
        body = payload.pack_arrays(values) if root == self.index else []
        return self._gather(Call("broadcast", tag, f"from {self._names[root]}"), body, read)

    def barrier(self, tag: str) -> None:
        """Returns when every task has called it."""
        if self.size > 1:
            self._gather(Call("barrier", tag), [], lambda bodies: [None])

    # Life

    def share(self, shared: Shared) -> None:
        """Lets later calls go through the memory that tasks share; every task does it after the same call."""
        self.sharing = shared.groups
        if len(shared.groups) < self.size:
            self._transport = through(shared, self.index, self._links, self._watch)

    def progress(self, step: int) -> None:
        """Notes the step this task is at, for messages here and on the peers."""
        self._now.step = step

    @property
    def connections(self) -> dict[int, str]:
        """File descriptor of a connection to each peer -> its name; to see it end, not to read from it."""
        return {} if self._monitor is None else self._monitor.connections

    def set_step_timeout(self, timeout_s: float) -> None:
        """Sets how long a call waits for a task that is alive."""
        self._now.timeout_s = timeout_s

    def leave(self, code: int | None, reason: str = "", wait_s: float = 0.0) -> None:
        """Says goodbye: no call can follow. The first goodbye counts.

        Args:
            code: The exit code to come, None where it is not known.
            reason: Why, for a code other than 0: "ValueError: bad shape".
            wait_s: At most so long to wait until every peer has said goodbye or is gone.
        """
        monitor = self._monitor
        if monitor is None or self._closed or self._is_forked:
            self._now.is_leaving = True
            return
        if not self._now.is_leaving:
            if self.door is not None:
                self.door.close()
            self._now.is_leaving = True
            monitor.tell(wire.GOODBYE, {"code": code, "reason": reason[:MAX_TEXT], "step": self._now.step})
            for link in self._links:
                # After what was sent before, the peers read the end of the stream: in order, and only if they wait.
                _shut_down(link.sock)
            monitor.wake()
            monitor.changes.put(None)
        started, left_s = time.monotonic(), wait_s
        said_so = False
        while left_s > 0 and (missing := monitor.wait_until_over(min(left_s, 1.0))):
            waited_s = time.monotonic() - started
            left_s = wait_s - waited_s
            if waited_s >= 5 and not said_so:
                said_so = True
                names = names_text([self._names[i] for i in missing])
                logger.warning("%s is done, waiting for %s to end (at most %.0f s)", self.task, names, wait_s)

    def wait_until_left(self, index: int) -> str:
        """Returns what a peer's clean goodbye said, however long it takes; calls of the others do not matter.

        It may be called again, where the peer was silent and is heard again.

        Raises:
            PeerLostError: It is gone without a goodbye, silent, or left because of an error.
        """
        monitor = self._monitor
        trouble = None if monitor is None else monitor.of(index, wait_s=None)
        if trouble is None or trouble.clean:
            return "" if trouble is None else trouble.text
        raise PeerLostError(trouble.text, task=self.tasks[index])

    def silent(self) -> list[Task]:
        """Returns the peers that nothing is heard of now, though their connections stand."""
        return [] if self._monitor is None else [self.tasks[index] for index in self._monitor.silent()]

    def is_heard_again(self, index: int, *, wait_s: float) -> bool:
        """Returns whether a silent peer speaks within this time."""
        return self._monitor is not None and self._monitor.is_heard_again(index, wait_s=wait_s)

    def is_alive(self, index: int, *, wait_s: float) -> bool | None:
        """Returns whether a peer lives, by what is heard of it from now on; None where that is nothing in this time."""
        assert self._monitor is not None
        return self._monitor.is_alive(index, wait_s=wait_s)

    def admit(self, index: int, sock: socket.socket, heartbeat_timeout_s: float) -> None:
        """Takes a new control connection to a peer, which was started anew, in place of the former one.

        Args:
            index: Which peer.
            sock: The connection, after the handshake.
            heartbeat_timeout_s: Silence after which the peer counts others as lost.
        """
        assert self._monitor is not None
        if self._now.is_leaving:
            sock.close()
            return
        self._monitor.admit(ControlLink(index, str(self.tasks[index]), sock), beat_s=heartbeat_timeout_s / 10)

    def changes(self) -> Changes:
        """Returns a queue of what happens to the peers, from the start on: (index, trouble), (index, None) for one that
        is there again, and None when this task leaves."""
        assert self._monitor is not None
        return self._monitor.changes

    def close(self) -> None:
        """Leaves if `leave` was not called, and closes the connections."""
        if self._closed or self._is_forked:
            return
        self.leave(None)
        # A call in another thread has been woken and ends; its sockets must not be closed under it.
        if not self._lock.acquire(timeout=2.0):
            logger.warning("%s: a call is still running in another thread, its connections stay open", self.task)
            return
        try:
            self._closed = True
            if self._monitor is not None:
                self._monitor.stop()
                self._transport.close()
            for link in self._links:
                link.sock.close()
        finally:
            self._lock.release()

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    # One call

    def _sum(self, kind: str, sums: Sums, tag: str) -> tuple[list[Array], list[Array]]:
        if self.size == 1:
            return sums.alone()
        call, terms = sums.call(kind, tag, self._known_calls)
        with self._lock:
            out = self._results.bytes(terms.layout.nbytes)
            rows = self._exchange(call, terms, out, sums.body(), lambda b: sums.joined(b, self.index, self._names))
            return terms.layout.split(out), rows

    def _gather(self, call: Call, body: Sequence[memoryview], read: Callable[[dict[int, Bytes]], list[_T]]) -> list[_T]:
        with self._lock:
            return self._exchange(call, EMPTY, _NOTHING, body, read)

    def _exchange(
        self,
        call: Call,
        terms: Terms,
        out: Bytes,
        body: Sequence[memoryview],
        read: Callable[[dict[int, Bytes]], list[_T]],
    ) -> list[_T]:
        """Makes one call, and returns what `read` makes of the peers' bodies; an error breaks the group."""
        self._raise_if_over(call)
        now = self._now
        now.call, now.is_in_call, now.number = call, True, now.number + 1
        try:
            self._faults.begin()
            opening = Opening(call, now.number, self.index, self._names)
            return read(self._transport.exchange(opening, terms, out, body))
        except BaseException as error:
            self._break(error)
            raise
        finally:
            now.is_in_call = False

    def _break(self, error: BaseException) -> None:
        """Remembers the error that ends the group, and tells the peers what is to blame."""
        assert self._monitor is not None
        self._error, account = self._faults.account(error)
        if not self._now.is_leaving:
            self._monitor.tell(wire.BROKEN, account)

    def _raise_if_over(self, call: Call) -> None:
        if self._is_forked:
            raise GroupError(f"{call}: this process was forked from {self.task}; only {self.task} itself can call")
        if self._error is not None:
            raise copy_of(self._error)
        if self._now.is_leaving:
            raise GroupError(f"{call}: {self.task} has left the group; no call can follow")
        if self.has_come_back:
            raise GroupError(f"{call}: {self.task} came back after the others had met, and takes part in no call")


def _shut_down(sock: socket.socket) -> None:
    with suppress(OSError):  # the peer is gone already
        sock.shutdown(socket.SHUT_WR)
