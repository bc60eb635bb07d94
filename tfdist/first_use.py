"""Remembers which line of a script started TensorFlow, for the message of a `create_strategy` that comes too late.

From that line on the process can join no cluster, and TensorFlow does not say which line it was: making a tensor does
it, and so does counting devices. `import tfdist` calls `watch()`, which waits for TensorFlow to be imported and then
for the first use; it imports nothing itself.

The private name of TensorFlow here is the one that stands outside `internals`, which import TensorFlow.
"""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any

# Read in TensorFlow 2.21.0: every use of the runtime goes through Context.ensure_initialized of this module.
CONTEXT_MODULE = "tensorflow.python.eager.context"
_NOT_THE_USERS = ("tensorflow", "keras", "tf_keras", "tfdist", "importlib")
_INSTALLED = ("/site-packages/", "/dist-packages/")

_line: str | None = None


def watch() -> None:
    """Notes the first use of TensorFlow from now on; without effect where TensorFlow has started already."""
    module = sys.modules.get(CONTEXT_MODULE)
    if module is None:
        sys.meta_path.insert(0, _Finder())
    else:
        _wrap(module)


def line() -> str | None:
    """Returns "train.py:7: x = tf.constant(1)" for the line that started TensorFlow, or None where nobody saw it."""
    return _line


class _Finder:
    """Finds TensorFlow's module as Python would, and wraps what is in it once it has been run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != CONTEXT_MODULE:
            return None
        from importlib.util import find_spec

        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_wrap(module: Any) -> None:
                run(module)
                _wrap(module)

            spec.loader.exec_module = run_and_wrap  # type: ignore[method-assign]
        return spec


def _wrap(module: Any) -> None:
    context = getattr(module, "Context", None)
    original = getattr(context, "ensure_initialized", None)
    if context is None or original is None:
        return

    def ensure_initialized(self: Any) -> Any:
        # It is called with every op: once will do.
        context.ensure_initialized = original
        if getattr(self, "_context_handle", None) is None:
            with contextlib.suppress(Exception):
                _note()
        return original(self)

    context.ensure_initialized = ensure_initialized


def _note() -> None:
    import inspect
    import linecache

    global _line
    frames = [frame for frame in _callers(inspect.currentframe()) if not _is_in(frame, _NOT_THE_USERS)]
    scripts = [frame for frame in frames if not any(part in frame.f_code.co_filename for part in _INSTALLED)]
    for frame in (scripts or frames)[:1]:
        path, number = frame.f_code.co_filename, frame.f_lineno
        _line = f"{path}:{number}: {linecache.getline(path, number, frame.f_globals).strip()}"


def _callers(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _is_in(frame: FrameType, packages: tuple[str, ...]) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in packages
