"""An exception in a task -> a file -> the same exception in the test's process, as far as its parts can be sent.

The type is looked up by its name and the instance put together from the values it holds; nothing is pickled, and
nothing but a class of exceptions is ever called.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from tfdist.errors import TravelError
from tfdist.testing import functions, values

# These end the process they are raised in: the test's would end instead of fail.
_ENDS = (SystemExit, KeyboardInterrupt, GeneratorExit)


@dataclass(frozen=True)
class Failure:
    """What a task wrote of the exception that ended it.

    Attributes:
        module: Where its type is defined.
        kind: The qualified name of its type there.
        text: Its message.
        arguments: What makes another like it, or None where that can not be sent.
        attributes: What it holds besides; None for each that can not be sent.
        at: When, by the clock of the host.
    """

    module: str
    kind: str
    text: str
    arguments: tuple[Any, ...] | None
    attributes: dict[str, Any]
    at: float

    @property
    def name(self) -> str:
        return self.kind if self.module == "builtins" else f"{self.module}.{self.kind}"


def write(path: str, error: BaseException) -> None:
    """Writes `error` to `path`."""
    kind = type(error)
    text = ""
    with contextlib.suppress(Exception):
        text = str(error)
    arguments = _arguments(error)
    values.write(
        path,
        {
            "module": kind.__module__,
            "kind": kind.__qualname__,
            "text": text,
            "arguments": arguments if _travels(arguments) else None,
            "attributes": {name: value if _travels(value) else None for name, value in vars(error).items()},
            "at": time.time(),
        },
    )


def read(path: str) -> Failure:
    """Returns what `write` wrote."""
    return Failure(**values.read(path))


def rebuild(failure: Failure) -> BaseException | None:
    """Returns the exception itself, or None where its type is not to be had here or needs more than was sent."""
    kind = functions.find_class(failure.module, failure.kind) or _of_pytest(failure)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)) or issubclass(kind, _ENDS):
        return None
    for make in (_call, _put_together):
        with contextlib.suppress(Exception):
            error = make(kind, failure)
            if type(error) is kind and str(error) == failure.text:
                return error
    return None


def _arguments(error: BaseException) -> tuple[Any, ...]:
    # An OSError has a filename that `args` lacks, TensorFlow's errors take other arguments; both say so here.
    with contextlib.suppress(Exception):
        reduced: Any = error.__reduce__()
        if reduced[0] is type(error):
            return tuple(reduced[1])
    return error.args


def _of_pytest(failure: Failure) -> Any:
    """pytest's own, which pretend to be Python's: a skip in a task skips the test."""
    call = {"Skipped": "skip", "Failed": "fail", "XFailed": "xfail"}.get(failure.kind)
    if failure.module != "builtins" or call is None:
        return None
    return getattr(functions.find_class("pytest", call), "Exception", None)


def _call(kind: type[BaseException], failure: Failure) -> BaseException:
    error = kind(*(failure.arguments or ()))
    vars(error).update(failure.attributes)
    return error


def _put_together(kind: type[BaseException], failure: Failure) -> BaseException:
    """Past an `__init__` that wants other arguments than `args`."""
    arguments = failure.arguments or ()
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    vars(error).update(failure.attributes)
    return error


def _travels(value: object) -> bool:
    try:
        values.encode(value, [], what="it")
    except TravelError:
        return False
    return True
