"""The line that used TensorFlow first is seen; with a stand-in for TensorFlow that imports at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

CONTEXT = """
class Context:
    _context_handle = None
    def ensure_initialized(self):
        self._context_handle = self._context_handle or object()
        return "initialized"
the_context = Context()
"""
USE = """
from tensorflow.python.eager import context
def constant(value):
    return context.the_context.ensure_initialized()
"""


def lines_seen(folder, script):
    """Runs a script in which `import tensorflow` finds the stand-in; returns what it printed."""
    eager = folder / "tensorflow" / "python" / "eager"
    eager.mkdir(parents=True)
    for package in (eager, eager.parent):
        (package / "__init__.py").touch()
    (eager / "context.py").write_text(CONTEXT)
    (folder / "tensorflow" / "__init__.py").write_text(USE)
    library = folder / "site-packages"
    library.mkdir()
    (library / "library.py").write_text("import tensorflow\ndef help():\n    tensorflow.constant(1)\n")
    path = folder / "train.py"
    end = "from tfdist import first_use\nprint(first_use.line())\n"
    path.write_text(f"import sys\nsys.path.append({str(library)!r})\n{script}\n{end}")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("import tfdist\nimport tensorflow\nx = tensorflow.constant(1)", "train.py:5: x = tensorflow.constant(1)"),
        ("import tensorflow\nimport tfdist\nx = tensorflow.constant(1)", "train.py:5: x = tensorflow.constant(1)"),
        (
            "import tensorflow, tfdist\ntensorflow.constant(1)\ntensorflow.constant(2)",
            "train.py:4: tensorflow.constant(1)",
        ),
        ("import tfdist\nimport library\nlibrary.help()", "train.py:5: library.help()"),
        (
            "import tfdist\ndef f():\n    tensorflow.constant(1)\nimport tensorflow\nf()",
            "train.py:5: tensorflow.constant(1)",
        ),
        ("import tensorflow\ntensorflow.constant(1)\nimport tfdist\ntensorflow.constant(2)", "None"),
        ("import tfdist\nimport tensorflow", "None"),
        ("import tfdist", "None"),
    ],
)
def test_the_first_use_is_a_line_of_the_script(tmp_path, script, line):
    assert lines_seen(tmp_path, script) == line


@pytest.mark.parametrize("order", ["tfdist, tensorflow", "tensorflow, tfdist"])
def test_the_function_is_tensorflows_own_again_after_the_first_use(tmp_path, order):
    script = f"import {order}\nfrom tensorflow.python.eager.context import Context\n"
    script += "print(tensorflow.constant(1), Context.ensure_initialized.__module__, end=' ')"
    assert lines_seen(tmp_path, script).startswith("initialized tensorflow.python.eager.context train.py")


def test_nothing_stays_in_the_way_of_imports_once_tensorflow_is_there(tmp_path):
    script = "import tfdist, tensorflow\n"
    script += "print([f for f in sys.meta_path if 'tfdist' in type(f).__module__], end=' ')"
    assert lines_seen(tmp_path, script) == "[] None"
