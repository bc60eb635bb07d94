"""Faults while a model trains: the run ends at once with the right code, names the right task, and leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from by_hand import addresses
from faulty_training import LIMIT_S, assert_nothing_left, pids_amid_steps, seconds_since_fault, training
from launching import finish, is_alive, started, wait_for


@pytest.fixture
def folder(tmp_path):
    """Holds the script and, as TMPDIR of the run, `tmp`."""
    (tmp_path / "tmp").mkdir()
    return tmp_path


def launch(folder, script, *flags, workers=2, env=None):
    return started("--workers", workers, *flags, script, env={"TMPDIR": str(folder / "tmp"), **(env or {})})


def fail_in_worker_1(folder, *flags, workers=2, env=None, **fault):
    """Runs a training to the end that its fault brings; returns it and the seconds from the fault to the end."""
    with launch(folder, training(folder, **fault), *flags, workers=workers, env=env) as launcher:
        ended = finish(launcher, deadline_s=60)
    assert (folder / "fault").exists(), ended
    seconds = seconds_since_fault(folder)
    assert_nothing_left(folder, ended)
    return ended, seconds


def assert_blamed(ended, task, words):
    assert f"failed: {task} was first" in ended.words, ended
    assert re.search(rf"  task : {task} at 127\.0\.0\.1:\d+, host \S+, pid \d+$", ended.words, re.MULTILINE), ended
    assert words in ended.words, ended


def assert_others_are_quiet(ended, task):
    """What the others say of the loss of their peer is of no use to the reader."""
    assert "PeerLostError" not in ended.err, ended
    errors = re.findall(r"^\[(\w+ \d)\] .*(?:\wError\b|Traceback)", ended.err, re.MULTILINE)
    assert set(errors) <= {task}, ended


# -- killed


@pytest.mark.parametrize(("workers", "victim"), [(2, 0), (2, 1), (3, 2)])
def test_a_killed_task_ends_the_run_and_is_named(folder, workers, victim):
    with launch(folder, training(folder), workers=workers) as launcher:
        pids = pids_amid_steps(folder, workers, launcher)
        killed_at = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        ended = finish(launcher, killed_at)
    assert ended.code == 137, ended
    assert ended.seconds < LIMIT_S, ended
    assert_blamed(ended, f"worker {victim}", "killed by SIGKILL")
    assert f"pid {pids[victim]}\n" in ended.words
    assert_others_are_quiet(ended, f"worker {victim}")
    assert_nothing_left(folder, ended)


def test_a_stopped_task_is_lost_after_the_heartbeat_time(folder):
    with launch(folder, training(folder), env={"TFDIST_HEARTBEAT_TIMEOUT_S": "3"}) as launcher:
        pids = pids_amid_steps(folder, 2, launcher)
        stopped_at = time.monotonic()
        os.kill(pids[1], signal.SIGSTOP)
        ended = finish(launcher, stopped_at)
    assert ended.code == 1, ended
    assert ended.seconds < 3 + LIMIT_S, ended
    assert_blamed(ended, "worker 1", "worker 1 has been silent for 3 s (stopped, or its host is lost)")
    assert "given up by worker 0" in ended.words, ended
    assert_nothing_left(folder, ended)


# -- the launcher


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_ends_the_training(folder, number, code):
    with launch(folder, training(folder)) as launcher:
        pids_amid_steps(folder, 2, launcher)
        asked_at = time.monotonic()
        launcher.send_signal(number)
        ended = finish(launcher, asked_at)
    assert ended.code == code, ended
    assert ended.seconds < LIMIT_S, ended
    assert "Traceback" not in ended.err, ended
    assert "failed" not in ended.words, ended
    assert_nothing_left(folder, ended)


def test_a_killed_launcher_takes_the_training_with_it(folder):
    with launch(folder, training(folder)) as launcher:
        pids = pids_amid_steps(folder, 2, launcher)
        launcher.kill()
        wait_for(lambda: not any(map(is_alive, pids)), "all tasks to be gone", 5)
        ended = finish(launcher)
        wait_for(lambda: not list((folder / "tmp").glob("tfdist*")), "the run's folder to be gone", 5)
    assert_nothing_left(folder, ended)


# -- an end of one task


@pytest.mark.parametrize(
    ("where", "lines", "words"),
    [
        ("before", "if me == 1:\n    fault()\n    raise ValueError('no such data')", "ValueError: no such data"),
        ("step", "if me == 1:\n    fault()\n    raise ValueError('bad step')", "ValueError: bad step"),
        ("row", "if me == 1 and i == 99:\n    fault()\n    raise ValueError('bad row 99')", "ValueError: bad row 99"),
    ],
    ids=["before the strategy", "in a callback", "in the dataset"],
)
def test_an_exception_in_one_task_is_told_once(folder, where, lines, words):
    ended, seconds = fail_in_worker_1(folder, **{where: lines})
    assert ended.code == 1, ended
    assert seconds < LIMIT_S, ended
    assert_blamed(ended, "worker 1", words)
    assert f'File "{folder}/script.py", line' in ended.words
    assert_others_are_quiet(ended, "worker 1")


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(0)", 1, "left with exit code 0"),
        ("sys.exit(3)", 3, "exit code 3"),
        ("os._exit(3)", 3, "exit code 3"),
    ],
)
def test_a_task_that_leaves_amid_the_training_ends_the_run(folder, end, code, words):
    ended, seconds = fail_in_worker_1(folder, step=f"if me == 1:\n    fault()\n    {end}")
    assert ended.code == code, ended
    assert seconds < LIMIT_S, ended
    assert_blamed(ended, "worker 1", words)


def test_a_hang_in_python_ends_with_75_and_is_shown_by_its_stack(folder):
    step = "if me == 1:\n    fault()\n    time.sleep(600)"
    ended, seconds = fail_in_worker_1(folder, "--step-timeout", "5", step=step)
    assert ended.code == 75, ended
    assert seconds < 5 + LIMIT_S, ended
    line = next(n for n, text in enumerate((folder / "script.py").read_text().splitlines(), 1) if "sleep(600)" in text)
    assert re.search(rf'^\[worker 1\] .*File "{folder}/script.py", line {line} in fault$', ended.err, re.MULTILINE), (
        ended
    )
    assert_blamed(ended, "worker 1", "step")


# -- a clean end


def test_tasks_that_end_at_different_times_end_well(folder):
    # The chief is late with its save; then worker 1 is the last.
    after = """
