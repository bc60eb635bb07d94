"""Free TCP ports, held for tasks that are still to start.

A port that was free a moment ago may be taken when TensorFlow, seconds later, wants it. So the launcher binds each
port and keeps it, without listening; with SO_REUSEPORT the task of the same user can bind it too, and only the task
is sent connections.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence
from types import TracebackType

from tfdist.errors import LaunchError

ATTEMPTS_PER_PORT = 20
# A given port may be, for a moment, the near end of somebody's connection.
PASSING_S = 3.0


class HeldPorts:
    """Free ports of this host, held until `close()`; also a context manager.

    Attributes:
        ports: The port numbers.
    """

    def __init__(self, count: int, *, host: str = "127.0.0.1") -> None:
        self._sockets: list[socket.socket] = []
        self.ports: tuple[int, ...] = ()
        if not hasattr(socket, "SO_REUSEPORT"):
            self.ports = tuple(_pick_unused() for _ in range(count))
            return
        try:
            for _ in range(count):
                self._sockets.append(_hold_one(host))
        except OSError as error:
            self.close()
            raise LaunchError(f"no free port for a task on {host}: {error}") from error
        self.ports = tuple(held.getsockname()[1] for held in self._sockets)

    @classmethod
    def at(cls, ports: Sequence[int]) -> HeldPorts:
        """Holds these ports on all addresses, as TensorFlow's server takes them.

        Raises:
            LaunchError: One of them is taken.
        """
        held = cls(0)
        held.ports = tuple(ports)
        if not hasattr(socket, "SO_REUSEPORT"):
            return held
        try:
            for port in ports:
                held._sockets.append(_hold_given(port))
        except OSError as error:
            held.close()
            if error.errno == errno.EADDRINUSE:
                raise LaunchError(
                    f"port {port} of this host is taken, and a task of ours is to listen there, as TF_CONFIG says: "
                    "end the process that has it, or give this host's entry another port, on all hosts"
                ) from error
            raise LaunchError(f"port {port} of this host, which TF_CONFIG names, can not be held: {error}") from error
        return held

    def close(self) -> None:
        for held in self._sockets:
            held.close()
        self._sockets.clear()

    def __enter__(self) -> HeldPorts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _hold_one(host: str) -> socket.socket:
    rejected = []
    try:
        for _ in range(ATTEMPTS_PER_PORT):
            held = _bound(host, 0)
            if _is_free_everywhere(held.getsockname()[1]):
                return held
            # Kept until we have another: else the kernel may offer it again.
            rejected.append(held)
        raise OSError("every port that the system offered is in use on another address of this host")
    finally:
        for held in rejected:
            held.close()


def _hold_given(port: int) -> socket.socket:
    deadline = time.monotonic() + PASSING_S
    while True:
        try:
            return _bound("::", port, reuse=True)
        except OSError as error:
            if not _is_taken(error):
                break  # this host has no IPv6
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    return _bound("0.0.0.0", port, reuse=True)


def _bound(host: str, port: int, *, reuse: bool = False) -> socket.socket:
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if reuse:
            # Connections of a run before this one do not keep its port from us.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except OSError:
        held.close()
        raise
    return held


def _is_free_everywhere(port: int) -> bool:
    """Whether the port can be bound on all addresses, as TensorFlow's server does whatever the cluster says."""
    for host in ("::", "0.0.0.0"):
        try:
            _bound(host, port).close()
        except OSError as error:
            if host == "::" and not _is_taken(error):
                continue  # this host has no IPv6
            return False
    return True


def _is_taken(error: OSError) -> bool:
    return error.errno == errno.EADDRINUSE


def _pick_unused() -> int:
    import portpicker

    return int(portpicker.pick_unused_port())
