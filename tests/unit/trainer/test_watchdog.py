"""The watchdog ends a process whose steps do not end; steps of an evaluation inside a callback are steps."""

from __future__ import annotations

import subprocess
import sys

import pytest

WATCHED = """
import time
from tfdist.trainer.watchdog import Watchdog

with Watchdog(0.5) as outer:
    outer.pat()
    with Watchdog(0.5) as inner:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            {line}
            time.sleep(0.05)
print("went on")
"""


@pytest.mark.parametrize(("line", "code", "words"), [("inner.pat()", 0, "went on"), ("pass", 75, "no step ends")])
def test_a_callbacks_own_steps_count(line, code, words):
    done = subprocess.run(
        [sys.executable, "-c", WATCHED.format(line=line)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