if me == 0:
    wait_for("worker-1-is-done")
    tfdist.save(model, here / "model.keras")
    mark("saved")
elif me == 1:
    mark("worker-1-is-done")
    wait_for("saved")
    wait_for("worker-2-is-done")
else:
    mark("worker-2-is-done")
"""
    with launch(folder, training(folder, steps=9, after=after), workers=3) as launcher:
        ended = finish(launcher, deadline_s=60)
    assert ended.code == 0, ended
    assert not re.search("error|Traceback|failed", ended.err, re.IGNORECASE), ended
    assert (folder / "model.keras").exists()
    assert_nothing_left(folder, ended)


# -- without the launcher


def test_a_task_started_by_hand_ends_with_the_name_of_the_one_that_was_killed(by_hand, folder):
    script, both = training(folder), addresses(2)
    tasks = [by_hand.start(script, both, index) for index in range(2)]
    pids_amid_steps(folder, 2)
    killed_at = time.monotonic()
    tasks[1].kill()
    assert tasks[0].wait() == 1, tasks[0]
    assert tasks[0].started_at + tasks[0].seconds - killed_at < LIMIT_S, tasks[0]
    *_, last = tasks[0].err.rstrip().splitlines()
    assert last.startswith("tfdist.errors.PeerLostError: worker 1 is gone: its connection closed"), tasks[0]
    assert tasks[0].err.count("Traceback (most recent call last)") == 1, tasks[0]


def test_tasks_started_by_hand_that_end_at_different_times_end_well(by_hand, folder):
    after = "if me == 0:\n    wait_for('1')\n    time.sleep(1)\nelse:\n    mark('1')"
    script, both = training(folder, steps=9, after=after), addresses(2)
    tasks = [by_hand.start(script, both, index) for index in range(2)]
    assert [task.wait() for task in tasks] == [0, 0], [str(task) for task in tasks]
    assert not any(re.search(r"Traceback|\wError\b|UNAVAILABLE", t.err) for t in tasks), [str(t) for t in tasks]
