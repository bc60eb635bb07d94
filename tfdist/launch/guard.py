"""A small process that outlives the launcher for a second, to leave nothing behind when it is killed with SIGKILL.

Run as a script, without the package: `python -I -S guard.py RUN_DIR`. Its stdin says which tasks there are ("+pid",
"-pid", one a line) and, at a proper end, "done". Where stdin ends without that, the launcher is dead: the guard kills
the tasks, then what is left of their process groups, and removes the run's folder. (Linux' parent-death signal has
killed the tasks themselves by then, but not their children; other systems have none.)
"""

import os
import shutil
import signal
import sys
import time

# Python's own resource tracker ends by itself when its parent is gone, and cleans shared memory up before.
GROUP_GRACE_S = 1.0


def main(run_dir: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        # It ends when the launcher says so, or is no more.
        signal.signal(number, signal.SIG_IGN)
    groups = set()
    for line in sys.stdin:
        word = line.strip()
        if word == "done":
            return
        pid = int(word[1:])
        if word[0] == "+":
            groups.add(pid)
        else:
            groups.discard(pid)
    for pid in groups:
        _kill(os.kill, pid, signal.SIGKILL)
        _kill(os.killpg, pid, signal.SIGTERM)
    deadline = time.monotonic() + GROUP_GRACE_S
    while groups and time.monotonic() < deadline:
        groups = {pid for pid in groups if _kill(os.killpg, pid, 0)}
        time.sleep(0.02)
    for pid in groups:
        _kill(os.killpg, pid, signal.SIGKILL)
    shutil.rmtree(run_dir, ignore_errors=True)


def _kill(function, pid: int, number: int) -> bool:  # type: ignore[no-untyped-def]
    try:
        function(pid, number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1])
