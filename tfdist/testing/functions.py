"""A function -> the file it is in and its name there -> the same function in another process.

Code does not travel: a task imports the file as the test's process did. So the function must stand at the top level of
a file (or in a class there), under its own name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from tfdist.errors import TravelError
from tfdist.testing import values

# As multiprocessing calls a script that it imports anew: what stands under `if __name__ == "__main__":` does not run.
SCRIPT = "__mp_main__"


def make_request(function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what another process needs to call `function` as this one would: values that travel.

    Raises:
        TravelError: The function or an argument can not be sent.
    """
    description = describe(function)
    for what, argument in [*enumerate(arguments), *named.items()]:
        values.encode(argument, [], what=f"argument {what} of {description['name']}()")
    return {
        "function": description,
        "arguments": list(arguments),
        "named": dict(named),
        "folder": os.getcwd(),
        "import_paths": import_paths(),
    }


def describe(function: Callable[..., Any]) -> dict[str, str]:
    """Returns how another process finds `function`: plain values.

    Raises:
        TravelError: It can not be found again; the message says what to do.
    """
    name = getattr(function, "__qualname__", None)
    if isinstance(function, functools.partial):
        raise TravelError(f"{function!r} is a partial: pass the function, and its arguments after it")
    if not inspect.isfunction(function) or name is None:
        raise TravelError(f"{function!r} is not a function at the top level of a file; pass one that is")
    where = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
    if "<lambda>" in name:
        raise TravelError(f"the lambda at {where} has no name to be found by; write it with `def` at the top level")
    if "<locals>" in name:
        outer, inner = name.split(".<locals>.", 1)
        raise TravelError(
            f"{inner} at {where} is defined inside {outer}, where no other process finds it; move it to the top level "
            "of its file, and pass what it took from around it as arguments"
        )
    module = sys.modules.get(function.__module__)
    path = getattr(module, "__file__", None)
    if module is None or path is None or not os.path.exists(path):
        raise TravelError(f"{name} was defined in {function.__module__}, which is no file; put it in one")
    if _look_up(module, name) is not function:
        raise TravelError(
            f"{function.__module__}.{name} is another function than the one defined as {name} at {where}; pass the one "
            "that the file has under that name"
        )
    return {"module": function.__module__, "file": os.path.abspath(path), "name": name}


def find(description: Mapping[str, str]) -> Any:
    """Returns the function that `describe` described, after importing its file."""
    module = _import(description["module"], description["file"])
    function = _look_up(module, description["name"])
    if function is None:
        raise TravelError(
            f"{description['file']} has no {description['name']} when it is imported in a task; is it defined under a "
            "condition, or has the file changed?"
        )
    return function


def import_paths() -> list[str]:
    """Returns where this process imports from."""
    return [os.path.abspath(path) for path in sys.path if isinstance(path, str)]


def add_import_paths(paths: Sequence[str]) -> None:
    """Lets this process import from these places too, after its own."""
    sys.path.extend(path for path in paths if path not in sys.path)


def find_class(module: str, name: str) -> Any:
    """Returns what `name` is in `module`, importing it where needed; None where there is no such thing."""
    if module == SCRIPT:
        module = "__main__"
    try:
        found = sys.modules.get(module) or importlib.import_module(module)
    except Exception:  # whatever a file does when it is imported
        return None
    return _look_up(found, name)


def _look_up(module: ModuleType, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = inspect.getattr_static(value, part, None)
        if isinstance(value, staticmethod):
            value = value.__func__
    return value


def _import(name: str, path: str) -> ModuleType:
    if name == "__main__":
        name = SCRIPT
    loaded = sys.modules.get(name)
    if loaded is not None and _is_file(getattr(loaded, "__file__", None), path):
        return loaded
    if name != SCRIPT and _is_file(_origin(name), path):
        return importlib.import_module(name)
    # A file of tests that pytest has imported by its path, or another of the same name.
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TravelError(f"{path} is not a file that Python can import")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _origin(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin


def _is_file(found: str | None, path: str) -> bool:
    return found is not None and os.path.exists(found) and os.path.samefile(found, path)
