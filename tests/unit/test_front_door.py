"""Tests of `import tfdist`: it is light, says what it has, and loads the rest when asked."""

import json
import subprocess
import sys

import pytest

import tfdist

HEAVY = {"tensorflow", "keras", "numpy", "h5py"}
LIGHT_NAMES = ["Cluster", "TFConfig", "Task", "TfdistError", "all_reduce", "barrier", "errors", "is_chief", "resolve"]


def loaded_after(code):
    """Top-level names of the modules that a fresh process holds after running the code."""
    code += "\nimport json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "code",
    ["import tfdist", "import tfdist.run", "import tfdist.launch", "import tfdist.process"]
    + [f"import tfdist; tfdist.{name}" for name in ("resolve", "is_chief", "TfdistError")]
    + ["import tfdist; dir(tfdist); tfdist.resolve(); tfdist.is_chief()"],
)
def test_the_front_loads_neither_tensorflow_nor_numpy(code):
    assert not HEAVY & loaded_after(code)


def test_all_is_sorted_and_names_each_name_once():
    assert list(tfdist.__all__) == sorted(set(tfdist.__all__))


def test_dir_lists_what_all_lists():
    assert dir(tfdist) == list(tfdist.__all__)


@pytest.mark.parametrize("name", LIGHT_NAMES)
def test_a_light_name_is_exported_and_resolves(name):
    assert name in tfdist.__all__
    assert getattr(tfdist, name).__name__ in (name, f"tfdist.{name}")


def test_a_name_gives_the_same_object_each_time():
    assert tfdist.resolve is tfdist.resolve
    assert tfdist.errors is tfdist.errors


def test_an_unknown_name_is_an_attribute_error_that_says_it():
    with pytest.raises(AttributeError, match="module 'tfdist' has no attribute 'resolv'"):
        _ = tfdist.resolv
