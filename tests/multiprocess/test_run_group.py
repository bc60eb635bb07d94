"""Tasks that meet through the launcher: the real group, without TensorFlow."""

from __future__ import annotations

import pytest
from launching import run, write

MEET = """
import os, signal, sys, time
import numpy as np
import tfdist
from tfdist import process
from tfdist.collectives import meet

config = tfdist.resolve()
tasks, me = config.cluster.training_tasks, config.task.index
info = process.LaunchInfo.read(os.environ)
process.report("phase", phase="strategy")
def waiting(message):
    process.report("phase", phase="waiting", **{"for": message})
if sys.argv[1:] == ["absent"] and me == 1:
    time.sleep(600)
group = meet(
    [config.cluster.address(task) for task in tasks], tasks, tasks.index(config.task), secret=info.secret,
    start_timeout_s=info.start_timeout_s, step_timeout_s=info.step_timeout_s or 30, on_wait=waiting,
)
process.set_current(process.Current(config, group))
process.install_exit_hooks()
process.report("phase", phase="connected")
"""


def test_the_public_calls_agree_on_all_tasks(tmp_path):
    path = write(
        tmp_path,
        MEET
        + """
print(tfdist.is_chief(), tfdist.all_reduce(me + 1), tfdist.all_reduce(me, op="mean"), tfdist.all_reduce(True))
print(tfdist.all_reduce(np.array([me, 1], "int16"), op="max").tolist())
print([a.tolist() for a in tfdist.all_reduce([np.ones(2), np.zeros((0, 3), "float32")])])
tfdist.barrier("end")
""",
    )
    ended = run("--workers", 3, path)
    assert ended.code == 0, ended
    for me in range(3):
        assert ended.said_by(f"worker {me}") == [
            f"{me == 0} 6 1.0 3",
            "[2, 1]",
            "[[3.0, 3.0], []]",
        ], ended


def test_a_task_that_is_done_waits_for_a_slower_one(tmp_path):
    path = write(
        tmp_path,
        MEET
        + """
if me == 1:
    time.sleep(1)
    (np.zeros(1) + 1).sum()
print("done")
""",
    )
    ended = run("--workers", 2, path)
    assert ended.code == 0, ended
    assert ended.said_by("worker 0") == ended.said_by("worker 1") == ["done"]
    assert "failed" not in ended.err


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
        ("raise ValueError('boo')", 1, "ValueError: boo"),
        ("sys.exit(5)", 5, "exit code 5"),
        ("sys.exit(0)", 1, "left with exit code 0 at step 4"),
        ("os._exit(0)", 1, "left with exit code 0 at step 4"),
    ],
)
def test_the_task_that_ends_amid_the_training_is_blamed_within_seconds(tmp_path, end, code, words):
    path = write(
        tmp_path,
        MEET
        + f"""
process.report("step", step=4)
group.progress(4)
if me == 1:
    {end}
tfdist.barrier("step 5")
""",
    )
    ended = run("--workers", 3, path)
    assert ended.code == code, ended
    assert "failed: worker 1 was first" in ended.words, ended
    assert words in ended.words, ended
    assert ended.seconds < 10


def test_a_script_that_hangs_is_shown_by_its_stack_after_the_step_timeout(tmp_path):
    path = write(
        tmp_path,
        MEET
        + """
def dream():
    time.sleep(600)
if me == 1:
    dream()
tfdist.barrier("step 5")
""",
    )
    ended = run("--workers", 2, "--step-timeout", 1, path)
    assert ended.code == 75, ended
    assert "worker 1" in ended.words
    assert "in dream" in ended.err, ended


def test_a_task_that_does_not_come_to_the_meeting_is_named(tmp_path):
    ended = run("--workers", 2, "--start-timeout", 1, write(tmp_path, MEET), "absent")
    assert ended.code == 75, ended
    assert "worker 1" in ended.words, ended
    assert ended.seconds < 10
