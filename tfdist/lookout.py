"""Ends this process when a peer dies while TensorFlow's servers start, a time in which no Python code of ours can run.

MultiWorkerMirroredStrategy's constructor waits for all tasks and holds the GIL: no thread, no signal handler and no
Ctrl-C of Python runs, and the wait has no end. Meanwhile a small process of its own looks at the connections to the
peers (without reading from them) and at the clock. It says what is waited for, and where the wait is in vain it says
why and aborts this process, which leaves the stacks of its threads on stderr.

That process runs this file as a script, without the package: `python -I -S lookout.py TASK TIMEOUT_S FD=PEER...`. It
ends when its stdin does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

FIRST_WORD_S, NEXT_WORD_S = 5.0, 10.0
# The constructor may be over, and this process about to see by itself what happened.
GRACE_S = 1.0
# Should the small process not be there any more.
LAST_RESORT_S = 5.0


@contextlib.contextmanager
def looking_out(task: str, peers: Mapping[int, str], timeout_s: float) -> Iterator[None]:
    """Around a call that waits for the peers with the GIL held.

    Args:
        task: This task's name.
        peers: File descriptor of a connection to each -> its name.
        timeout_s: How long the call may take.
    """
    arguments = [task, str(timeout_s), *(f"{fd}={name}" for fd, name in peers.items())]
    was_enabled = faulthandler.is_enabled()
    if not was_enabled:
        faulthandler.enable(file=2)  # a notebook's sys.stderr is no file
    faulthandler.dump_traceback_later(timeout_s + LAST_RESORT_S, exit=True, file=2)
    helper = None
    try:
        with contextlib.suppress(OSError):  # at a limit of processes: then without
            helper = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *arguments], stdin=subprocess.PIPE, pass_fds=tuple(peers)
            )
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        if not was_enabled:
            faulthandler.disable()
        if helper is not None and helper.stdin is not None:
            helper.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                helper.wait(2.0)


def main(task: str, timeout_s: float, peers: Mapping[int, str]) -> None:
    """Watches until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the process that is watched
    parent = os.getppid()
    poll = select.poll()
    poll.register(0, 0)  # 0: only its end
    for fd in peers:
        poll.register(fd, getattr(select, "POLLRDHUP", 0))  # the peer's end, not what it says
    started = time.monotonic()
    word_at, deadline = started + FIRST_WORD_S, started + timeout_s
    while True:
        now = time.monotonic()
        lost = [fd for fd, _ in poll.poll(max(0.0, min(word_at, deadline) - now) * 1000 + 1)]
        now = time.monotonic()
        if 0 in lost:
            return
        if lost:
            _end(parent, poll, lost, f"{peers[lost[0]]} died while TensorFlow's servers started: {task} can not go on")
            return
        if now >= deadline:
            _end(parent, poll, [], f"{task}: TensorFlow's servers did not start within {timeout_s:g} s")
            return
        if now >= word_at:
            word_at = now + NEXT_WORD_S
            waited = f"{now - started:.0f} s of {timeout_s:g} s"
            names = ", ".join(list(peers.values())[:8]) + (", ..." if len(peers) > 8 else "")
            _say(f"{task} is waiting for TensorFlow's servers on {names} ({waited})")


def _end(parent: int, poll: select.poll, lost: list[int], why: str) -> None:
    for fd in lost:
        poll.unregister(fd)
    give_up = time.monotonic() + GRACE_S
    while (left_s := give_up - time.monotonic()) > 0:
        for fd, _ in poll.poll(left_s * 1000 + 1):
            if fd == 0:
                return
            poll.unregister(fd)
    _say(f"{why}. The stacks of all its threads follow")
    if os.getppid() == parent:
        os.kill(parent, signal.SIGABRT)


def _say(words: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"tfdist: {words}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), {int(fd): name for fd, _, name in (a.partition("=") for a in sys.argv[3:])})
