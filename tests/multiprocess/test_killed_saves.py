"""A SIGKILL at every moment of a save at which the disk has changed leaves the file before, or the new one, whole."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment

SCRIPT = Path(__file__).with_name("killed_saves.py")


def kill_saves(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize(
    ("kind", "moments"), [("m.keras", 2), ("m.weights.h5", 3), ("exported", 6), ("checkpoints", 7)]
)
def test_a_kill_at_any_change_of_the_disk_leaves_the_old_one_or_the_new_one(kind, moments, tmp_path):
    done = kill_saves(tmp_path, kind)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) >= moments


@pytest.mark.parametrize("kind", ["m.keras", "m.weights.h5", "exported"])
def test_a_save_that_writes_straight_to_its_place_would_be_noticed(kind, tmp_path):
    done = kill_saves(tmp_path, kind, "planted")
    assert done.returncode == 1, done.stdout
    # The child that came after a kill could not read what that had left.
    assert re.search(rf"{kind}, moment \d+: a child ended with 1$", done.stderr, re.MULTILINE), done.stderr
