"""Tasks find each other in any order and among strangers; who is missing, double or different is named."""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
import time
from contextlib import suppress

import pytest
from group_threads import free_addresses, in_threads, meet_all, workers

from tfdist import wire
from tfdist.cluster import Task
from tfdist.collectives import Group, meet, meeting, reception
from tfdist.collectives.identity import Identity
from tfdist.errors import MeetingError

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def meet_one(addresses, index, **settings):
    defaults = {"secret": b"secret", "start_timeout_s": 5.0, "step_timeout_s": 5.0}
    return meet(addresses, workers(len(addresses)), index, **{**defaults, **settings})


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def close(groups):
    for group in groups:
        if isinstance(group, Group):
            group.leave(0)
            group.close()


def errors_of(results):
    close(results)
    assert [type(result) for result in results] == [MeetingError] * len(results), results
    return [str(result) for result in results]


def has_ipv6() -> bool:
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6"))]
)
def test_tasks_meet_on_any_kind_of_address(host):
    groups = meet_all(3, addresses=free_addresses(3, host))
    try:
        assert (
            in_threads([lambda g=group: g.all_gather_bytes(str(g.task).encode(), tag="who") for group in groups])
            == [[b"worker 0", b"worker 1", b"worker 2"]] * 3
        )
    finally:
        close(groups)


def test_one_task_alone_needs_no_socket():
    with meet(["nowhere.invalid:1"], [Task("chief", 0)], 0, secret=None, start_timeout_s=1, step_timeout_s=1) as group:
        group.barrier("alone")
        assert (group.size, group.index, group.task) == (1, 0, Task("chief", 0))


def test_a_task_that_starts_late_is_waited_for(monkeypatch):
    monkeypatch.setattr(meeting, "FIRST_WORD_S", 0.05)
    monkeypatch.setattr(meeting, "NEXT_WORD_S", 0.05)
    addresses = free_addresses(2)
    words: queue.SimpleQueue[str] = queue.SimpleQueue()

    def late():
        while "connection refused" not in words.get(timeout=5):
            pass
        return meet_one(addresses, 0)

    groups = in_threads([late, lambda: meet_one(addresses, 1, on_wait=words.put)])
    close(groups)
    assert [type(group) for group in groups] == [Group, Group]


def test_missing_tasks_are_named_with_address_and_reason():
    addresses = free_addresses(4)
    results = in_threads([lambda: meet_one(addresses, 1, start_timeout_s=1.5), lambda: meet_one(addresses, 3)])
    first, last = errors_of(results)
    assert "2 of 4 tasks did not come to worker 1 within 1.5 s" in first
    assert f"worker 0 at {addresses[0]} (connection refused), worker 2 at {addresses[2]} (never connected)" in first
    assert last.startswith(f"worker 1 left: {first}")  # told, before its own time is over


@pytest.mark.parametrize("name", ["nowhere.invalid", "a..b", "x" * 70])
def test_a_host_name_that_does_not_exist_is_said_to_be_that(name):
    addresses = [f"{name}:2222", *free_addresses(1)]
    with pytest.raises(MeetingError, match=rf"worker 0 at {name}:2222 \(name not found\)"):
        meet_one(addresses, 1, start_timeout_s=0.5)


def test_waiting_is_said_in_time_and_then_again(monkeypatch):
    monkeypatch.setattr(meeting, "FIRST_WORD_S", 0.1)
    monkeypatch.setattr(meeting, "NEXT_WORD_S", 0.2)
    addresses, words = free_addresses(2), []
    with pytest.raises(MeetingError):
        meet_one(addresses, 0, start_timeout_s=0.9, on_wait=words.append)
    assert 2 <= len(words) <= 5
    assert all(word.startswith(f"waiting for worker 1 at {addresses[1]} (") and "s of 0.9 s" in word for word in words)


# Tasks that do not belong together


def test_differing_clusters_end_the_meeting_on_both_sides_at_once():
    addresses = free_addresses(3)
    started = time.monotonic()
    results = in_threads(
        [lambda: meet_one(addresses[:2], 0, start_timeout_s=30), lambda: meet_one(addresses, 1, start_timeout_s=30)]
    )
    two, three = f"worker 0 at {addresses[0]}, worker 1 at {addresses[1]} (2 tasks)", "(3 tasks)"
    for text in errors_of(results):
        assert "believes the cluster is" in text
        assert two in text
        assert three in text
    assert time.monotonic() - started < 5


