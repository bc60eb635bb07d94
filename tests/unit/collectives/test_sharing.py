"""Who shares memory: those that prove it, whatever comes between; and nothing is left behind."""

from __future__ import annotations

import gc
import json
import logging
import os
import secrets
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from group_threads import Together, in_threads

from tfdist.collectives import segment, sharing
from tfdist.collectives.sharing import _groups, find

needs_linux = pytest.mark.skipif(bool(segment.missing()), reason="no memory to share here")
pytestmark = needs_linux


def sharing_of(**settings) -> list:
    together = Together(**settings)
    try:
        each = [group.sharing for group in together.groups]
        assert all(groups == each[0] for groups in each)
        one = np.ones(3)
        totals = together.values(lambda group: group.all_reduce([one], tag="x")[0])
        assert all((total == len(each)).all() for total in totals)
        return each[0]
    finally:
        together.close()


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({"count": 3}, [[0, 1, 2]]),
        ({"count": 3, "share_memory": False}, [[0], [1], [2]]),
        ({"count": 3, "share_memory": [True, False, True]}, [[0, 2], [1]]),
        ({"count": 4, "hosts": "abab"}, [[0, 2], [1, 3]]),
        ({"count": 3, "hosts": "abc"}, [[0], [1], [2]]),
    ],
    ids=["all", "none may", "one may not", "two hosts", "all alone"],
)
def test_tasks_of_one_kernel_share_where_they_may(settings, groups):
    assert sharing_of(**settings) == groups


@pytest.mark.parametrize(
    ("pairs", "groups"),
    [
        ([{1, 2}, {0, 2}, {0, 1}], [[0, 1, 2]]),
        ([{1}, {0, 2}, {1}], [[0, 1], [2]]),
        ([{1}, set(), set()], [[0], [1], [2]]),
        ([{2}, {3}, {0}, {1}], [[0, 2], [1, 3]]),
    ],
    ids=["all", "not one with all", "one says so, the other not", "two"],
)
def test_each_task_of_a_group_shares_with_each_other(pairs, groups):
    assert _groups(pairs) == groups


def test_memory_in_which_a_task_does_not_find_what_its_owner_wrote_is_not_shared(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(segment.Segment, "nonce", property(lambda self: secrets.token_bytes(32)))
    assert sharing_of(count=2) == [[0], [1]]
    assert "worker 0 shares no memory with worker 1: its memory is not what it sees itself" in caplog.text
    assert "did not answer" not in caplog.text


@pytest.mark.parametrize("size", [segment.SIZE, 4096], ids=["not sealed", "too small"])
def test_memory_whose_size_may_change_is_no_segment(size):
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    try:
        os.truncate(fd, size)
        with pytest.raises(ValueError, match="no sealed memory of the right size"):
            segment.Segment(fd, is_mine=False)
    finally:
        os.close(fd)


def test_a_reader_can_not_write_and_nobody_can_shrink_a_segment():
    mine, fd = segment.create()
    try:
        theirs = segment.Segment(fd, is_mine=False)
        assert theirs.nonce == mine.nonce
        with pytest.raises(PermissionError):
            os.truncate(fd, 0)
        with pytest.raises(ValueError, match="read-only"):
            theirs.pieces[0][0] = 1
    finally:
        os.close(fd)


def test_a_task_that_has_no_memory_uses_tcp_and_says_why(monkeypatch, caplog):
    caplog.set_level(logging.INFO)

    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert sharing_of(count=2) == [[0], [1]]
    assert "worker 0 shares no memory: [Errno 28] No space left on device" in caplog.text


def test_a_task_that_does_not_answer_is_not_waited_for_long(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sharing, "DEADLINE_S", 0.3)
    monkeypatch.setattr(socket, "send_fds", lambda *arguments: None)
    assert sharing_of(count=2) == [[0], [1]]
    assert "worker 0 shares no memory with worker 1: it did not answer within 0.3 s" in caplog.text


def strangers(message: bytes, fds: int):
    """Returns `gather` for two tasks, between whose offers and answers somebody else connects to all sockets."""
    meeting, offered = threading.Barrier(2), [b"", b""]
    sockets: list[socket.socket] = []

    def gather(index: int):
        def gather(data: bytes, tag: str) -> list[bytes]:
            offered[index] = data
            if meeting.wait(10) == 0 and tag.startswith("offers"):
                for offer in offered:
                    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    sock.connect("\0" + json.loads(offer)["name"])
                    if message or fds:
                        socket.send_fds(sock, [message], [0] * fds)
                    sockets.append(sock)
            meeting.wait(10)
            every = list(offered)
            meeting.wait(10)
            return every

        return gather

    return gather, sockets


@pytest.mark.parametrize(
    ("message", "fds", "words"),
    [
        (b"", 0, ""),
        (b"hello", 0, "it sent 0 descriptors and 5 bytes"),
        (b"hello", 9, "it sent"),
        (json.dumps({"index": 1, "proof": "guessed"}).encode(), 2, "it does not know what it should"),
        (json.dumps({"index": [1], "proof": 1}).encode(), 2, "dropped a connection"),
        (b"[" * 4000, 2, "dropped a connection"),
    ],
    ids=["silent", "no descriptors", "too many", "no proof", "no number", "no JSON"],
)
def test_a_stranger_at_the_socket_disturbs_nobody(caplog, message, fds, words):
    caplog.set_level(logging.INFO)
    gather, sockets = strangers(message, fds)
    names = ["worker 0", "worker 1"]
    before = descriptors()
    results = in_threads([lambda i=i: find(i, names, allowed=True, gather=gather(i)) for i in range(2)])
    assert [shared.groups for shared in results] == [[[0, 1]], [[0, 1]]]
    assert words in caplog.text
    assert len(sockets) == 2
    for sock in sockets:
        sock.close()
    for shared in results:
        for neighbour in (shared.mine, *shared.neighbours):
            os.close(neighbour.wake_fd)
    del results, shared, neighbour
    assert descriptors() == before


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def segments() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:tfdist")


@pytest.mark.parametrize("hosts", ["aaa", "aab"])
def test_nothing_is_left_after_close(hosts):
    before = descriptors(), segments()
    together = Together(3, hosts=hosts)
    together.values(lambda group: group.all_reduce([np.ones(1000)], tag="x"))
    assert segments() > before[1]
    together.close()
    del together
    assert (descriptors(), segments()) == before


def test_nothing_is_left_after_an_error():
    before = descriptors(), segments()
    together = Together(2)
    errors = together.run(lambda group: group.barrier(f"of {group.task}"))
    assert len({str(error) for error in errors}) == 1
    del errors
    together.close()
    assert (descriptors(), segments()) == before
