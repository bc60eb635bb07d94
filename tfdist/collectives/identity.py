"""What a task says of itself when two meet, and in words what keeps them from working together."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tfdist import wire
from tfdist.cluster import Task

Channel = Literal["data", "control"]
CHANNELS: tuple[Channel, ...] = ("data", "control")


@dataclass(frozen=True)
class Identity:
    """One task as the others see it.

    Attributes:
        addresses: Of all tasks of its cluster.
        tasks: Their names.
        index: Which of them it is.
        fingerprint: What must be equal on all tasks.
        heartbeat_timeout_s: Silence after which it counts others as lost.
        incarnation: Tells two processes apart that claim to be the same task.
    """

    addresses: tuple[str, ...]
    tasks: tuple[Task, ...]
    index: int
    fingerprint: str
    heartbeat_timeout_s: float
    incarnation: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def name(self) -> str:
        return str(self.tasks[self.index])

    @property
    def cluster(self) -> list[list[str]]:
        return [[str(task), address] for task, address in zip(self.tasks, self.addresses, strict=True)]

    def message(self, channel: Channel) -> dict[str, Any]:
        cluster = self.cluster
        return {
            "channel": channel,
            "index": self.index,
            "task": self.name,
            # The list itself is long in a big cluster and travels once per peer.
            "cluster": cluster if channel == "data" else None,
            "digest": hashlib.sha256(wire.encode({"cluster": cluster})).hexdigest(),
            "fingerprint": self.fingerprint,
            "byteorder": sys.byteorder,
            "heartbeat_timeout_s": self.heartbeat_timeout_s,
            "incarnation": self.incarnation,
            "process": f"process {os.getpid()} on {socket.gethostname()}",
        }

    def difference(self, theirs: Mapping[str, Any]) -> str | None:
        """Returns what is not the same for the peer, in words, or None."""
        mine, peer = self.message("data"), str(theirs.get("task"))
        if theirs.get("digest") != mine["digest"]:
            return self._cluster_difference(theirs.get("cluster"), peer)
        index = theirs.get("index")
        if not isinstance(index, int) or not 0 <= index < len(self.tasks) or peer != str(self.tasks[index]):
            return f"{peer} says it is number {index!r} of the cluster"
        timeout_s = theirs.get("heartbeat_timeout_s")
        if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
            return f"{peer} has the heartbeat time-out {timeout_s!r}"
        for what in ("fingerprint", "byteorder"):
            if theirs.get(what) != mine[what]:
                return f"{self.name} runs with {mine[what]!r}, {peer} with {theirs.get(what)!r}"
        return None

    def _cluster_difference(self, theirs: Any, peer: str) -> str:
        if not isinstance(theirs, list):
            return f"{peer} believes in another cluster than {self.name}"
        mine = self.cluster
        text = (
            f"{peer} believes the cluster is {_cluster_text(theirs)}, {self.name} believes it is {_cluster_text(mine)}"
        )
        if len(theirs) != len(mine):
            return text
        first = next((i for i, (a, b) in enumerate(zip(theirs, mine, strict=True)) if a != b), 0)
        return f"{text}; the first difference is entry {first}: {theirs[first]} and {mine[first]}"


def _cluster_text(cluster: list[Any]) -> str:
    entries = [" at ".join(map(str, entry)) if isinstance(entry, list) else str(entry) for entry in cluster[:8]]
    more = ", ..." if len(cluster) > 8 else ""
    return f"{', '.join(entries)}{more} ({len(cluster)} tasks)"[:1000]
