"""Imports TensorFlow and Keras once, and forks a process for each script that it is told to run.

Each line of stdin is one process: {"argv": [...], "environ": {...}, "out": path, "err": path, "end": path}. The script
runs as `__main__` down to the interpreter's own end, with its hooks. `end` then holds its exit code, -n for signal n,
and the time of its end by the monotonic clock, which all processes share.
"""

import json
import os
import signal
import sys
import time

import keras  # noqa: F401
import tensorflow  # noqa: F401


def wait_and_tell(pid, path):
    """In a process between template and script, as only a parent can wait."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(path + ".part", "w") as file:
        file.write(f"{code} {time.monotonic()}")
    os.rename(path + ".part", path)
    os._exit(0)


def become(request):
    os.environ.clear()
    os.environ.update(request["environ"])
    for name, number in (("out", 1), ("err", 2)):
        fd = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, number)
        os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(request["argv"][0])


signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those between are nobody's to wait for
print("ready", flush=True)
_request = None
while _line := sys.stdin.buffer.raw.readline():
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _request = json.loads(_line)
        if _pid := os.fork():
            wait_and_tell(_pid, _request["end"])
        os.setsid()
        become(_request)
        with open(_request["end"] + ".pid", "w") as _file:
            _file.write(str(os.getpid()))
        os.rename(_request["end"] + ".pid", _request["end"].replace(".end", ".pid"))
        break
if _request is not None:
    with open(sys.argv[0]) as _file:
        _code = compile(_file.read(), sys.argv[0], "exec")
    # As in a process of its own: the script is `__main__`, and its exceptions reach sys.excepthook.
    globals().update(__file__=sys.argv[0])
    exec(_code)
