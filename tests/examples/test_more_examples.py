"""Every other example does what its docstring says, alone and on two workers, from any folder."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import run_command

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ["custom_loop", "recommender", "text", "tfrecords", "tutorial"]
DEADLINE_S = 90
PLACES = {"alone": [], "2 workers": ["-m", "tfdist.run", "--workers", "2"]}
WITH_PS = "2 workers and 2 ps"
COMMANDS = {**PLACES, WITH_PS: [*PLACES["2 workers"], "--ps", "2"]}


@dataclass(frozen=True)
class Ended:
    """What one run of an example left; `lines` without the task's name before them."""

    out: str
    err: str
    folder: Path

    @property
    def lines(self) -> list[str]:
        return [re.sub(r"^\[(worker|chief) 0\] ", "", line) for line in self.out.splitlines()]

    @property
    def losses(self) -> list[float]:
        return [float(number) for number in re.findall(r"loss: ([\d.]+)", self.out)]

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def __str__(self) -> str:
        return f"{self.out}\n{self.err}"


def run(name: str, place: str, folder: Path, *options: str) -> Ended:
    done = run_command([sys.executable, *COMMANDS[place], EXAMPLES / f"{name}.py", *options], folder, DEADLINE_S)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return Ended(done.stdout, done.stderr, folder)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Returns a function that runs an example in an empty folder, once."""
    runs: dict[tuple[str, str], Ended] = {}

    def once(name: str, place: str) -> Ended:
        if (name, place) not in runs:
            runs[name, place] = run(name, place, tmp_path_factory.mktemp(name))
        return runs[name, place]

    return once


def test_every_example_is_tested():
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted([*NAMES, "digits"])


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_shows_both_ways_to_run_it(name):
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert f"    python examples/{name}.py\n" in text
    assert f"    python -m tfdist.run --workers 2 examples/{name}.py\n" in text


@pytest.mark.parametrize("name", NAMES)
def test_two_workers_have_the_losses_of_one_process(name, ended):
    alone, two = ended(name, "alone"), ended(name, "2 workers")
    assert len(alone.losses) > 1
    assert two.losses == pytest.approx(alone.losses, abs=1e-3), two


@pytest.mark.parametrize("name", NAMES)
def test_it_learns(name, ended):
    alone = ended(name, "alone")
    assert alone.losses[-1] < alone.losses[0] / 2, alone


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("custom_loop", []),
        ("recommender", ["recommender.png"]),
        ("text", []),
        ("tfrecords", ["digits-tfrecords"]),
        ("tutorial", ["tutorial"]),
    ],
)
def test_it_leaves_only_what_it_saves(name, files, ended):
    for place in PLACES:
        assert ended(name, place).files == files


@pytest.mark.parametrize("place", PLACES)
def test_unseen_docstrings_are_told_by_their_words(place, ended):
    last = ended("text", place).lines[-1]
    found = re.fullmatch(r"\d,\d{3} docstrings; test accuracy (0\.\d{4})", last)
    assert found, last
    assert float(found[1]) > 0.8


@pytest.mark.parametrize("place", PLACES)
def test_the_audit_finds_every_record_once_in_files_of_unequal_sizes(place, ended):
    shown = ended("tfrecords", place)
    assert "expected 1797 examples per epoch: coverage 100 %, 0 holes, 0 overlaps" in shown.lines, shown


@pytest.mark.parametrize("place", COMMANDS)
def test_the_map_of_tastes_is_recovered_and_drawn(place, ended):
    shown = ended("recommender", place)
    *_, places, error = shown.lines
    found = re.fullmatch(r"the films' places are recovered to (\d+\.\d)%; their map is in recommender.png", places)
    assert found, shown
    assert float(found[1]) > 98, shown
    told = re.fullmatch(r"test error (0\.\d{3}) \(the noise alone 0\.300\)", error)
    assert told, shown
    assert float(told[1]) < 0.33, shown
    assert (shown.folder / "recommender.png").read_bytes().startswith(b"\x89PNG")


def test_the_tutorial_goes_on_after_the_last_whole_epoch(ended):
    first = ended("tutorial", "2 workers")
    second = run("tutorial", "alone", first.folder, "--epochs", "4")
    assert re.findall(r"Epoch (\d)/4", second.out) == ["4"], second
    assert second.losses[-1] < first.losses[-1], second
