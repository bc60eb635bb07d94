"""A function of a file is found again by another process; any other is refused with what to do."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import textwrap

import pytest

from tfdist.errors import TravelError
from tfdist.testing import functions


def top():
    return "top"


def wrapped(function):
    @functools.wraps(function)
    def wrapper():
        return function() + "!"

    return wrapper


@wrapped
def decorated():
    return "decorated"


class Holder:
    @staticmethod
    def static():
        return "static"

    def method(self):
        return "method"

    @classmethod
    def of_class(cls):
        return "class"


replaced = top


def replaced_function():
    return "first"


first = replaced_function


def replaced_function():
    return "second"


@pytest.mark.parametrize("function", [top, decorated, Holder.static], ids=["top", "decorated", "static"])
def test_a_function_of_a_file_is_found_as_itself(function):
    assert functions.find(functions.describe(function)) is function


def local():
    def inner():
        pass

    return inner


REFUSED = {
    "a lambda": (lambda: 1, r"the lambda at .*test_functions.py:\d+ has no name.*`def`"),
    "a function in a function": (local(), r"inner at .*test_functions.py:\d+ is defined inside local.*top level"),
    "a partial": (functools.partial(top), "is a partial: pass the function, and its arguments after it"),
    "a bound method": (Holder().method, "is not a function at the top level of a file"),
    "a method of the class": (Holder.of_class, "is not a function at the top level"),
    "a builtin": (len, "is not a function at the top level"),
    "an object": (3, "3 is not a function"),
    "one that was replaced": (first, "is another function than the one defined as replaced_function"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_no_other_process_finds_is_refused_with_what_to_do(name):
    function, message = REFUSED[name]
    with pytest.raises(TravelError, match=message):
        functions.describe(function)


def test_a_function_typed_at_a_prompt_is_refused():
    code = "def typed(): pass\nfrom tfdist.testing import functions\nfunctions.describe(typed)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "TravelError: typed was defined in __main__, which is no file; put it in one" in done.stderr


def test_an_argument_that_can_not_be_sent_is_named():
    with pytest.raises(TravelError, match=r"argument 1 of top\(\) is an object"):
        functions.make_request(top, (1, object()), {})
    with pytest.raises(TravelError, match=r"argument model of top\(\)\['m'\] is an object"):
        functions.make_request(top, (), {"model": {"m": object()}})


@pytest.fixture
def found_elsewhere(tmp_path):
    """Returns a function: a description -> what the function it describes returns in a process of other paths."""

    def find(description, paths=()):
        code = (
            "import json, sys; from tfdist.testing import functions; request = json.loads(sys.argv[1]); "
            "functions.add_import_paths(request[1]); print(functions.find(request[0])())"
        )
        request = json.dumps([description, list(map(str, paths))])
        done = subprocess.run(
            [sys.executable, "-c", code, request], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
        )
        return done.stdout.strip() or done.stderr

    return find


def write(path, source):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return {"module": path.stem, "file": str(path), "name": "f"}


def test_a_file_that_no_path_leads_to_is_imported_by_its_name(tmp_path, found_elsewhere):
    description = write(tmp_path / "elsewhere" / "test_x.py", "def f(): return __name__")
    assert found_elsewhere(description) == "test_x"


def test_a_module_of_a_package_is_imported_with_its_package(tmp_path, found_elsewhere):
    write(tmp_path / "root" / "package" / "__init__.py", "")
    write(tmp_path / "root" / "package" / "helper.py", "value = 'helper'")
    description = write(tmp_path / "root" / "package" / "test_x.py", "from .helper import value\ndef f(): return value")
    description["module"] = "package.test_x"
    assert found_elsewhere(description, [tmp_path / "root"]) == "helper"


def test_another_file_of_the_same_name_is_not_taken_for_it(tmp_path, found_elsewhere):
    write(tmp_path / "one" / "test_x.py", "def f(): return 'one'")
    description = write(tmp_path / "two" / "test_x.py", "def f(): return 'two'")
    assert found_elsewhere(description, [tmp_path / "one"]) == "two"


def test_a_script_is_imported_without_being_run(tmp_path, found_elsewhere):
    source = "def f(): return __name__\nif __name__ == '__main__': raise SystemExit"
    description = {**write(tmp_path / "script.py", source), "module": "__main__"}
    assert found_elsewhere(description) == "__mp_main__"


def test_a_function_that_is_not_there_when_imported_is_said_to_be_missing(tmp_path, found_elsewhere):
    description = write(tmp_path / "script.py", "if __name__ == '__main__':\n    def f(): pass")
    assert "has no f when it is imported in a task" in found_elsewhere(description)
