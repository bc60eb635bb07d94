"""The command line of `python -m tfdist.verify`: what it names is found without being imported, bad use ends with 2."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tfdist import verify
from tfdist.errors import LaunchError

SOURCE = """
raise SystemExit("this file must not be imported here")

def build():
    return model

def data(rows=40, *, seed=0):
    return x, y

def train(strategy, *, epochs):
    pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_training.py").write_text(SOURCE)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("raise SystemExit('nor this')")
    (tmp_path / "my_package" / "inner.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def build(:")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "module", "file", "name"),
    [
        ("my_training.py:build", "my_training", "my_training.py", "build"),
        ("./my_training.py:data", "my_training", "my_training.py", "data"),
        ("my_training:build", "my_training", "my_training.py", "build"),
        ("my_package.inner:build", "my_package.inner", "my_package/inner.py", "build"),
    ],
)
def test_a_function_is_described_without_importing_it(folder, text, module, file, name):
    assert verify.describe(text) == {"module": module, "file": str(folder / file), "name": name}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "the following arguments are required: model"),
        (["my_training.py"], "'my_training.py' names no function; write train.py:build"),
        (["nothing.py:build"], "the file 'nothing.py' is not in"),
        (["no_such_package.inner:build"], "there is no module 'no_such_package.inner'"),
        (["my_package.no_such:build"], "there is no module 'my_package.no_such'"),
        (["my_training.py:biuld"], "has no function 'biuld' at its top level (it has build, data, train)"),
        (["my_training.py:train"], "train(strategy, epochs) in my_training.py takes arguments"),
        (["broken.py:build"], "broken.py, line 1: "),
        (["my_training.py:build", "my_training.py:dta"], "has no function 'dta'"),
        (["my_training.py:build", "--workers", "2,0"], "'0' is not a whole number from 1 on"),
        (["my_training.py:build", "--epochs", "some"], "'some' is not a whole number"),
        (["my_training.py:build", "--tolerance", "-1"], "'-1' is not a number above 0"),
        (["my_training.py:build", "--wrokers", "2"], "unrecognized arguments: --wrokers"),
    ],
)
def test_bad_use_is_told_in_one_sentence_and_ends_with_2(folder, capsys, argv, words):
    assert verify.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_several_numbers_of_workers_are_read():
    values = verify._parser().parse_args(["a.py:b", "--workers", "2,3"])  # noqa: SLF001
    assert values.workers == (2, 3)


def test_a_module_that_is_no_function_is_told():
    with pytest.raises(LaunchError, match="names no function"):
        verify.describe(":build")


def test_help_loads_neither_numpy_nor_tensorflow_and_names_every_flag():
    code = (
        "import sys, tfdist.verify\n"
        "try:\n    tfdist.verify.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('numpy', 'tensorflow', 'keras') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert ended.stdout.endswith("[]\n")
    for flag in ("--workers", "--epochs", "--steps", "--batch-size", "--tolerance", "--json", "--seed"):
        assert flag in ended.stdout


def test_the_docstring_is_the_manual():
    for word in ("Usage by case", "What is compared", "Verdicts", "Exit codes", "--json"):
        assert word in (verify.__doc__ or "")
