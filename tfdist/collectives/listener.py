"""Listens on a task's own address of the cluster, and says who holds the port when it is taken.

The port is shared on purpose for the moment of meeting: a launcher may hold it bound (not listening) with SO_REUSEPORT
until its task comes, and TensorFlow's server takes it over afterwards. Two *listening* sockets on one port would share
the peers between them, so on Linux the kernel's table is searched for another listener.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from tfdist import wire
from tfdist.errors import MeetingError

logger = logging.getLogger(__name__)

# How long to wait for a port that only a connection occupies (as its local, temporary port).
_PASSING_S = 3.0


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of "host:port" or "[2001:db8::1]:port"."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise MeetingError(f"{address!r} is no address of the form host:port")
    return host, int(port)


def listen(address: str, *, others: Sequence[str], task: str) -> list[socket.socket]:
    """Returns sockets that listen on `address` of the cluster; several where its host name has several addresses.

    Args:
        address: The task's own.
        others: Addresses of the other tasks, which must be able to reach it.
        task: The task's name, for messages.

    Raises:
        MeetingError: The port is taken, or the address can not be listened on.
    """
    host, port = split_address(address)
    give_up = time.monotonic() + _PASSING_S
    while True:
        try:
            return _listen_once(host, port, [split_address(other)[0] for other in others])
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise MeetingError(f"{task} can not listen at {address}: {error.strerror}") from error
            holder = _holder(port)
            if holder or time.monotonic() > give_up:
                raise MeetingError(_taken(task, address, holder)) from None
            time.sleep(0.1)


def _taken(task: str, address: str, holder: str) -> str:
    return (
        f"{task} can not listen at {address}: the port is taken{f' by {holder}' if holder else ''}. "
        "End that process, or give this task another port in the cluster (is a task started twice?)"
    )


def _listen_once(host: str, port: int, other_hosts: Sequence[str]) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    try:
        for family, ip in _own_addresses(host, port, other_hosts):
            try:
                sockets.append(_bind(family, ip, port))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
        if not sockets:
            # A service's address, for example, is not one of this machine's own.
            logger.warning("%s is no address of this machine: listening on all interfaces, port %d", host, port)
            sockets.append(_bind_everywhere(port))
        for sock in sockets:
            sock.listen(128)
        # Sharing a port with another listener would not fail, it would hand half the peers to the other.
        if _other_listeners(port, sockets):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _own_addresses(host: str, port: int, other_hosts: Sequence[str]) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        logger.warning("%s does not resolve on its own machine (%s)", host, error)
        return []
    addresses: list[tuple[socket.AddressFamily, str]] = []
    for family, _, _, _, address in found:
        if (family, str(address[0])) not in addresses:
            addresses.append((family, str(address[0])))
    named = not _is_ip(host) and host != "localhost"
    if named and all(_is_loopback(ip) for _, ip in addresses) and any(other != host for other in other_hosts):
        # Debian's /etc/hosts maps a machine's own name to 127.0.1.1, where nobody else can reach it.
        logger.warning("%s resolves to loopback here, though other hosts must reach it", host)
        return []
    return addresses


def _is_ip(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return True
    return False


def _is_loopback(ip: str) -> bool:
    return ipaddress.ip_address(ip.partition("%")[0]).is_loopback


def _bind(family: socket.AddressFamily, ip: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if ip == "::" else 1)
        # Resolved again, so that a link-local address keeps its scope.
        sock.bind(socket.getaddrinfo(ip, port, family, socket.SOCK_STREAM)[0][4])
    except BaseException:
        sock.close()
        raise
    wire.close_in_forked_child(sock)
    return sock


def _bind_everywhere(port: int) -> socket.socket:
    try:
        return _bind(socket.AF_INET6, "::", port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        return _bind(socket.AF_INET, "0.0.0.0", port)


# The kernel's table of sockets, https://docs.kernel.org/networking/proc_net_tcp.html


def _listeners(port: int) -> Iterator[tuple[str, int]]:
    """Yields local address (hexadecimal) and inode of every listening socket on this port; nothing outside Linux."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as file:
                rows = file.read().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            ip, _, hexadecimal = fields[1].partition(":")
            if fields[3] == "0A" and int(hexadecimal, 16) == port:
                yield ip, int(fields[9])


def _other_listeners(port: int, own: Sequence[socket.socket]) -> list[int]:
    inodes = {os.fstat(sock.fileno()).st_ino for sock in own}
    found = list(_listeners(port))
    mine = {ip for ip, inode in found if inode in inodes}
    return [inode for ip, inode in found if inode not in inodes and any(_overlap(ip, other) for other in mine)]


def _overlap(one: str, other: str) -> bool:
    # All zeros is every interface; "::" mostly takes IPv4 too.
    return one == other or not one.strip("0") or not other.strip("0")


def _holder(port: int) -> str:
    """Returns "process 123 (python train.py)" for whoever listens on the port, as far as this process may see it."""
    names = {f"socket:[{inode}]" for _, inode in _listeners(port)}
    if not names:
        return "" if sys.platform.startswith("linux") else "another process"
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{fd}") in names:
                        with open(f"/proc/{pid}/cmdline", "rb") as file:
                            command = file.read(300).replace(b"\0", b" ").decode(errors="replace").strip()
                        return f"process {pid} ({command})"
    return "a process that this user may not look into"
