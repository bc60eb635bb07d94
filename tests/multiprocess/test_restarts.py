"""What `--max-restarts` starts again, and what a parameter-server cluster does without.

Most scripts here need no TensorFlow; the last ones train, through parameter servers.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from launching import finish, is_alive, run, started, wait_for, write

# Which task it is and how often it was started before; marks of other tasks, by name and attempt.
HEAD = """
import json, os, pathlib, signal, sys, time
from tfdist import process
from tfdist.errors import MeetingError, PeerLostError, WaitError

task = json.loads(os.environ["TF_CONFIG"])["task"]
me, here = "{type} {index}".format(**task), pathlib.Path(__file__).parent
attempt, after = int(os.environ["TFDIST_ATTEMPT"]), os.environ.get("TFDIST_LAST_FAILURE", "")
def mark(name):
    (here / f"{name}.part").write_text(str(os.getpid()))
    (here / f"{name}.part").rename(here / name)
def wait(name):
    while not (here / name).exists():
        time.sleep(0.01)
def forever():
    while True:
        time.sleep(1)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def connect():
    process.report("phase", phase="strategy")
    process.report("phase", phase="connected")
    mark(f"{me} {attempt}")
print("attempt", attempt, "after", after, flush=True)
"""


def script(folder, body):
    return write(folder, HEAD + body)


def pid_of(folder, task, attempt=0):
    path = folder / f"{task} {attempt}"
    wait_for(path.exists, f"{task} to run as attempt {attempt}")
    return int(path.read_text())


def read_until(stream, words):
    """Reads lines until one has these words; the launcher's end before that is an error."""
    said = ""
    while words not in said:
        line = stream.readline()
        assert line, f"no {words!r} in\n{said}"
        said += line
    return said


# -- all tasks


def test_a_run_whose_task_is_killed_is_started_again_as_a_whole(tmp_path):
    path = script(
        tmp_path,
        """
connect()
if attempt < 2:
    wait(f"worker 0 {attempt}"), wait(f"worker 1 {attempt}")
    die() if me == "worker 1" else forever()
print("trained", os.environ["TF_CONFIG"].count("127.0.0.1"))
""",
    )
    logs = tmp_path / "logs"
    ended = run("--workers", 2, "--max-restarts", 3, "--log-dir", logs, path)
    assert ended.code == 0, ended
    first, second, third, last = ended.said_by("worker 0")
    assert (first, last) == ("attempt 0 after ", "trained 2")
    assert re.match(r"attempt 1 after worker 1 \(pid \d+\) was killed by SIGKILL", second), ended
    assert second.split()[:2] == ["attempt", "1"]
    assert third.split()[:2] == ["attempt", "2"]
    said = [line for line in ended.words.splitlines() if "started again" in line]
    assert len(said) == 2, ended
    assert re.search(
        r"worker 1 \(pid \d+\) was killed .*; all 2 tasks are started again in 1 s \(restart 1 of 3\)$", said[0]
    )
    assert said[1].endswith("in 2 s (restart 2 of 3)")
    assert "failed" not in ended.words, ended
    log = (logs / "worker-0.log").read_text().splitlines()
    assert [line for line in log if not line.startswith("---")] == [first, second, third, last]
    assert sum(line.startswith("--- tfdist: started again: worker 1 (pid ") for line in log) == 2
    summary = json.loads((logs / "summary.json").read_text())
    assert (summary["exit_code"], summary["first_failure"]) == (0, None)
    assert [(entry["task"], "SIGKILL" in entry["after"]) for entry in summary["restarts"]] == [("all", True)] * 2
    assert [entry["attempt"] for entry in summary["tasks"]] == [2, 2]


def test_the_last_failure_ends_the_run_when_no_restart_is_left(tmp_path):
    ended = run("--workers", 1, "--max-restarts", 1, script(tmp_path, "die()"))
    assert ended.code == 137, ended
    assert ended.err.count("started again") == 1, ended
    assert "the task is started again in 1 s (restart 1 of 1)" in ended.words
    assert "failed: worker 0 was first" in ended.words
    assert "  again: 1 made, as many as --max-restarts allows" in ended.words


