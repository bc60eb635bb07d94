"""Groups whose tasks are threads of the test process: what they do to each other over loopback is the same."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from tfdist.cluster import Task
from tfdist.collectives import Group, meet, sharing

DEADLINE_S = 30.0

# Stands for the kernel that a task's thread runs under.
_host = threading.local()
sharing.boot_id = lambda: getattr(_host, "name", "one")


def free_addresses(count: int, host: str = "127.0.0.1") -> list[str]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sockets = [socket.create_server((host, 0), family=family) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for port in ports]


def workers(count: int) -> list[Task]:
    return [Task("worker", index) for index in range(count)]


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Returns what each call returned or raised; fails if one does not end."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for index, thread in enumerate(threads):
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), f"task {index} hangs"
    return results


def meet_all(
    count: int, *, addresses: list[str] | None = None, hosts: str = "", share_memory: Any = True, **settings: Any
) -> list[Any]:
    """Returns the group of each task, or its error.

    Args:
        count: Of tasks.
        addresses: Theirs.
        hosts: A letter for each, the same for those of one host; all are on one by default.
        share_memory: For all tasks, or one for each.
        settings: Of `meet`.
    """
    addresses = addresses or free_addresses(count)
    defaults = {"secret": b"secret", "start_timeout_s": 10.0, "step_timeout_s": 10.0}
    shares = [share_memory] * count if isinstance(share_memory, bool) else share_memory

    def meet_one(index: int) -> Group:
        _host.name = (hosts or "a" * count)[index]
        tasks = workers(count)
        return meet(addresses, tasks, index, share_memory=shares[index], **{**defaults, **settings})

    return in_threads([lambda i=i: meet_one(i) for i in range(count)])


class Together:
    """The groups of all tasks of one job; `run` makes every task do the same or, given a list, each its own."""

    def __init__(self, count: int, **settings: Any) -> None:
        self.groups: list[Group] = meet_all(count, **settings)
        hosts = settings.get("hosts") or "a" * count
        self.by_host = [[i for i in range(count) if hosts[i] == host] for host in dict.fromkeys(hosts)]
        errors = [group for group in self.groups if isinstance(group, BaseException)]
        if errors:
            raise errors[0]

    def run(self, *calls: Callable[[Group], Any]) -> list[Any]:
        """Returns what each task's call returned or raised."""
        each = list(calls) * len(self.groups) if len(calls) == 1 else list(calls)
        return in_threads(
            [lambda group=group, call=call: call(group) for group, call in zip(self.groups, each, strict=True)]
        )

    def values(self, *calls: Callable[[Group], Any]) -> list[Any]:
        """Like `run`, where no call may raise."""
        results = self.run(*calls)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def close(self) -> None:
        for group in self.groups:
            group.leave(0)
        for group in self.groups:
            group.close()
