"""Words of tasks, well formed and not."""

from __future__ import annotations

import json
import os
import socket
import threading

import pytest

from tfdist.launch.control import LONGEST_LINE, ControlServer
from tfdist.launch.pump import Pump


@pytest.fixture
def server(tmp_path):
    """A running server: a function that connects, and what it has heard, with an event per message."""
    heard, news = [], threading.Semaphore(0)

    def hear(task, attempt, message):
        heard.append((task, attempt, message))
        news.release()

    pump = Pump()
    pump.add(ControlServer(str(tmp_path), pump, hear))
    pump.start()

    def connect():
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(10)
        client.connect(os.path.join(tmp_path, "control.sock"))
        return client

    yield connect, heard, news
    pump.begin_finish()
    assert pump.is_finished(10)


HELLO = b'{"kind": "hello", "task": "2", "attempt": "1", "pid": 1}\n'


def test_words_come_with_the_task_that_said_hello(server):
    connect, heard, news = server
    with connect() as client:
        client.sendall(HELLO + b'{"kind": "st')
        client.sendall(b'ep", "step": 3}\n')
        assert news.acquire(timeout=10)
        assert news.acquire(timeout=10)
    assert heard == [(2, 1, json.loads(HELLO)), (2, 1, {"kind": "step", "step": 3})]


@pytest.mark.parametrize(
    "garbage", [b"\n", b"{\n", b"[1]\n", b"\xff\xfe\n", b'{"kind": "hello", "task": "x", "attempt": "0"}\n', b"7\n"]
)
def test_garbage_is_passed_over(server, garbage):
    connect, heard, news = server
    with connect() as client:
        client.sendall(garbage + HELLO)
        assert news.acquire(timeout=10)
    assert heard == [(2, 1, json.loads(HELLO))]


def test_a_line_without_an_end_costs_its_connection_and_no_other(server):
    connect, heard, news = server
    with connect() as endless, connect() as good:
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            endless.sendall(b"x" * LONGEST_LINE * 64)
        good.sendall(HELLO)
        assert news.acquire(timeout=10)
    assert [task for task, *_ in heard] == [2]