@pytest.mark.parametrize(
    ("line", "code", "is_retried"),
    [
        ("raise ValueError('bad shape')", 1, False),
        ("sys.exit(3)", 3, False),
        ("sys.exit(42)", 42, True),
        ("sys.exit(143)", 143, True),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, True),
        ("raise PeerLostError('worker 1 is gone', task='worker 1')", 1, True),
        ("raise WaitError('worker 1 did not come within 1 s')", 75, True),
        ("raise MeetingError('worker 1 did not come', timed_out=True)", 75, True),
    ],
)
def test_what_may_pass_is_tried_again_and_an_error_of_the_script_is_not(tmp_path, line, code, is_retried):
    path = script(tmp_path, f"if attempt == 0:\n    {line}\n")
    ended = run("--workers", 1, "--max-restarts", 1, path)
    assert ended.code == (0 if is_retried else code), ended
    assert ended.said_by("worker 0")[1:] != ([] if is_retried else [""]), ended
    assert ("started again in" in ended.words) == is_retried, ended
    assert ("again: 0 of 1 made, and none now: it would fail the same way" in ended.words) != is_retried, ended


def test_a_start_timeout_is_tried_again_and_its_line_names_who_was_missing(tmp_path):
    path = script(
        tmp_path,
        """
if me == "worker 1" and attempt == 0:
    forever()
process.report("phase", phase="strategy")
if attempt == 0:
    forever()
""",
    )
    ended = run("--workers", 2, "--max-restarts", 1, "--start-timeout", 0.5, path)
    assert ended.code == 0, ended
    line = next(line for line in ended.words.splitlines() if "started again in" in line)
    assert "the tasks did not meet within 0.5 s" in line
    assert "worker 1 runs, but has not called tfdist.create_strategy()" in line


def test_a_task_that_leaves_with_0_too_early_would_do_so_again(tmp_path):
    path = script(
        tmp_path,
        """
if me == "worker 1":
    mark("left")
    sys.exit(0)
wait("left")
raise PeerLostError("worker 1 left with code 0", task="worker 1")
""",
    )
    ended = run("--workers", 2, "--max-restarts", 3, path)
    assert ended.code == 1, ended
    assert "started again" not in ended.words, ended


def test_ctrl_c_ends_the_pause_before_a_restart(tmp_path):
    path = script(tmp_path, "mark(f'{me} {attempt}')\nwait('kill')\ndie()\n")
    with started("--workers", 1, "--max-restarts", 9, path) as launcher:
        pid = pid_of(tmp_path, "worker 0")
        (tmp_path / "kill").touch()
        read_until(launcher.stderr, "started again in 1 s")
        launcher.send_signal(signal.SIGINT)
        ended = finish(launcher)
    assert ended.code == 130, ended
    assert "SIGINT: no task runs, and none is started again" in ended.words, ended
    assert "failed" not in ended.words, ended
    assert not (tmp_path / "worker 0 1").exists()
    assert not is_alive(pid)


@pytest.mark.parametrize(
    "body", ["connect()\n", "process.report('phase', phase='strategy')\nmark(f'{me} {attempt}')\n"]
)
def test_ctrl_c_ends_tasks_that_were_started_again(tmp_path, body):
    path = script(tmp_path, f"{body}if attempt == 0:\n    wait('worker 1 0')\n    die()\nforever()\n")
    with started("--workers", 2, "--max-restarts", 9, path) as launcher:
        pids = [pid_of(tmp_path, "worker 0", 1), pid_of(tmp_path, "worker 1", 1)]
        launcher.send_signal(signal.SIGINT)
        ended = finish(launcher)
    assert ended.code == 130, ended
    assert "failed" not in ended.words, ended
    assert not any(map(is_alive, pids))


def test_ctrl_c_while_a_failure_is_cleared_away_ends_the_run(tmp_path):
    path = script(
        tmp_path,
        """
signal.signal(signal.SIGTERM, lambda *_: mark("asked"))
mark(f"{me} {attempt}")
if me == "worker 1":
    wait("worker 0 0")
    die()
forever()
""",
    )
    with started("--workers", 2, "--max-restarts", 9, path) as launcher:
        pid = pid_of(tmp_path, "worker 0")
        wait_for((tmp_path / "asked").exists, "the other to be asked to end")
        launcher.send_signal(signal.SIGINT)
        ended = finish(launcher)
    assert ended.code == 137, ended
    assert "again: 0 of 9 made, and none now: the run was asked to end" in ended.words, ended
    assert not is_alive(pid)


