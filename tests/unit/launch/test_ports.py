"""Held ports: free everywhere, distinct, ours alone, and given back."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from tfdist.errors import LaunchError
from tfdist.launch.ports import HeldPorts


def bind(host, port, *, shared):
    with socket.socket() as probe:
        if shared:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        probe.bind((host, port))


def test_held_ports_are_distinct():
    with HeldPorts(50) as held:
        assert len(set(held.ports)) == 50


def test_a_stranger_can_not_take_a_held_port_and_its_task_can():
    with HeldPorts(1) as held:
        with pytest.raises(OSError, match="in use"):
            bind("127.0.0.1", held.ports[0], shared=False)
        bind("127.0.0.1", held.ports[0], shared=True)
        bind("0.0.0.0", held.ports[0], shared=True)


def test_a_held_port_takes_no_connections():
    with HeldPorts(1) as held, socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", held.ports[0])) != 0


def test_given_ports_are_held_for_their_tasks_on_all_addresses():
    with HeldPorts(2) as free:
        ports = free.ports
    with HeldPorts.at(ports) as held:
        assert held.ports == ports
        for host in ("127.0.0.1", "127.0.0.2", "0.0.0.0"):
            with pytest.raises(OSError, match="in use"):
                bind(host, ports[1], shared=False)
            bind(host, ports[1], shared=True)
    bind("0.0.0.0", ports[1], shared=False)


def test_a_given_port_that_is_taken_is_named_and_the_others_are_given_back(monkeypatch):
    monkeypatch.setattr("tfdist.launch.ports.PASSING_S", 0.2)
    with HeldPorts(1) as free:
        port = free.ports[0]
    with socket.socket() as stranger:
        stranger.bind(("0.0.0.0", 0))
        stranger.listen()
        taken = stranger.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {taken} of this host is taken.*as TF_CONFIG says"):
            HeldPorts.at([port, taken])
    bind("127.0.0.1", port, shared=False)


def test_a_connection_that_passes_does_not_take_a_given_port():
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen()
        client.connect(server.getsockname())
        port = client.getsockname()[1]
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its port is free at once
        threading.Timer(0.3, client.close).start()
        with HeldPorts.at([port]) as held:
            assert held.ports == (port,)


def test_ports_are_free_after_the_end():
    with HeldPorts(1) as held:
        port = held.ports[0]
    bind("127.0.0.1", port, shared=False)


def test_without_so_reuseport_free_ports_are_named(monkeypatch):
    monkeypatch.delattr(socket, "SO_REUSEPORT")
    with HeldPorts(2) as held:
        assert len(set(held.ports)) == 2
