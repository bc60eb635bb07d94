"""A call that holds the GIL is ended when a peer dies or the time is over, and says so."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time

import pytest

SCRIPT = """
import os, socket, time
from tfdist.lookout import looking_out
ours, peers = socket.socketpair()
def the_constructor(s):
    time.sleep(s)
with looking_out("worker 0", {{ours.fileno(): "worker 1"}}, {timeout_s}):
    {lines}
print("over")
"""


def run(lines, timeout_s=60.0):
    source = SCRIPT.format(lines=textwrap.indent(lines, "    ").strip(), timeout_s=timeout_s)
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=30, check=False)
    return done, time.monotonic() - started


@pytest.mark.parametrize(
    ("lines", "timeout_s", "words"),
    [
        ("peers.close(); the_constructor(600)", 60.0, "worker 1 died while TensorFlow's servers started: worker 0 can"),
        ("the_constructor(600)", 0.5, "worker 0: TensorFlow's servers did not start within 0.5 s"),
    ],
    ids=["a peer died", "time is over"],
)
def test_a_wait_in_vain_is_ended_with_a_line_and_the_stacks(lines, timeout_s, words):
    done, seconds = run(lines, timeout_s)
    assert done.returncode == -signal.SIGABRT, done
    assert f"tfdist: {words}" in done.stderr
    assert "in the_constructor" in done.stderr
    assert seconds < 10


@pytest.mark.parametrize(
    "lines",
    [
        "the_constructor(0)",
        "peers.send(b'a heartbeat'); the_constructor(0.2)",
        "peers.close(); the_constructor(0.2)",  # it ends in the moment of grace, and will see by itself
    ],
)
def test_a_wait_that_ends_is_left_alone(lines):
    done, _ = run(lines)
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


def test_an_error_inside_comes_out():
    done, seconds = run("raise ValueError('no')")
    assert done.stderr.rstrip().endswith("ValueError: no")
    assert seconds < 10
