"""Real SIGKILLs in the midst of real saves: what a process leaves is the file before, or the new one, whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment

SCRIPT = Path(__file__).with_name("killed_saves.py")
KILLS = 20


@pytest.fixture(scope="module")
def in_the_midst(tmp_path_factory):
    """Returns how many of the kills met a save, by kind of file; the script fails where a file was not whole."""
    out = tmp_path_factory.mktemp("killed")
    command = [sys.executable, SCRIPT, out, str(KILLS)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["m.keras", "m.weights.h5", "exported", "checkpoints"])
def test_a_kill_in_the_midst_of_saving_leaves_the_old_one_or_the_new_one(kind, in_the_midst):
    assert in_the_midst[kind] >= KILLS / 4
