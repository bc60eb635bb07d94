"""Connects every pair of tasks of a cluster before the start time-out, or says who is missing and why.

Each task listens at its own address, connects to the tasks before it and accepts those after it; two connections a
pair, one for data and one for control. Whoever else knocks is logged and dropped. Two tasks that prove to be of one job
but differ (in the cluster, the versions, or by being the same task twice) end the meeting on both sides at once. The
meeting is over for nobody before it is over for all. A task that comes after that, having been started anew, may find
that a task keeps a door open (`door`): then it is let in there, or told why not.
"""

from __future__ import annotations

import errno
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tfdist import wire
from tfdist.cluster import Task
from tfdist.collectives import reception, sharing
from tfdist.collectives.door import NO, YES, Door, Verdict
from tfdist.collectives.group import Group
from tfdist.collectives.identity import CHANNELS, Channel, Identity
from tfdist.collectives.listener import listen, split_address
from tfdist.collectives.monitor import MAX_BEAT_S, MAX_TEXT, ControlLink, goodbye
from tfdist.collectives.reception import Arrival, Reception
from tfdist.errors import GroupError, MeetingError, WaitError

logger = logging.getLogger(__name__)

FIRST_WORD_S, NEXT_WORD_S = 5.0, 10.0
_RETRY_S, _MAX_RETRY_S = 0.02, 1.0


def meet(
    cluster_addresses: Sequence[str],
    tasks: Sequence[Task],
    index: int,
    *,
    secret: bytes | None,
    start_timeout_s: float,
    step_timeout_s: float,
    heartbeat_timeout_s: float = 30.0,
    on_wait: Callable[[str], None] | None = None,
    fingerprint: str = "",
    share_memory: bool = True,
) -> Group:
    """Returns the connected group once all tasks have come; the port is free again by then.

    Where the others have met already, and one of them keeps a door open, it is the group of a task that came back.

    Args:
        cluster_addresses: "host:port" of each task; this task listens on its own.
        tasks: Their names, in the same order on every task.
        index: Which of them this process is.
        secret: What all tasks of the job know and strangers do not; None: anybody may come.
        start_timeout_s: How long to wait for the others.
        step_timeout_s: How long a collective call of the group waits for a task that is alive.
        heartbeat_timeout_s: Silence after which a task counts as lost.
        on_wait: Called with a sentence after 5 s of waiting and then every 10 s (default: a logged warning).
        fingerprint: What must be equal on all tasks, such as versions.
        share_memory: Whether this task shares memory with those that really can; the others use TCP in any case.

    Raises:
        MeetingError: A task is missing at the end of the time, does not fit, or this task's port is taken; or the
            others have met, and can not take this task in.
    """
    if len(cluster_addresses) != len(tasks) or not 0 <= index < len(tasks):
        raise ValueError(f"task number {index} of {len(tasks)} tasks with {len(cluster_addresses)} addresses")
    data: dict[int, socket.socket] = {}
    control: list[ControlLink] = []
    group_settings = {"step_timeout_s": step_timeout_s, "heartbeat_timeout_s": heartbeat_timeout_s}
    if len(tasks) == 1:
        return Group(tasks, index, data=data, control=control, **group_settings)
    me = Identity(tuple(cluster_addresses), tuple(tasks), index, fingerprint, heartbeat_timeout_s)
    say = on_wait or (lambda message: logger.warning("%s", message))
    meeting = _Meeting(me, secret, start_timeout_s, say, share_memory=share_memory)
    return meeting.run(group_settings)


