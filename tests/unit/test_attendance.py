"""Who of a parameter-server cluster is there: what is said of it, and when the run can not go on."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from contextlib import suppress

import pytest
from group_threads import DEADLINE_S, free_addresses, in_threads

from tfdist.attendance import Attendance
from tfdist.cluster import Task
from tfdist.collectives import meet
from tfdist.errors import PeerLostError

TASKS = [Task("chief", 0), Task("worker", 0), Task("worker", 1), Task("ps", 0)]
SETTINGS = {"secret": None, "start_timeout_s": 20.0, "step_timeout_s": 20.0, "heartbeat_timeout_s": 20.0}


class Peer:
    """A task of which only the connections are there."""

    def __init__(self, group) -> None:
        self.group = group

    def die(self) -> None:
        for fd in self.group.connections:
            with socket.socket(fileno=os.dup(fd)) as sock:
                sock.shutdown(socket.SHUT_RDWR)
        self.group.close()


class Cluster:
    """A chief with an open door, two workers and a ps, as threads of this process."""

    def __init__(self) -> None:
        self.addresses = free_addresses(len(TASKS))
        groups = in_threads([lambda i=i: self._meet(i) for i in range(len(TASKS))])
        self.chief = groups[0]
        self.peers = {str(task): Peer(group) for task, group in zip(TASKS, groups, strict=True)}
        self.chief.door.open()

    def _meet(self, index: int):
        return meet(self.addresses, TASKS, index, **SETTINGS)

    def come_back(self, name: str) -> None:
        self.peers[name] = Peer(self._meet([str(task) for task in TASKS].index(name)))

    def attendance(self, **settings) -> Attendance:
        defaults = {"has_launcher": False, "start_timeout_s": 60.0}
        return Attendance(self.chief, **{**defaults, **settings})

    def close(self) -> None:
        for peer in self.peers.values():
            peer.group.leave(0)
            peer.group.close()


@pytest.fixture
def cluster():
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def words(caplog):
    """Waits for words of the log."""
    caplog.set_level(logging.WARNING, logger="tfdist")

    def wait_for(pattern: str) -> None:
        until(lambda: any(re.fullmatch(pattern, message) for message in caplog.messages), f"{pattern}: {caplog.text}")

    return wait_for


def until(condition, what: str) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up, what
        threading.Event().wait(0.01)


def error_of(attendance: Attendance) -> PeerLostError:
    """Waits until the run can not go on."""
    errors = []

    def check() -> bool:
        with suppress(PeerLostError):
            attendance.check()
            return False
        try:
            attendance.check()
        except PeerLostError as error:
            errors.append(error)
        return True

    until(check, "the run can go on")
    return errors[0]


GONE = r"is gone: its connection closed without a goodbye \(killed or crashed\?\)"


def test_a_worker_that_goes_and_comes_back_is_said_and_no_error(cluster, words):
    there = cluster.attendance()
    cluster.peers["worker 1"].die()
    words(f"worker 1 {GONE}; training goes on with 1 worker")
    assert there.missing_workers() == {1}
    there.check()
    cluster.come_back("worker 1")
    words("worker 1 is back: 2 workers")
    assert there.missing_workers() == set()
    cluster.peers["worker 1"].group.leave(1, "ValueError: bad shape")
    words("worker 1 left with code 1: ValueError: bad shape; training goes on with 1 worker")
    there.check()


def test_without_a_ps_the_run_can_not_go_on(cluster, words):
    there = cluster.attendance()
    cluster.peers["ps 0"].die()
    error = error_of(there)
    assert error.task == Task("ps", 0)
    assert re.match(f"ps 0 {GONE}, and training can not go on without the variables on it; start the run", str(error))
    words(f"ps 0 {GONE}; training can not go on without the variables on it")


def test_the_last_worker_is_waited_for_as_long_as_at_the_start(cluster, words):
    there = cluster.attendance(start_timeout_s=1.0)
    cluster.peers["worker 0"].die()
    words("worker 0 .*; training goes on with 1 worker")
    cluster.peers["worker 1"].die()
    words("worker 1 .*; no worker is left")
    words(r"waiting for a worker to come back \(0 s of 1 s\): none is left")
    error = error_of(there)
    assert error.task == Task("worker", 1)
    assert str(error).startswith("no worker is left, and none came back within 1 s; the last one: worker 1 is gone")


def test_the_end_of_the_group_ends_the_thread(cluster):
    before = {thread for thread in threading.enumerate() if thread.name == "tfdist attendance"}
    cluster.attendance()
    (mine,) = {thread for thread in threading.enumerate() if thread.name == "tfdist attendance"} - before
    cluster.chief.leave(0)
    mine.join(DEADLINE_S)
    assert not mine.is_alive()
