"""What the documentation tells people to type is what is run here and in CI."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import run_command

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TESTING = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
TRAIN = (
    "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/python -m tfdist.run --workers 2 examples/digits.py"
)
TEST = "python3 -m venv .venv && .venv/bin/pip install '.[test]' && .venv/bin/pytest"
DEADLINE_S = 120
TRAINED = """
import keras
import numpy as np

def train(strategy):
    x = np.random.default_rng(0).normal(size=(100, 20)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    history = model.fit(x, x[:, :1], batch_size=50, epochs=2, shuffle=False, verbose=0)
    return {**history.history, "weights": model.get_weights()}
"""


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def lines(text: str) -> list[str]:
    return [line for block in blocks(text, "bash") for line in block.splitlines()]


def shell(command: str, folder: Path, deadline_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
    """Runs a command of the documentation with this interpreter."""
    command = re.sub(r"^(\.venv/bin/)?python ", f"{shlex.quote(sys.executable)} ", command)
    return run_command(["bash", "-c", command], folder, deadline_s)


def test_the_readme_starts_with_the_two_commands_and_holds_no_others_unknown_here():
    assert lines(README) == [TRAIN, TEST, "python train.py", "python -m tfdist.run --workers 2 train.py"]


def test_ci_runs_the_test_command_as_it_stands():
    assert TEST in [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]


def test_the_command_that_trains_does_what_the_readme_says(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    done = shell(TRAIN.split(" && ")[-1], tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\[worker 0\] test accuracy 0\.\d{4}", done.stdout.splitlines()[-1]), done.stdout
    # What the README shows of it.
    shown = re.search(r"loss: [\d.]+", blocks(README, "text")[0])
    assert shown
    assert shown[0] in done.stdout


@pytest.fixture
def folder(tmp_path):
    (script,) = blocks(README, "python")
    (tmp_path / "train.py").write_text(script)
    return tmp_path


@pytest.mark.parametrize("command", [line for line in lines(README) if line.endswith(" train.py")])
def test_the_script_of_the_readme_runs(command, folder):
    done = shell(command, folder)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["model.keras", "train.py"]


@pytest.mark.parametrize(("text", "passed"), [(README, 2), (TESTING, 5)], ids=["README", "testing"])
def test_the_tests_that_are_shown_pass(text, passed, tmp_path):
    (tests,) = blocks(text, "py")
    (tmp_path / "test_train.py").write_text(tests)
    (tmp_path / "my_training.py").write_text(TRAINED)
    done = shell("python -m pytest -q -p no:cacheprovider --strict-markers", tmp_path, 2 * DEADLINE_S)
    assert f"{passed} passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("text", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_links_and_named_files_lead_somewhere(text):
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    targets += re.findall(r"`((?:examples|benchmarks|tests|tfdist|tf_config|\.ci)/[\w./-]*)`", text)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_tox_environment_named_is_one_that_tox_has():
    known = set(re.findall(r"^\[testenv:(\w+)\]", (ROOT / "tox.ini").read_text(), re.MULTILINE))
    named = set(re.findall(r"tox -e (\w+)", CONTRIBUTING))
    assert named == known


def test_the_versions_the_readme_names_are_those_that_the_package_admits():
    setup = (ROOT / "setup.cfg").read_text()
    oldest = [re.search(pattern, setup)[1] for pattern in (r"python_requires = >=([\d.]+)", r"tensorflow>=([\d.]+)")]
    oldest.append(re.search(r"keras>=([\d.]+)", setup)[1])
    python, tensorflow, keras = oldest
    assert f"Python {python} to " in README
    assert f"TensorFlow {tensorflow} to " in README
    assert f"Keras {keras} to " in README
