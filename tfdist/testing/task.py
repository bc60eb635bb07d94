"""The program of each task of a local cluster: `python -m tfdist.run -m tfdist.testing.task FOLDER`.

It makes the strategy if it is to have one, and then runs the functions it is told to, one after the other, until its
test hangs up. An exception in a function ends it, as it would end a script: so the launcher knows who failed first.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, NoReturn

from tfdist import process
from tfdist.testing import channels, failures, functions, values

SETUP = "setup.json"


def main(folder: str) -> None:
    """Runs what the test at the other end of FOLDER's socket asks for."""
    index = process.LaunchInfo.read(os.environ).local_index
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(os.path.join(folder, channels.NAME))
    _say(connection, {"task": index, "pid": os.getpid()})
    try:
        strategy, seed = _set_up(folder)
        for call in _calls(connection):
            result, name = _run(values.read(call_path(folder, call)), strategy, seed)
            values.write(result_path(folder, call, index), result, what=f"the result of {name}")
            _say(connection, {"returned": call})
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if not _has_served(error):
            _fail(error, failure_path(folder, index))


def call_path(folder: str, call: int) -> str:
    """Returns where the function and the arguments of a call are."""
    return os.path.join(folder, f"call-{call}.npz")


def result_path(folder: str, call: int, index: int) -> str:
    """Returns where a task's result is."""
    return os.path.join(folder, f"result-{call}-{index}.npz")


def failure_path(folder: str, index: int) -> str:
    """Returns where the exception is that ended a task."""
    return os.path.join(folder, f"failure-{index}.npz")


def _set_up(folder: str) -> tuple[list[Any], int | None]:
    """Returns the strategy, in a list that is empty for functions that get none, and the seed of each call."""
    with open(os.path.join(folder, SETUP), encoding="utf-8") as file:
        setup: Mapping[str, Any] = json.load(file)
    seed = setup["seed"]
    if setup["strategy"] == "plain":
        import tensorflow as tf

        return [tf.distribute.get_strategy()], seed
    if setup["strategy"] is None:
        return [], seed
    if setup["servers"] is not None:
        from tfdist.testing import servers

        return [servers.start(**setup["servers"], **{"seed": seed, **setup["strategy"]})], seed
    from tfdist.strategy import create_strategy

    return [create_strategy(**{"seed": seed, **setup["strategy"]})], seed


def _run(request: Mapping[str, Any], strategy: list[Any], seed: int | None) -> tuple[Any, str]:
    os.chdir(request["folder"])
    functions.add_import_paths(request["import_paths"])
    function: Callable[..., Any] = functions.find(request["function"])
    if seed is not None:
        from tfdist.internals.keras import set_random_seed

        # Whatever ran before in this process.
        set_random_seed(seed)
    try:
        result = function(*strategy, *request["arguments"], **request["named"])
    except SystemExit as error:
        if _has_served(error):
            raise
        raise RuntimeError(f"the function called sys.exit({error.code!r}); let it return, or raise an error") from error
    return result, request["function"]["name"]


def _has_served(error: BaseException) -> bool:
    """Whether the function ended in create_strategy, as it does on the workers and ps of a parameter-server cluster."""
    current = process.current()
    presence = None if current is None else current.presence
    return isinstance(error, SystemExit) and error.code == 0 and presence is not None and not process.is_chief()


def _say(connection: socket.socket, message: Mapping[str, Any]) -> None:
    # Where the test is gone, its launcher sees to our end.
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _calls(connection: socket.socket) -> Iterator[int]:
    rest = b""
    while data := _receive(connection):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)["call"]


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(4096)
    except OSError:
        return b""


def _fail(error: BaseException, path: str) -> NoReturn:
    error.__traceback__ = _trimmed(error.__traceback__)
    failures.write(path, error)
    process.fail(error)


def _trimmed(trace: TracebackType | None) -> TracebackType | None:
    # What stands above the function is of no use to its author.
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    return inner or trace


if __name__ == "__main__":
    main(sys.argv[1])
