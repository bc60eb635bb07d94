"""Memory that one task writes and the tasks of its host read: two places for pieces of messages, and a number.

The memory has no name (memfd_create(2)): its pages are gone with the last process that has it mapped, however it ends.
Neither /dev/shm nor its size matters. Its size is sealed, so that no process can make a reader's access fail.
Little of it is needed, however long the messages: they cross in pieces.

The number says how many pieces were put into places, one after the other; only the owner writes it. It lies in a cache
line of its own. What orders the bytes of a piece before the number, for the writer, and after it, for the reader, is
`fence`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import sys
import threading

import numpy as np

from tfdist.collectives.results import Bytes

# Two pieces of each of two tasks stay in a processor's own cache, of 1 MiB and more today.
PIECE_BYTES = 512 * 1024
PLACES = 2
# An opening: its header, and a description of at most `calls.MAX_DESCRIPTION`.
HEAD_BYTES = 36 * 1024
NONCE_BYTES = 32

_LINE = 128  # two cache lines: processors fetch them in pairs
_NONCE_AT = _LINE
_HEADS_AT = 4096
_PIECES_AT = _HEADS_AT + PLACES * HEAD_BYTES
SIZE = _PIECES_AT + PLACES * PIECE_BYTES

_NEEDED = ("memfd_create", "eventfd", "posix_fallocate")
_lock = threading.Lock()
_lock.acquire()


def fence() -> None:
    """Lets no access to memory before it take effect after one that follows it.

    Python has no fence. A lock's release is one for what precedes it, its acquisition for what follows, and a release
    is never exchanged with a following acquisition: on x86 both are locked instructions, on ARM a store-release and a
    load-acquire, which the architecture keeps in this order ("barrier-ordered-before", Arm Architecture Reference
    Manual, B2.3). Python's lock is made of these: CPython's Python/thread_pthread.h calls sem_post and sem_trywait,
    which POSIX says synchronize memory (XBD 4.15.2).
    """
    _lock.release()
    _lock.acquire()


def missing() -> str:
    """Returns what this system lacks to share memory, or ""."""
    names = [name for name in _NEEDED if not hasattr(os, name)]
    names += [] if hasattr(fcntl, "F_ADD_SEALS") else ["F_ADD_SEALS"]
    return ", ".join(names)


class Segment:
    """One task's segment, as its owner or a reader sees it.

    Args:
        fd: Of the memory; stays open.
        is_mine: Whether to write.

    Raises:
        OSError: It can not be mapped.
        ValueError: It is no segment.

    Attributes:
        heads, pieces: The places.
        published: How many pieces were put here, as its only element; `fence` between it and the piece.
    """

    def __init__(self, fd: int, *, is_mine: bool) -> None:
        if not is_mine:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if os.fstat(fd).st_size != SIZE or not seals & fcntl.F_SEAL_SHRINK:
                raise ValueError("it is no sealed memory of the right size")
        # Mapped as a whole at once: the first call should not be the slow one.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_mine else 0)
        # Before Python 3.13 every map keeps a descriptor open.
        options = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        memory = np.frombuffer(mmap.mmap(fd, SIZE, flags, protection, **options), np.uint8)
        self.published: memoryview = memory[:8].data.cast("q")
        self._nonce = memory[_NONCE_AT : _NONCE_AT + NONCE_BYTES]
        self.heads = [_part(memory, _HEADS_AT, i, HEAD_BYTES).data for i in range(PLACES)]
        self.pieces: list[Bytes] = [_part(memory, _PIECES_AT, i, PIECE_BYTES) for i in range(PLACES)]

    def publish(self, number: int) -> None:
        """Lets the readers know of a piece that was put into its place."""
        fence()
        self.published[0] = number

    @property
    def nonce(self) -> bytes:
        """What the owner wrote at random."""
        return self._nonce.tobytes()

    def write_nonce(self) -> None:
        self._nonce[:] = np.frombuffer(secrets.token_bytes(NONCE_BYTES), np.uint8)


def create() -> tuple[Segment, int]:
    """Returns a new segment of this task, and its descriptor.

    Raises:
        OSError: There is no memory for it.
    """
    fd = os.memfd_create("tfdist", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # All of it now: a page that can't be had later would end the process with SIGBUS.
        os.posix_fallocate(fd, 0, SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        segment = Segment(fd, is_mine=True)
        segment.write_nonce()
    except BaseException:
        os.close(fd)
        raise
    return segment, fd


def _part(memory: Bytes, start: int, number: int, size: int) -> Bytes:
    return memory[start + number * size : start + (number + 1) * size]