def test_the_first_different_address_is_named():
    addresses = free_addresses(3)
    other = [*addresses[:2], "10.0.0.1:5"]
    results = in_threads([lambda: meet_one(addresses, 0), lambda: meet_one(other, 1)])
    assert all("the first difference is entry 2" in text and "10.0.0.1:5" in text for text in errors_of(results))


def test_differing_fingerprints_are_named_with_their_tasks():
    addresses = free_addresses(2)
    results = in_threads([lambda i=i: meet_one(addresses, i, fingerprint=f"keras 3.1{i}") for i in range(2)])
    first, second = errors_of(results)
    assert first == "worker 0 runs with 'keras 3.10', worker 1 with 'keras 3.11'"
    assert second == "worker 1 runs with 'keras 3.11', worker 0 with 'keras 3.10'"


def test_the_same_task_twice_is_an_error():
    """On one host the port shows it; here two come from elsewhere, as from two pods behind one name."""
    addresses = free_addresses(3)

    def come():
        """The part of a task that connects."""
        identity = Identity(tuple(addresses), tuple(workers(3)), 1, "", 30.0)
        sock = knock(addresses[0], None)
        wire.greet(sock, secret=b"secret", identity=identity.message("data"), deadline=time.monotonic() + 5)
        return sock

    result, *socks = in_threads([lambda: meet_one(addresses, 0), come, come])
    for sock in socks:
        sock.close()
    (text,) = errors_of([result])
    assert f"worker 1 is there twice: process {os.getpid()} on {socket.gethostname()} and process" in text


def test_another_secret_is_an_error_at_once_where_it_came_from_and_a_hint_where_it_came_to():
    addresses = free_addresses(2)
    results = in_threads(
        [
            lambda: meet_one(addresses, 0, secret=b"one", start_timeout_s=1),
            lambda: meet_one(addresses, 1, secret=b"other", start_timeout_s=30),
        ]
    )
    host, comer = errors_of(results)
    assert (
        comer
        == f"worker 0 at {addresses[0]} has another job secret than we have: it belongs to another job than worker 1"
    )
    assert "dropped was a connection from 127.0.0.1: it has another job secret than we have" in host


@pytest.mark.parametrize(("first", "second"), [(None, b"secret"), (b"secret", None)])
def test_a_secret_on_one_side_only_is_an_error(first, second):
    addresses = free_addresses(2)
    results = in_threads(
        [
            lambda: meet_one(addresses, 0, secret=first, start_timeout_s=1),
            lambda: meet_one(addresses, 1, secret=second, start_timeout_s=30),
        ]
    )
    assert all("job secret" in text for text in errors_of(results))


def test_a_failed_meeting_is_told_to_those_who_were_there():
    """Worker 2 never comes; worker 0 gives up early, and worker 1 need not wait its whole time."""
    addresses = free_addresses(3)
    results = in_threads(
        [lambda: meet_one(addresses, 0, start_timeout_s=1.5), lambda: meet_one(addresses, 1, start_timeout_s=60)]
    )
    first, second = errors_of(results)
    assert f"worker 2 at {addresses[2]}" in first
    assert second.startswith(f"worker 0 left: {first}")


# Ports


def test_a_taken_port_is_an_error_at_once():
    addresses = free_addresses(2)
    with socket.create_server(("127.0.0.1", port_of(addresses[0]))), pytest.raises(MeetingError) as error:
        meet_one(addresses, 0, start_timeout_s=60)
    assert f"worker 0 can not listen at {addresses[0]}: the port is taken by process {os.getpid()} (" in str(
        error.value
    )


@on_linux
@pytest.mark.parametrize("host", ["127.0.0.1", ""], ids=["same address", "all interfaces"])
def test_a_port_shared_with_another_listener_counts_as_taken(host):
    addresses = free_addresses(2)
    with (
        socket.create_server((host, port_of(addresses[0])), reuse_port=True),
        pytest.raises(MeetingError, match="taken"),
    ):
        meet_one(addresses, 0, start_timeout_s=60)


def test_a_launcher_may_hold_the_ports_bound_until_the_tasks_listen():
    held, addresses = [], []
    for _ in range(2):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("127.0.0.1", 0))
        held.append(sock)
        addresses.append(f"127.0.0.1:{sock.getsockname()[1]}")
    groups = meet_all(2, addresses=addresses)
    close(groups)
    for sock in held:
        sock.close()
    assert [type(group) for group in groups] == [Group, Group]