class _Meeting:
    """One task's side of the meeting: threads shake hands, `run` collects the results."""

    def __init__(
        self,
        me: Identity,
        secret: bytes | None,
        start_timeout_s: float,
        on_wait: Callable[[str], None],
        *,
        share_memory: bool,
    ) -> None:
        self._share_memory = share_memory
        self._me, self._secret, self._on_wait = me, secret, on_wait
        self._timeout_s, self._started = start_timeout_s, time.monotonic()
        self._deadline = self._started + start_timeout_s
        self._results: queue.SimpleQueue[Arrival | MeetingError] = queue.SimpleQueue()
        self._over = threading.Event()
        self._last_words: dict[int, str] = {}  # by peer: why it is not here yet
        self._dropped = ""  # the last stranger
        self._sockets: dict[tuple[int, Channel], socket.socket] = {}
        self._control: dict[int, ControlLink] = {}
        self._peers: dict[int, Mapping[str, Any]] = {}  # what each said of itself
        self._reception: Reception | None = None
        self._let_in: Arrival | None = None  # the connection to a task that keeps a door open
        self._beat_at = 0.0

    def run(self, group_settings: Mapping[str, float]) -> Group:
        me = self._me
        try:
            others = [address for i, address in enumerate(me.addresses) if i != me.index]
            self._reception = Reception(listen(me.addresses[me.index], others=others, task=me.name), self._receive)
            for index in range(me.index):
                self._start(self._connect, index)
            self._collect()
            return self._gather(group_settings) if self._let_in is None else self._come_back(group_settings)
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            self._over.set()
            if self._reception is not None:
                self._reception.close()
            self._drop_late_arrivals()

    def _start(self, function: Callable[..., None], *args: Any) -> threading.Thread:
        name = f"tfdist-{function.__name__.strip('_')}"
        thread = threading.Thread(target=function, args=args, name=name, daemon=True)
        thread.start()
        return thread

    # In the threads

    def _connect(self, index: int) -> None:
        """Connects both channels to a task before us, however long it takes to come."""
        host, port = split_address(self._me.addresses[index])
        for channel in CHANNELS:
            pause = _RETRY_S
            while not self._over.is_set():
                try:
                    arrival = self._connect_once(host, port, channel)
                    self._check_index(arrival, index)
                    self._check_verdict(arrival)
                except MeetingError as error:
                    self._results.put(error)
                    return
                except wire.SecretError as error:
                    # We went to the address that the cluster names: that can't be a passer-by.
                    where = f"{self._me.tasks[index]} at {self._me.addresses[index]}"
                    self._results.put(MeetingError(f"{where} {error}: it belongs to another job than {self._me.name}"))
                    return
                except (wire.WireError, OSError, UnicodeError) as error:
                    self._last_words[index] = _why(error)
                    self._over.wait(pause)
                    pause = min(pause * 1.5, _MAX_RETRY_S)
                else:
                    self._hand_over(arrival)
                    if Verdict.of(arrival.identity) is not None:
                        return  # at a door one connection is all
                    break

    def _connect_once(self, host: str, port: int, channel: Channel) -> Arrival:
        error: OSError = ConnectionRefusedError("no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            wire.close_in_forked_child(sock)
            try:
                # Should our temporary port be one that a task wants to listen on, this lets it.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.settimeout(max(0.1, min(reception.HANDSHAKE_S, self._deadline - time.monotonic())))
                sock.connect(address)
                if sock.getsockname() == sock.getpeername():
                    # TCP connects a socket to itself when the target happens to be its own temporary port.
                    raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
                return self._shake_hands(sock, wire.greet, channel)
            except OSError as failure:
                error = failure
                sock.close()
            except BaseException:
                sock.close()
                raise
        raise error

    def _check_index(self, arrival: Arrival, index: int) -> None:
        if arrival.identity["index"] != index:
            arrival.sock.close()
            where = f"at {self._me.addresses[index]}, the address of {self._me.tasks[index]},"
            raise MeetingError(f"{where} answers {arrival.identity['task']}")

    def _check_verdict(self, arrival: Arrival) -> None:
        """Raises where the task we connected to keeps a door open, and does not let us in (yet)."""
        verdict = Verdict.of(arrival.identity)
        if verdict is None or verdict.answer == YES:
            return
        arrival.sock.close()
        if verdict.answer == NO:
            raise MeetingError(verdict.why)
        raise wire.WireError(f"says that {verdict.why}")

    def _receive(self, sock: socket.socket, address: tuple[Any, ...]) -> None:
        """Shakes hands with whoever connected."""
        try:
            arrival = self._shake_hands(sock, wire.answer, None)
            if arrival.identity["index"] <= self._me.index:
                peer, name = arrival.identity["task"], self._me.name
                if peer == name:
                    raise MeetingError(f"{name} is there twice: here, and {arrival.identity['process']}")
                raise MeetingError(f"{peer} connected to {name}, which should connect to it")
            self._hand_over(arrival)
        except MeetingError as error:
            sock.close()
            self._results.put(error)
        except (wire.WireError, OSError) as error:
            sock.close()
            if isinstance(error, wire.SecretError) and self._secret is None:
                # Without a secret there are no strangers: this is a task of a job that has one.
                self._results.put(MeetingError(f"a task at {address[0]} {error}: give all tasks the same secret"))
            elif not self._over.is_set():
                self._dropped = f"a connection from {address[0]}: it {error}"
                reception.log_dropped(self._me.name, self._dropped, error)

    def _hand_over(self, arrival: Arrival) -> None:
        arrival.sock.setblocking(False)
        self._results.put(arrival)
        if self._over.is_set():
            self._drop_late_arrivals()

    def _shake_hands(
        self, sock: socket.socket, handshake: Callable[..., dict[str, Any]], channel: Channel | None
    ) -> Arrival:
        return reception.shake_hands(
            sock, handshake, channel, me=self._me, secret=self._secret, deadline=self._deadline
        )

    # In the caller's thread

    def _collect(self) -> None:
        """Waits until every pair is connected, or a door was found."""
        word_at = self._started + FIRST_WORD_S
        while self._let_in is None and (missing := self._missing()):
            now = time.monotonic()
            if now >= self._deadline:
                raise MeetingError(self._missing_text(missing), timed_out=True)
            if now >= word_at:
                word_at = now + NEXT_WORD_S
                self._say_waiting(missing, now)
            self._beat(now)
            try:
                result = self._results.get(timeout=max(0.0, min(self._deadline - now, 0.1)))
            except queue.Empty:
                self._look_for_goodbyes()
                continue
            if isinstance(result, MeetingError):
                raise result
            self._admit(result)

    def _missing(self) -> list[int]:
        return [i for i in range(len(self._me.tasks)) if i != self._me.index and not self._is_here(i)]

    def _is_here(self, index: int) -> bool:
        return all((index, channel) in self._sockets for channel in CHANNELS)

    def _admit(self, arrival: Arrival) -> None:
        peer = arrival.identity
        index, channel = peer["index"], peer["channel"]
        if Verdict.of(peer) is not None:
            self._let_in = arrival
            return
        known = self._peers.setdefault(index, peer)
        if known.get("incarnation") != peer.get("incarnation"):
            error = MeetingError(f"{peer['task']} is there twice: {known['process']} and {peer['process']}")
            ControlLink(index, "", arrival.sock).send(wire.GOODBYE, _farewell(error))
            arrival.sock.close()
            raise error
        if (index, channel) in self._sockets:
            # It did not get the last word of its first handshake and tried again.
            self._sockets[index, channel].close()
        self._sockets[index, channel] = arrival.sock
        if channel == "control":
            self._control[index] = ControlLink(index, str(peer["task"]), arrival.sock)

    def _beat(self, now: float) -> None:
        """Lets those who have everybody, and wait for us in the group already, know that we live."""
        if now >= self._beat_at:
            self._beat_at = now + self._beat_s()
            for link in self._control.values():
                link.send(wire.HEARTBEAT, {"step": None, "doing": "in the meeting"})

    def _beat_s(self) -> float:
        timeouts = [self._me.heartbeat_timeout_s, *(peer["heartbeat_timeout_s"] for peer in self._peers.values())]
        return float(min(MAX_BEAT_S, min(timeouts) / 10))

    def _look_for_goodbyes(self) -> None:
        """Ends the meeting when a task that had come already goes away again."""
        for index, link in self._control.items():
            # The end of the control connection comes after the goodbye; that of the data connection may overtake it.
            try:
                goodbyes = [wire.decode(f.body) for f in link.receive() if f.kind in (wire.GOODBYE, wire.BROKEN)]
            except wire.WireError as error:
                raise MeetingError(f"{link.name} broke the control connection: it {error}") from None
            if goodbyes:
                text = str(goodbyes[0].get("why") or goodbye(link, goodbyes[0]).text)
                timed_out = goodbyes[0].get("timed_out") is True
                raise MeetingError(
                    f"{text} (while {self._me.name} was waiting for the others)", timed_out=timed_out
                ) from None
            if link.ended and self._is_here(index):
                raise MeetingError(f"{link.name} came, and ended before all tasks were here (killed or crashed?)")
        for (index, channel), sock in list(self._sockets.items()):
            # Half a pair that ended may come again: its handshake took too long for it.
            if not self._is_here(index) and _has_ended(sock):
                self._sockets.pop((index, channel)).close()
                self._control.pop(index, None)

    def _say_waiting(self, missing: Sequence[int], now: float) -> None:
        names = ", ".join(self._address_text(i) for i in missing[:4])
        if len(missing) > 4:
            names += f" and {len(missing) - 4} more"
        why = self._last_words.get(missing[0])
        times = f"{now - self._started:.0f} s of {self._timeout_s:g} s"
        self._on_wait(f"waiting for {names} ({times}{f'; {why}' if why else ''})")

    def _address_text(self, index: int) -> str:
        return f"{self._me.tasks[index]} at {self._me.addresses[index]}"

    def _missing_text(self, missing: Sequence[int]) -> str:
        each = [f"{self._address_text(i)} ({self._last_words.get(i, 'never connected')})" for i in missing]
        count = f"{len(missing)} of {len(self._me.tasks)} tasks did not come to {self._me.name}"
        dropped = f". The last stranger dropped was {self._dropped}" if self._dropped else ""
        return f"{count} within {self._timeout_s:g} s: {', '.join(each)}{dropped}"

    def _gather(self, group_settings: Mapping[str, float]) -> Group:
        """Makes the group, and waits in it until all tasks have got so far."""
        data = {index: sock for (index, channel), sock in self._sockets.items() if channel == "data"}
        group = Group(
            self._me.tasks,
            self._me.index,
            data=data,
            control=list(self._control.values()),
            step_timeout_s=max(0.1, self._deadline - time.monotonic()),
            heartbeat_timeout_s=group_settings["heartbeat_timeout_s"],
            beat_s=self._beat_s(),
        )
        try:
            group.barrier("meeting")
            names = [str(task) for task in group.tasks]
            shared = sharing.find(
                group.index,
                names,
                allowed=self._share_memory,
                gather=lambda data, tag: group.all_gather_bytes(data, tag=tag),
            )
            group.share(shared)
        except GroupError as error:
            group.leave(None, str(error))
            group.close()
            raise MeetingError(str(error), timed_out=isinstance(error, WaitError)) from error
        except BaseException:
            group.close()
            raise
        group.set_step_timeout(group_settings["step_timeout_s"])
        group.door = Door(group, self._me, self._secret)
        return group

    def _come_back(self, group_settings: Mapping[str, float]) -> Group:
        """Makes the group of a task that was let in after the meeting: it watches the one that let it in."""
        assert self._let_in is not None
        for sock in self._sockets.values():
            sock.close()
        peer = self._let_in.identity
        link = ControlLink(peer["index"], str(peer["task"]), self._let_in.sock)
        beat_s = min(MAX_BEAT_S, peer["heartbeat_timeout_s"] / 10, self._me.heartbeat_timeout_s / 10)
        return Group(self._me.tasks, self._me.index, data={}, control=[link], beat_s=beat_s, **group_settings)

    def _abandon(self, error: BaseException) -> None:
        """Tells those who are here why this task goes."""
        for link in self._control.values():
            link.send(wire.GOODBYE, _farewell(error))
        for sock in self._sockets.values():
            sock.close()
        if self._let_in is not None:
            self._let_in.sock.close()

    def _drop_late_arrivals(self) -> None:
        with suppress(queue.Empty):
            while True:
                result = self._results.get_nowait()
                if isinstance(result, Arrival):
                    result.sock.close()


def _farewell(error: BaseException) -> dict[str, Any]:
    reason = str(error) if isinstance(error, MeetingError) else f"{type(error).__name__}: {error}"
    timed_out = isinstance(error, MeetingError) and error.timed_out
    return {"code": None, "reason": reason[:MAX_TEXT], "step": None, "timed_out": timed_out}


def _has_ended(sock: socket.socket) -> bool:
    # A task that has everybody may have begun its first call on this connection: look, don't take.
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _why(error: Exception) -> str:
    if isinstance(error, (socket.gaierror, UnicodeError)):  # the latter for "a..b", which no name can be
        return "name not found"
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    return f"it {error}"
