"""After the meeting a task that starts anew is let in, or hears why not, and nobody else disturbs."""

from __future__ import annotations

import os
import socket

import pytest
from group_threads import free_addresses, in_threads, workers

from tfdist.collectives import Group, meet, reception
from tfdist.errors import GroupError, MeetingError


class Met:
    """Three tasks that have met; the first keeps the door."""

    def __init__(self, make_together) -> None:
        self.addresses = free_addresses(3)
        self.groups = make_together(3, addresses=self.addresses, heartbeat_timeout_s=20.0).groups
        self.came_back: list[Group] = []

    def open(self, why_not=lambda index: "") -> None:
        self.groups[0].door.open(why_not)

    def die(self, index: int) -> None:
        """Ends a task's connections without a word, as the system does for a process that is killed."""
        for fd in self.groups[index].connections:
            with socket.socket(fileno=os.dup(fd)) as sock:
                sock.shutdown(socket.SHUT_RDWR)
        self.groups[index].close()

    def come(self, index: int, **settings) -> Group:
        """Starts a task anew."""
        defaults = {"secret": b"secret", "start_timeout_s": 20.0, "step_timeout_s": 5.0, "heartbeat_timeout_s": 20.0}
        (result,) = in_threads([lambda: meet(self.addresses, workers(3), index, **{**defaults, **settings})])
        if isinstance(result, BaseException):
            raise result
        self.came_back.append(result)
        return result

    def changes(self, count: int) -> list[tuple[int, str | None]]:
        changes = [self.groups[0].changes().get(timeout=10) for _ in range(count)]
        return [(index, trouble and trouble.kind) for index, trouble in changes]


@pytest.fixture
def met(make_together):
    met = Met(make_together)
    yield met
    for group in met.came_back:
        group.leave(0)
        group.close()


def test_a_task_that_starts_anew_hears_the_goodbye_and_is_waited_for(met):
    met.open()
    met.die(2)
    group = met.come(2)
    assert group.has_come_back
    assert met.changes(2) == [(2, "died"), (2, None)]
    order = []

    def chief():
        met.groups[0].leave(0, wait_s=20)
        order.append("chief")

    def last():
        group.wait_until_left(0)
        order.append("last")
        group.leave(0)

    assert in_threads([chief, last, lambda: met.groups[1].leave(0)]) == [None] * 3
    assert order == ["last", "chief"]


def test_a_task_comes_back_as_often_as_it_dies(met):
    met.open()
    met.die(1)
    for _ in range(3):
        met.come(1).close()
    assert met.changes(7) == [(1, "died"), (1, None), (1, "left"), (1, None), (1, "left"), (1, None), (1, "left")]


def test_who_comes_before_the_door_is_open_waits(met):
    met.die(2)

    def late():
        assert met.changes(1) == [(2, "died")]
        met.open()

    group, _ = in_threads([lambda: met.come(2), late])
    assert isinstance(group, Group), group


def test_a_task_that_came_back_takes_part_in_no_call(met):
    met.open()
    met.die(2)
    with pytest.raises(GroupError, match="worker 2 came back after the others had met, and takes part in no call"):
        met.come(2).barrier("end")


def test_a_task_that_can_not_come_back_hears_why(met):
    met.open(lambda index: "its variables are lost" if index == 2 else "")
    met.die(2)
    with pytest.raises(MeetingError, match=r"^its variables are lost$") as error:
        met.come(2)
    assert not error.value.timed_out


def test_a_task_whose_former_process_is_alive_is_refused_and_disturbs_nobody(met):
    met.open()
    with pytest.raises(
        MeetingError, match=r"worker 1 is there twice: the one that came first is alive, end process \d+"
    ):
        met.come(1)
    met.groups[0].leave(0)
    assert met.groups[1].wait_until_left(0) == "worker 0 left with code 0"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fingerprint": "version 2"}, "worker 2 runs with 'version 2', worker 0 with ''"),
        ({"secret": b"other"}, "has another job secret than we have: it belongs to another job than worker 2"),
        ({"secret": None}, "has a job secret, we have none: it belongs to another job than worker 2"),
    ],
    ids=["fingerprint", "secret", "no secret"],
)
def test_who_does_not_belong_here_is_not_let_in(met, settings, words):
    met.open()
    met.die(2)
    with pytest.raises(MeetingError, match=words):
        met.come(2, **settings)
    assert met.changes(1) == [(2, "died")]
    assert met.groups[0].changes().empty()


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100_000, b"", b"tfd\x01\x01\0\0\0\xff\xff\xff\xff", b"tf"],
    ids=["HTTP", "zeros", "silence", "4 GiB announced", "half a header"],
)
def test_strangers_at_the_door_do_not_keep_a_task_out(met, said, monkeypatch):
    monkeypatch.setattr(reception, "MAX_HANDSHAKES", 4)
    monkeypatch.setattr(reception, "HANDSHAKE_S", 0.5)
    met.open()
    met.die(2)
    host, _, port = met.addresses[0].rpartition(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(12)]
    for stranger in strangers:
        stranger.sendall(said)
    met.come(2)
    met.groups[0].leave(0)
    for stranger in strangers:
        stranger.close()


def test_nobody_listens_after_the_goodbye(met):
    met.open()
    met.groups[0].leave(0)
    host, _, port = met.addresses[0].rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
