"""Runs a Python file or module as `__main__`, as `python file args...` and `python -m module args...` would.

`runpy` would not do: it puts the old `__main__` back when the script has ended, and then threads, atexit functions,
pickle and multiprocessing no longer find what the script defined.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType


def run(argv: Sequence[str]) -> int:
    """Runs the script to its end and returns its exit code."""
    if not argv or (argv[0] == "-m" and len(argv) < 2):
        sys.exit("usage: python -m tfdist.process [-m] script args...")
    try:
        if argv[0] == "-m":
            _run_module(argv[1], argv[2:])
        else:
            _run_script(argv[0], argv[1:])
    except SystemExit as exit_request:
        return _code_of(exit_request)
    return 0


def _code_of(exit_request: SystemExit) -> int:
    """Returns the code that the interpreter would leave with, and prints what it would print."""
    code = exit_request.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    with contextlib.suppress(Exception):
        print(code, file=sys.stderr, flush=True)
    return 1


def _run_script(path: str, arguments: Sequence[str]) -> None:
    sys.argv = [path, *arguments]
    # Python names the file by its whole path, in tracebacks too.
    path = os.path.abspath(path)
    if os.path.isdir(path) or _is_zip(path):
        _set_first_path(path)
        _run_spec("__main__")
        return
    _set_first_path(os.path.dirname(path))
    with io.open_code(path) as file:
        source = file.read()
    main_module = _new_main()
    main_module.__file__ = path
    main_module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    exec(compile(source, path, "exec", dont_inherit=True), main_module.__dict__)


def _is_zip(path: str) -> bool:
    import zipfile

    return not path.endswith(".py") and os.path.isfile(path) and zipfile.is_zipfile(path)


def _run_module(name: str, arguments: Sequence[str]) -> None:
    sys.argv = ["-m", *arguments]
    _set_first_path(os.getcwd())
    _run_spec(name)


def _run_spec(name: str) -> None:
    if name == "__main__":
        # Ours stands under that name.
        sys.modules.pop("__main__", None)
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code: CodeType | None = None
    if spec is not None and spec.loader is not None and hasattr(spec.loader, "get_code"):
        code = spec.loader.get_code(spec.name)
    if spec is None or code is None:
        _new_main()
        sys.exit(f"{sys.executable}: no module named {name!r} that can be run")
    main_module = _new_main()
    main_module.__spec__ = spec
    main_module.__loader__ = spec.loader
    main_module.__package__ = spec.parent
    if spec.origin is not None:
        main_module.__file__ = spec.origin
        if name != "__main__":
            sys.argv[0] = spec.origin
    exec(code, main_module.__dict__)


def _new_main() -> ModuleType:
    """Returns a fresh `__main__`, which stays in place to the end: pickle and multiprocessing look things up in it."""
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    module.__spec__ = None
    sys.modules["__main__"] = module
    return module


def _set_first_path(folder: str) -> None:
    # `python -m tfdist.process` has put the working folder first, unless told to be safe.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