def test_what_is_asked_to_end_is_not_started_again(tmp_path):
    path = script(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\nconnect()\nforever()\n")
    with started("--workers", 1, "--max-restarts", 9, path) as launcher:
        pid_of(tmp_path, "worker 0")
        launcher.send_signal(signal.SIGTERM)
        ended = finish(launcher)
    assert ended.code == 42, ended
    assert "started again" not in ended.err, ended


def test_nothing_of_an_attempt_reaches_the_next(tmp_path):
    """Its children are gone, its ports are free, and what it said of its failure is forgotten."""
    path = script(
        tmp_path,
        """
import socket, subprocess
host, port = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][0].split(":")
ours = socket.socket()
ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
ours.bind((host, int(port)))
ours.listen()
if attempt == 0:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[ours.fileno()])
    (here / "child").write_text(str(child.pid))
    raise PeerLostError("worker 1 is gone", task="worker 1")
socket.create_connection((host, int(port)), timeout=5).close()
ours.settimeout(5)
ours.accept()
print("ours")
if attempt == 1:
    os._exit(75)
die()
""",
    )
    ended = run("--workers", 1, "--max-restarts", 2, path)
    assert ended.code == 137, ended
    assert ended.said_by("worker 0").count("ours") == 2, ended
    assert not is_alive(int((tmp_path / "child").read_text()))
    assert "PeerLostError" not in ended.words.partition("failed:")[2], ended


# -- parameter servers

SERVE = """
connect()
if me != "chief 0":
    wait("go")
"""


def ps_cluster(folder, body, *flags, workers=2):
    return started("--workers", workers, "--ps", 1, *flags, script(folder, SERVE + body))


def test_training_goes_on_without_a_worker_that_died(tmp_path):
    with ps_cluster(tmp_path, "wait('go')\nprint('trained')\nforever() if me != 'chief 0' else None\n") as launcher:
        victim = pid_of(tmp_path, "worker 1")
        pid_of(tmp_path, "chief 0")
        os.kill(victim, signal.SIGKILL)
        said = read_until(launcher.stderr, "training goes on")
        (tmp_path / "go").touch()
        ended = finish(launcher)
    assert ended.code == 0, said + str(ended)
    assert re.search(
        rf"worker 1 \(pid {victim}\) was killed by SIGKILL \(.*\); training goes on with 1 worker$", said, re.M
    ), said
    assert "trained" in ended.said_by("chief 0")
    assert "failed" not in ended.words, ended


def test_a_worker_that_died_is_started_again_while_restarts_are_left(tmp_path):
    body = "wait('go')\nforever() if me != 'chief 0' else None\n"
    with ps_cluster(tmp_path, body, "--max-restarts", 2, "--log-dir", tmp_path / "logs") as launcher:
        pids = {pid_of(tmp_path, task) for task in ("chief 0", "worker 0", "ps 0")}
        said = ""
        for attempt in range(3):
            os.kill(pid_of(tmp_path, "worker 1", attempt), signal.SIGKILL)
            said += read_until(launcher.stderr, "training goes on" if attempt == 2 else "it is started again")
        assert all(map(is_alive, pids))
        (tmp_path / "go").touch()
        ended = finish(launcher)
    assert ended.code == 0, said + str(ended)
    assert "it is started again (restart 1 of 2)" in said
    assert "it is started again (restart 2 of 2)" in said
    assert [line.split()[1] for line in ended.said_by("worker 1")] == ["0", "1", "2"]
    assert "was killed by SIGKILL" in ended.said_by("worker 1")[1]
    assert ended.said_by("worker 0") == ["attempt 0 after "]
    summary = json.loads((tmp_path / "logs" / "summary.json").read_text())
    assert [entry["task"] for entry in summary["restarts"]] == ["worker 1", "worker 1"]
    assert {entry["task"]: entry["attempt"] for entry in summary["tasks"]}["worker 1"] == 2


def test_the_loss_of_all_workers_ends_the_run_and_names_the_first(tmp_path):
    with ps_cluster(tmp_path, "forever()\n") as launcher:
        pid_of(tmp_path, "chief 0")
        os.kill(pid_of(tmp_path, "worker 1"), signal.SIGTERM)
        read_until(launcher.stderr, "was killed by SIGTERM; training goes on with 1 worker")
        os.kill(pid_of(tmp_path, "worker 0"), signal.SIGKILL)
        ended = finish(launcher)
    assert ended.code == 143, ended
    assert "failed: worker 1 was first" in ended.words, ended
    assert "worker 0 ended with killed by SIGKILL" in ended.words, ended


@pytest.mark.parametrize(
    ("raised", "code", "blamed"),
    [
        ("ValueError('bad shape')", 1, "chief 0"),
        ("PeerLostError('no worker is left; worker 1 is gone', task='worker 1')", 137, "worker 1"),
    ],
    ids=["of its own", "for want of a worker"],
)
def test_who_is_to_blame_where_a_chief_fails_long_after_a_worker(raised, code, blamed, tmp_path):
    with ps_cluster(tmp_path, f"wait('fail')\nraise {raised}\n", "--max-restarts", 0) as launcher:
        pid_of(tmp_path, "chief 0")
        os.kill(pid_of(tmp_path, "worker 1"), signal.SIGKILL)
        read_until(launcher.stderr, "training goes on with 1 worker")
        (tmp_path / "fail").touch()
        ended = finish(launcher)
    assert ended.code == code, ended
    assert f"failed: {blamed} was first" in ended.words, ended
    assert ("ValueError: bad shape" in ended.words) == (blamed == "chief 0"), ended


def test_a_worker_that_dies_before_all_have_met_fails_the_run(tmp_path):
    path = script(tmp_path, "process.report('phase', phase='strategy')\ndie() if me == 'worker 1' else forever()\n")
    ended = run("--workers", 2, "--ps", 1, path)
    assert ended.code == 137, ended
    assert "failed: worker 1 was first" in ended.words, ended


@pytest.mark.parametrize("victim", ["ps 0", "chief 0"])
def test_the_loss_of_a_ps_or_the_chief_starts_all_tasks_again(tmp_path, victim):
    with ps_cluster(
        tmp_path, "forever() if attempt == 0 or me != 'chief 0' else None\n", "--max-restarts", 1
    ) as launcher:
        pids = [pid_of(tmp_path, task) for task in ("worker 0", "worker 1", "chief 0", "ps 0")]
        os.kill(pid_of(tmp_path, victim), signal.SIGKILL)
        ended = finish(launcher)
    assert ended.code == 0, ended
    assert "all 4 tasks are started again in 1 s (restart 1 of 1)" in ended.words, ended
    assert not any(map(is_alive, pids))


def test_a_task_that_the_chief_calls_lost_is_killed_and_started_again(tmp_path):
    body = """
if me == "chief 0":
    wait("hang")
    process.report("lost", task="ps 7", why="there is none")
    process.report("lost", task="worker 1", why="worker 1 has been silent for 30 s")
    wait("worker 1 1")
else:
    forever()
"""
    with ps_cluster(tmp_path, body, "--max-restarts", 1) as launcher:
        hung = pid_of(tmp_path, "worker 1")
        os.kill(hung, signal.SIGSTOP)
        (tmp_path / "go").touch()
        (tmp_path / "hang").touch()
        ended = finish(launcher)
    assert ended.code == 0, ended
    line = f"worker 1 (pid {hung}) was given up and killed: worker 1 has been silent for 30 s; it is started again"
    assert line in ended.words, ended
    assert not is_alive(hung)


def test_a_worker_that_can_not_come_back_is_done_without(tmp_path):
    path = script(
        tmp_path,
        """
if attempt == 1:
    raise MeetingError("chief 0 let nobody in")
if attempt == 2:
    raise ValueError("the script has changed")
connect()
if me == "chief 0":
    wait("go")
else:
    forever()
""",
    )
    with started("--workers", 2, "--ps", 1, "--max-restarts", 5, path) as launcher:
        pid_of(tmp_path, "chief 0")
        os.kill(pid_of(tmp_path, "worker 1"), signal.SIGKILL)
        said = read_until(launcher.stderr, "training goes on")
        (tmp_path / "go").touch()
        ended = finish(launcher)
    assert ended.code == 0, said + str(ended)
    assert "failed: MeetingError: chief 0 let nobody in; it is started again (restart 2 of 5)" in said, said
    assert "failed: ValueError: the script has changed; training goes on with 1 worker" in said, said


def test_workers_that_die_when_the_chief_is_done_do_not_count(tmp_path):
    body = """
if me == "chief 0":
    process.report("bye", code=0)
    mark("bye")
    wait("dead")
else:
    wait("bye")
    mark("dead")
    die()
"""
    with ps_cluster(tmp_path, body, "--max-restarts", 5) as launcher:
        (tmp_path / "go").touch()
        ended = finish(launcher)
    assert ended.code == 0, ended
    assert "started again" not in ended.err, ended
    assert "training goes on" not in ended.err, ended


# -- training

ROWS, BATCH_SIZE, EPOCHS = 400, 4, 5
STEPS = ROWS // BATCH_SIZE
# Steps that two workers may have been given when one of them dies are made again.
IN_FLIGHT = 4
TRAIN = f"""
    import os, pathlib, sys, time
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    import keras, numpy as np, tfdist

    strategy = tfdist.create_strategy()
    from counting import TwoCounts

    here, attempt = pathlib.Path(__file__).parent, int(os.environ["TFDIST_ATTEMPT"])
    x = np.random.default_rng(0).normal(size=({ROWS}, 6)).astype("float32")
    y = np.arange({ROWS}, dtype="float32")[:, None]

    class Tell(keras.callbacks.Callback):
        def pause(self, word):
            print(word, flush=True)
            (here / f"at {{word}}").touch()
            while attempt == 0 and not (here / f"after {{word}}").exists():
                time.sleep(0.01)

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if self.epoch == 1 and batch == 9:
                self.pause("step 9")

        def on_epoch_end(self, epoch, logs=None):
            print("epoch", epoch, logs["two_counts"], int(self.model.optimizer.iterations), flush=True)
            if epoch == 2:
                self.pause("epoch 2")

    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16), keras.layers.Dense(1)])
        model.compile("sgd", "mae", metrics=[TwoCounts()])
    callbacks = [tfdist.callbacks.Checkpoint(here / "run"), Tell()]
    model.fit(x, y, batch_size={BATCH_SIZE}, epochs={EPOCHS}, verbose=0, callbacks=callbacks)
"""
TRAINING_S = 240  # on a loaded machine four tasks take minutes to import TensorFlow


def train(folder, *flags, ps=1, **env):
    return started("--workers", 2, "--ps", ps, "--log-dir", folder / "logs", *flags, write(folder, TRAIN), env=env)


def pids_at(folder, launcher, word):
    """Waits until the chief has come to a word, where it stays; returns the tasks' pids."""
    wait_for(lambda: (folder / f"at {word}").exists() or launcher.poll() is not None, word, TRAINING_S)
    assert launcher.poll() is None, finish(launcher)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    environs = {int(pid): Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in children}
    configs = {pid: next((v for v in values if v.startswith(b"TF_CONFIG=")), None) for pid, values in environs.items()}
    tasks = {pid: json.loads(config[10:])["task"] for pid, config in configs.items() if config is not None}
    return {f"{task['type']} {task['index']}": pid for pid, task in tasks.items()}


def assert_counted(ended, losses=0, chief="chief 0"):
    """The epochs of the whole training were made once, with each row once, and steps only where one was under way."""
    found = re.findall(r"^epoch (\d+) ([\d.]+) (\d+)$", "\n".join(ended.said_by(chief)), re.MULTILINE)
    assert [int(epoch) for epoch, _, _ in found] == list(range(EPOCHS)), ended
    for epoch, shown, iterations in found:
        assert float(shown) == pytest.approx(ROWS + sum(range(ROWS)) / 1000, abs=1e-3), ended
        made = (int(epoch) + 1) * STEPS
        assert made <= int(iterations) <= made + losses * IN_FLIGHT, ended


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_fit_goes_on_without_a_worker_that_is_killed(tmp_path):
    with train(tmp_path) as launcher:
        victim = pids_at(tmp_path, launcher, "step 9")["worker 1"]
        os.kill(victim, signal.SIGKILL)
        said = read_until(launcher.stderr, f"worker 1 (pid {victim}) was killed by SIGKILL")
        for word in ("step 9", "epoch 2"):
            (tmp_path / f"after {word}").touch()
        ended = finish(launcher, deadline_s=TRAINING_S)
    assert ended.code == 0, said + str(ended)
    assert said.endswith("; training goes on with 1 worker\n"), said
    assert "failed" not in ended.words, ended
    assert_counted(ended, losses=1)


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_a_hung_worker_comes_back_and_a_lost_ps_costs_what_was_not_saved(tmp_path):
    with train(tmp_path, "--max-restarts", 2, TFDIST_HEARTBEAT_TIMEOUT_S="10") as launcher:
        hung = pids_at(tmp_path, launcher, "step 9")["worker 1"]
        os.kill(hung, signal.SIGSTOP)
        (tmp_path / "after step 9").touch()
        said = read_until(launcher.stderr, "it is started again (restart 1 of 2)")
        assert f"worker 1 (pid {hung}) was given up and killed: worker 1 has been silent for 1" in said
        said += read_until(launcher.stderr, "worker 1 is back: 2 workers")
        pids = pids_at(tmp_path, launcher, "epoch 2")
        os.kill(pids["ps 0"], signal.SIGKILL)
        ended = finish(launcher, deadline_s=TRAINING_S)
    assert ended.code == 0, said + str(ended)
    assert re.search(
        r"ps 0 \(pid \d+\) was killed .*; all 4 tasks are started again in 1 s \(restart 2 of 2\)", ended.err
    )
    assert "failed" not in ended.words, ended
    assert not any(map(is_alive, [hung, *pids.values()]))
    assert_counted(ended, losses=1)
    summary = json.loads((tmp_path / "logs" / "summary.json").read_text())
    assert [restart["task"] for restart in summary["restarts"]] == ["worker 1", "all"]


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_a_worker_that_hangs_while_the_chief_traces_is_to_blame_and_not_the_chief(tmp_path):
    """TensorFlow holds the chief's GIL while it tells the hung worker of a function: no heart of the chief's beats."""
    evaluate = """
    Tell.pause(None, "trained")
    print("rows", model.evaluate(x, y, batch_size=4, return_dict=True, verbose=0)["two_counts"], flush=True)
"""
    text = TRAIN.replace(f"epochs={EPOCHS}", "epochs=1") + evaluate
    flags = ("--workers", 2, "--ps", 1, write(tmp_path, text))
    with started(*flags, env={"TFDIST_HEARTBEAT_TIMEOUT_S": "6"}) as launcher:
        hung = pids_at(tmp_path, launcher, "trained")["worker 1"]
        os.kill(hung, signal.SIGSTOP)
        (tmp_path / "after trained").touch()
        ended = finish(launcher, deadline_s=TRAINING_S)
    assert ended.code == 0, ended
    assert f"worker 1 (pid {hung}) was given up and killed: worker 1 has been silent" in ended.err, ended
    assert float(ended.said_by("chief 0")[-1].split()[1]) == pytest.approx(ROWS + sum(range(ROWS)) / 1000, abs=1e-3)


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_workers_that_train_in_step_go_on_together_after_one_is_killed(tmp_path):
    with train(tmp_path, "--max-restarts", 1, ps=0) as launcher:
        (tmp_path / "after step 9").touch()
        pids = pids_at(tmp_path, launcher, "epoch 2")
        os.kill(pids["worker 1"], signal.SIGKILL)
        ended = finish(launcher, deadline_s=TRAINING_S)
    assert ended.code == 0, ended
    assert "all 2 tasks are started again in 1 s (restart 1 of 1)" in ended.words, ended
    assert not any(map(is_alive, pids.values()))
    assert_counted(ended, chief="worker 0")
