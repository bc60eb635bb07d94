"""Two networks on one machine, with a cable between them: what runs in them reaches the other over TCP alone.

    with namespaces.two_hosts() as hosts:
        for host in hosts:
            subprocess.run([*host.prefix, "python", "task.py", host.address])

Each is a network namespace with one end of a veth pair, and has a /dev/shm of its own, as two containers have. Nothing
has a name outside: the kernel removes all of it with the last process in it, however the script ends.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

ADDRESSES = ("10.213.77.1", "10.213.77.2")
DEVICE = "veth0"
DEADLINE_S = 20


class RefusedError(Exception):
    """This machine lets us make no network namespaces; the text says why."""


@dataclass(frozen=True)
class Host:
    """One of the two: what to put before a command to run it there, and the address there."""

    prefix: tuple[str, ...]
    address: str


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Yields two hosts.

    Raises:
        RefusedError: The kernel forbids it, or a tool is missing.
    """
    is_root = os.geteuid() == 0
    first_of_user = () if is_root else ("--user", "--map-root-user")
    enter_user = () if is_root else ("--user", "--preserve-credentials")
    with ExitStack() as stack:
        # The second is made from within the first, whose user may be nobody elsewhere.
        one = _hold(stack, ["unshare", *first_of_user, "--net", "--mount"])
        within = ("nsenter", "--target", str(one), *enter_user)
        two = _hold(stack, [*within, "unshare", "--net", "--mount"])
        here = f"--wd={os.getcwd()}"
        enter = [("nsenter", "--target", str(pid), *enter_user, "--net", "--mount", here) for pid in (one, two)]
        _do([*enter[0], "ip", "link", "add", "name", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", str(two)])
        for prefix, address in zip(enter, ADDRESSES, strict=True):
            _do([*prefix, "ip", "address", "add", f"{address}/24", "dev", DEVICE])
            for device in ("lo", DEVICE):
                _do([*prefix, "ip", "link", "set", device, "up"])
        yield [Host(prefix, address) for prefix, address in zip(enter, ADDRESSES, strict=True)]


def _hold(stack: ExitStack, command: list[str]) -> int:
    """Starts a process that keeps its namespaces until this one closes its stdin, or ends; returns its number."""
    script = "mount -t tmpfs tmpfs /dev/shm && echo here && exec cat"
    try:
        holder = subprocess.Popen(
            [*command, "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise RefusedError(f"{error.filename} is not installed") from None
    stack.callback(holder.communicate)  # closes its stdin and waits
    assert holder.stdout is not None
    if holder.stdout.readline() != "here\n":
        raise RefusedError(holder.communicate(timeout=DEADLINE_S)[1].strip() or f"{command[0]} failed")
    return holder.pid


def _do(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except FileNotFoundError as error:
        raise RefusedError(f"{error.filename} is not installed") from None
    if done.returncode != 0:
        raise RefusedError(f"{' '.join(command[command.index('--mount') + 2 :])}: {done.stderr.strip()}")