@pytest.mark.parametrize("reuse", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_the_port_is_free_for_another_server_while_the_group_lives(reuse):
    addresses = free_addresses(2)
    groups = meet_all(2, addresses=addresses)
    servers = []
    for address in addresses:
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, reuse, 1)
        server.bind(("", port_of(address)))
        server.listen()
        servers.append(server)
    try:
        assert in_threads([lambda g=group: g.barrier("beside a server") for group in groups]) == [None, None]
    finally:
        close(groups)
        for server in servers:
            server.close()


def test_an_address_that_is_not_of_this_machine_is_listened_on_everywhere(caplog):
    """As in a pod behind a service: 192.0.2.1 is reserved for documentation and nobody's."""
    port = port_of(free_addresses(1)[0])
    with caplog.at_level(logging.WARNING, "tfdist"), pytest.raises(MeetingError, match="worker 1"):
        meet_one([f"192.0.2.1:{port}", "127.0.0.1:1"], 0, start_timeout_s=0.2)
    assert f"192.0.2.1 is no address of this machine: listening on all interfaces, port {port}" in caplog.text


@pytest.mark.parametrize("address", ["nohost", "host:", ":5", "host:port", "host:0", "host:70000", "host:-1"])
def test_an_address_without_host_or_port_is_named(address):
    with pytest.raises(MeetingError, match="is no address of the form host:port"):
        meet_one([address, "127.0.0.1:1"], 0)


# Strangers


def knock(address, said: bytes | None):
    """Connects as soon as somebody listens, says something and leaves the connection open."""
    host, port = address.split(":")
    while True:
        sock = socket.socket()
        try:
            sock.connect((host, int(port)))
            break
        except ConnectionRefusedError:
            sock.close()
    if said is not None:
        sock.sendall(said)
    return sock


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100_000, None, b"", b"tfd\x01\x01\0\0\0\xff\xff\xff\xff", b"tf"],
    ids=["HTTP", "zeros", "silence", "nothing", "4 GiB announced", "half a header"],
)
def test_strangers_on_the_port_do_not_disturb_the_meeting(said):
    addresses = free_addresses(2)
    strangers = []

    def second():
        strangers.extend(knock(addresses[0], said) for _ in range(5))
        return meet_one(addresses, 1, start_timeout_s=20)

    started = time.monotonic()
    groups = in_threads([lambda: meet_one(addresses, 0, start_timeout_s=20), second])
    close(groups)
    for sock in strangers:
        sock.close()
    assert [type(group) for group in groups] == [Group, Group]
    assert time.monotonic() - started < 5


def test_those_who_have_met_all_wait_for_one_who_is_held_up(monkeypatch):
    """A stranger keeps worker 2 from worker 1 for longer than the heartbeat time; worker 0 has both."""
    monkeypatch.setattr(reception, "MAX_HANDSHAKES", 1)
    monkeypatch.setattr(reception, "HANDSHAKE_S", 2.0)
    addresses, strangers = free_addresses(3), []

    def held_up():
        strangers.append(knock(addresses[1], None))
        return meet_one(addresses, 2, start_timeout_s=20, heartbeat_timeout_s=1.0)

    timeouts = {"start_timeout_s": 20, "heartbeat_timeout_s": 1.0}
    started = time.monotonic()
    groups = in_threads(
        [lambda: meet_one(addresses, 0, **timeouts), lambda: meet_one(addresses, 1, **timeouts), held_up]
    )
    close(groups)
    strangers[0].close()
    assert [type(group) for group in groups] == [Group] * 3
    assert time.monotonic() - started > 1.5


def test_a_stranger_at_a_peers_address_is_waited_out_and_named():
    addresses = free_addresses(2)
    with socket.create_server(("127.0.0.1", port_of(addresses[0]))) as server:

        def serve():
            with suppress(OSError):
                while True:
                    sock, _ = server.accept()
                    with sock:
                        sock.sendall(b"220 mail.example.org ESMTP\r\n")

        serving = threading.Thread(target=serve)
        serving.start()
        with pytest.raises(
            MeetingError, match=r"worker 0 at .* \(it does not speak tfdist's protocol \(sent b'220 mail"
        ):
            meet_one(addresses, 1, start_timeout_s=0.5)
        server.shutdown(socket.SHUT_RDWR)
        serving.join()


def test_nothing_is_left_open_after_a_failed_meeting():
    meet_failing()  # whatever is made once only
    before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        meet_failing()
    assert len(os.listdir("/dev/fd")) <= before


def meet_failing():
    addresses = free_addresses(3)
    errors_of(in_threads([lambda i=i: meet_one(addresses, i, start_timeout_s=0.2) for i in range(2)]))
