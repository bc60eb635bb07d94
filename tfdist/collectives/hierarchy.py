"""The sums and bodies of one call where some tasks share memory and others do not.

The tasks of a host add up through memory, the first task of each host exchanges the sums over TCP, and passes the total
on through memory. The order of additions is that of the tasks on a host, then that of the hosts' first tasks. Types of
16 bits travel as float32 between these stages, so that they are rounded once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from tfdist.collectives.exchange import Exchange, Link
from tfdist.collectives.layout import EMPTY, Terms
from tfdist.collectives.memory import Memory
from tfdist.collectives.results import Bytes, Results
from tfdist.collectives.sharing import Shared
from tfdist.collectives.tcp import TCP
from tfdist.collectives.transport import Opening, Transport
from tfdist.collectives.waiting import Watch

_PART = struct.Struct("!QQ")  # index of a task, length of its body
_NOTHING: Bytes = np.empty(0, np.uint8)


class Hierarchy:
    """Calls between hosts.

    Args:
        index: This task.
        count: Of all tasks.
        memory: Between the tasks of this host; None where this task is alone.
        tcp: Between the first tasks of the hosts; None where this task is not the first.
    """

    def __init__(self, index: int, count: int, memory: Memory | None, tcp: TCP | None) -> None:
        self._index, self._count, self._memory, self._tcp = index, count, memory, tcp
        self._results = Results()

    def exchange(self, opening: Opening, terms: Terms, out: Bytes, body: Sequence[memoryview]) -> dict[int, Bytes]:
        wide = terms.wide()
        total, sums = self._results.bytes(wide.layout.nbytes), self._results.bytes(wide.layout.nbytes)
        bodies, others = self._on_this_host(opening, wide, sums, body), {}
        if self._tcp is not None:
            mine = {self._index: np.frombuffer(b"".join(body), np.uint8), **bodies}
            packs = self._tcp.exchange(opening, Terms(wide.layout, (), stream=sums), total, _pack(mine))
            others = {index: part for pack in packs.values() for index, part in _unpack(pack).items()}
        if self._memory is not None:
            others = self._passed_on(opening, total, others)
        wide.layout.finish(total, out, terms.layout, self._count)
        return dict(sorted({**bodies, **others}.items()))

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()

    def _on_this_host(self, opening: Opening, wide: Terms, out: Bytes, body: Sequence[memoryview]) -> dict[int, Bytes]:
        if self._memory is not None:
            return self._memory.exchange(opening, wide, out, body)
        wide.copy(out, 0)
        return {}

    def _passed_on(self, opening: Opening, total: Bytes, bodies: dict[int, Bytes]) -> dict[int, Bytes]:
        """Passes on from the first task of this host what came from the others."""
        assert self._memory is not None
        if self._tcp is not None:
            self._memory.exchange(opening, EMPTY, _NOTHING, [total.data, *_pack(bodies)])
            return bodies
        sent = self._memory.exchange(opening, EMPTY, _NOTHING, [])
        message = next(iter(sent.values()))  # the first task has the lowest index
        total[:] = message[: total.size]
        return _unpack(message[total.size :])


def through(shared: Shared, index: int, links: Sequence[Link], watch: Watch) -> Transport:
    """Returns the way between tasks of which some share memory.

    Args:
        shared: Who shares with whom.
        index: This task.
        links: To all others.
        watch: What to ask while waiting.
    """
    memory = None if shared.mine is None else Memory(shared.mine, shared.neighbours, watch)
    firsts = {group[0] for group in shared.groups}
    if memory is not None and len(firsts) == 1:
        return memory
    tcp = None
    if index in firsts:
        tcp = TCP(Exchange([link for link in links if link.index in firsts], watch), index)
    return Hierarchy(index, len(links) + 1, memory, tcp)


def _pack(bodies: dict[int, Bytes]) -> list[memoryview]:
    views = []
    for index, body in bodies.items():
        views += [memoryview(_PART.pack(index, body.size)), body.data]
    return views


def _unpack(pack: Bytes) -> dict[int, Bytes]:
    bodies, at = {}, 0
    while at < pack.size:
        index, size = _PART.unpack_from(pack.data, at)
        at += _PART.size
        bodies[index] = pack[at : at + size]
        at += size
    return bodies
