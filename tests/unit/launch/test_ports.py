"""Held ports: free everywhere, distinct, ours alone, and given back."""

from __future__ import annotations

import socket

import pytest

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


def test_ports_are_free_after_the_end():
    with HeldPorts(1) as held:
        port = held.ports[0]
    bind("127.0.0.1", port, shared=False)


def test_without_so_reuseport_free_ports_are_named(monkeypatch):
    monkeypatch.delattr(socket, "SO_REUSEPORT")
    with HeldPorts(2) as held:
        assert len(set(held.ports)) == 2
