"""How a run ends: exit codes, who is to blame, signals, and that nothing stays."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from launching import environment, finish, is_alive, pids_in, run, started, wait_for, write

# What each script sees first: which task it is, and a way to wait for another task's mark.
HEAD = """
import json, os, pathlib, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
me, here = (task["type"], task["index"]), pathlib.Path(__file__).parent
def mark(name):
    (here / name).touch()
def wait(name):
    while not (here / name).exists():
        time.sleep(0.01)
def forever():
    mark(f"{os.getpid()}.pid")
    while True:
        time.sleep(1)
"""


def script(folder, body):
    return write(folder, HEAD + body)


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("pass", 0, ""),
        ("sys.exit(3)", 3, "exit code 3"),
        ("sys.exit('no data')", 1, "no data"),
        ("raise ValueError('bad shape')", 1, "ValueError: bad shape"),
        ("os._exit(7)", 7, "exit code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL (out of memory?)"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "killed by SIGTERM"),
        ("import ctypes; ctypes.string_at(0)", 139, "killed by SIGSEGV"),
        ("sys.exit(42)", 42, "exit code 42"),
        ("def f(: pass", 1, "SyntaxError"),
    ],
)
def test_the_exit_code_of_one_task_is_that_of_the_run(tmp_path, line, code, words):
    ended = run("--workers", 1, write(tmp_path, f"import os, signal, sys\n{line}\n"))
    assert ended.code == code, ended
    assert words in ended.words, ended


def test_a_failure_is_told_once_with_task_host_pid_and_traceback(tmp_path):
    path = script(
        tmp_path,
        """
print("pid", os.getpid())
if me == ("worker", 1):
    def convert(x):
        raise ValueError(f"bad shape {x}")
    convert(3)
forever()
""",
    )
    ended = run("--workers", 3, path)
    assert ended.code == 1, ended
    pid = ended.said_by("worker 1")[0].split()[1]
    assert f"{path} failed: worker 1 was first" in ended.words
    assert f"host {socket.gethostname()}, pid {pid}" in ended.words
    assert 'raise ValueError(f"bad shape {x}")' in ended.words
    assert ended.err.count("ValueError: bad shape 3") == 1, ended
    assert "process.py" not in ended.err, ended
    assert ended.seconds < 10


def test_what_a_task_wrote_before_its_failure_is_shown(tmp_path):
    path = script(
        tmp_path,
        """
print("last words", file=sys.stderr)
sys.stderr.write("and a rest")
raise ValueError("bad shape")
""",
    )
    logs = tmp_path / "logs"
    ended = run("--workers", 1, "--log-dir", logs, path)
    shown = [line for line in ended.err.splitlines() if line.startswith("[")]
    assert shown == ["[worker 0] last words", "[worker 0] and a rest"], ended
    assert ended.words.count("ValueError: bad shape") == 1
    assert "ValueError: bad shape" in (logs / "worker-0.log").read_text()
    assert "\x1b" not in ended.err + (logs / "worker-0.log").read_text()


def test_a_task_that_dies_of_the_loss_of_another_is_not_blamed(tmp_path):
    path = script(
        tmp_path,
        """
from tfdist.errors import PeerLostError
if me[1] == 1:
    mark("ready")
    wait("0")
    wait("2")
    os.kill(os.getpid(), signal.SIGKILL)
wait("ready")
mark(str(me[1]))
raise PeerLostError("worker 1 is gone", task="worker 1")
""",
    )
    ended = run("--workers", 3, path)
    assert ended.code == 137, ended
    assert "failed: worker 1 was first" in ended.words, ended
    assert "PeerLostError" not in ended.err, ended


def test_a_task_that_left_with_0_too_early_is_blamed(tmp_path):
    path = script(
        tmp_path,
        """
from tfdist.errors import PeerLostError
if me[1] == 1:
    mark("left")
    sys.exit(0)
wait("left")
raise PeerLostError("worker 1 left at step 5 with code 0", task="worker 1")
""",
    )
    ended = run("--workers", 2, path)
    assert ended.code == 1, ended
    assert "failed: worker 1 was first" in ended.words, ended
    assert "left with exit code 0" in ended.words, ended
    assert "worker 1 left at step 5 with code 0" in ended.words, ended


def test_a_loss_that_nobody_died_of_is_told_as_the_teller_saw_it(tmp_path):
    path = script(
        tmp_path,
        """
from tfdist.errors import PeerLostError
if me[1] == 0:
    raise PeerLostError("worker 1 has been silent for 30 s", task="worker 1")
forever()
""",
    )
    ended = run("--workers", 2, path)
    assert ended.code == 1, ended
    assert "worker 1 has been silent for 30 s" in ended.words, ended


def test_a_wait_in_vain_ends_with_75_and_shows_where_the_others_are(tmp_path):
    path = script(
        tmp_path,
        """
from tfdist.errors import WaitError
if me[1] == 0:
    wait("asleep")
    raise WaitError("worker 1 did not come within 1 s to step 7")
def dream():
    mark("asleep")
    forever()
dream()
""",
    )
    ended = run("--workers", 2, path)
    assert ended.code == 75, ended
    assert "worker 1 did not come within 1 s to step 7" in ended.words, ended
    assert re.search(r"^\[worker 1\] .* in dream$", ended.err, re.MULTILINE), ended


def test_a_task_that_ends_with_0_before_the_others_is_no_failure(tmp_path):
    path = script(
        tmp_path,
        """
if me[1] == 1:
    mark("done")
else:
    wait("done")
""",
    )
    assert run("--workers", 2, path).code == 0


STUBBORN = """
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
forever()
"""
POLITE = "forever()\n"


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)],
)
def test_a_signal_ends_all_tasks(tmp_path, number, code):
    with started("--workers", 2, script(tmp_path, POLITE)) as launcher:
        pids = pids_in(tmp_path, 2)
        launcher.send_signal(number)
        ended = finish(launcher)
    assert ended.code == code, ended
    assert ended.seconds < 3, ended
    assert not any(map(is_alive, pids))
    assert "Traceback" not in ended.err, ended


def test_tasks_that_ignore_signals_are_killed_after_the_shutdown_timeout(tmp_path):
    with started("--workers", 2, "--shutdown-timeout", 1, script(tmp_path, STUBBORN)) as launcher:
        pids = pids_in(tmp_path, 2)
        launcher.send_signal(signal.SIGTERM)
        ended = finish(launcher)
    assert ended.code == 143, ended
    assert 0.9 < ended.seconds < 5, ended
    assert "did not end within 1 s and is killed" in ended.words
    assert not any(map(is_alive, pids))


def test_a_second_ctrl_c_kills_at_once(tmp_path):
    with started("--workers", 2, "--shutdown-timeout", 30, script(tmp_path, STUBBORN)) as launcher:
        pids_in(tmp_path, 2)
        launcher.send_signal(signal.SIGINT)
        assert launcher.stderr is not None
        said = ""
        while "asked to end" not in said:
            said += launcher.stderr.readline()
        time.sleep(0.4)  # two within 0.3 s are one: a terminal and a tool may both pass it on
        launcher.send_signal(signal.SIGINT)
        ended = finish(launcher)
    assert ended.code == 130, ended
    assert ended.seconds < 5, ended


def test_tasks_that_save_on_sigterm_and_leave_with_42_make_it_42(tmp_path):
    path = script(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\nforever()\n")
    with started("--workers", 2, path) as launcher:
        pids_in(tmp_path, 2)
        launcher.send_signal(signal.SIGTERM)
        ended = finish(launcher)
    assert ended.code == 42, ended


GRANDCHILD = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
mark(f"{child.pid}.pid")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_is_left_when_the_launcher_is_killed(tmp_path):
    folder = tmp_path / "tmp"
    folder.mkdir()
    path = script(tmp_path, GRANDCHILD + STUBBORN)
    with started("--workers", 2, path, env={"TMPDIR": str(folder)}) as launcher:
        pids = pids_in(tmp_path, 4)
        launcher.kill()
        wait_for(lambda: not any(map(is_alive, pids)), "all processes to be gone", 5)
        wait_for(lambda: not list(folder.iterdir()), "the run's folder to be gone", 5)


@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit(1)", "forever()"])
def test_children_of_tasks_end_with_them(tmp_path, end):
    with started("--workers", 1, script(tmp_path, GRANDCHILD + end)) as launcher:
        pids = pids_in(tmp_path, 2 if end == "forever()" else 1)
        if end == "forever()":
            launcher.send_signal(signal.SIGTERM)
        ended = finish(launcher)
    assert not any(map(is_alive, pids)), ended


def test_ports_and_the_private_folder_are_free_after_the_end(tmp_path):
    folder = tmp_path / "tmp"
    folder.mkdir()
    path = script(
        tmp_path,
        """
cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
print(*cluster["worker"])
run_dir = pathlib.Path(os.environ["TFDIST_RUN_DIR"])
print(oct(run_dir.stat().st_mode)[-3:], oct((run_dir / "secret").stat().st_mode)[-3:])
print(len((run_dir / "secret").read_text().strip()))
""",
    )
    ended = run("--workers", 2, path, env={"TMPDIR": str(folder)})
    addresses, modes, digits = ended.said_by("worker 0")
    assert (modes, digits) == ("700 600", "64")
    assert not list(folder.iterdir())
    for address in addresses.split():
        host, port = address.split(":")
        with socket.socket() as probe:
            probe.bind((host, int(port)))


def test_ports_are_held_until_their_task_takes_them(tmp_path):
    path = script(
        tmp_path,
        """
import socket
address = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][me[1]]
host, port = address.split(":")
stranger = socket.socket()
try:
    stranger.bind((host, int(port)))
except OSError:
    print("held")
ours = socket.socket(socket.AF_INET6)
ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
ours.bind(("::", int(port)))
ours.listen()
socket.create_connection((host, int(port)), timeout=5).close()
ours.accept()
print("ours")
""",
    )
    ended = run("--workers", 2, path)
    assert ended.said_by("worker 0") == ended.said_by("worker 1") == ["held", "ours"], ended


def test_parameter_servers_and_workers_end_when_the_chief_is_done(tmp_path):
    path = script(
        tmp_path,
        """
if me[0] == "chief":
    while len(list(here.glob("*.pid"))) < 2:
        time.sleep(0.01)
    print("trained")
else:
    forever()
""",
    )
    ended = run("--workers", 1, "--ps", 1, path)
    assert ended.code == 0, ended
    assert ended.said_by("chief 0") == ["trained"]
    assert "failed" not in ended.err, ended


def test_a_failed_worker_of_a_ps_cluster_fails_the_run(tmp_path):
    path = script(
        tmp_path,
        """
if me[0] == "ps":
    sys.exit(9)
forever()
""",
    )
    ended = run("--workers", 1, "--ps", 1, path)
    assert ended.code == 9, ended
    assert "failed: ps 0 was first" in ended.words


MEETING = """
from tfdist import process
if me[1] == 0:
    process.report("phase", phase="strategy")
    process.report("phase", phase="waiting", **{"for": "worker 1 at 127.0.0.1:1"})
    forever()
"""


def test_a_task_that_never_asks_for_the_cluster_is_named_after_the_start_timeout(tmp_path):
    ended = run("--workers", 2, "--start-timeout", 0.5, script(tmp_path, MEETING + "forever()\n"))
    assert ended.code == 75, ended
    assert "worker 1 runs, but has not called tfdist.create_strategy()" in ended.words, ended
    assert "worker 0 waits for worker 1 at 127.0.0.1:1" in ended.words, ended
    assert ended.seconds < 8


def test_a_task_that_ends_before_the_start_is_named_at_once(tmp_path):
    ended = run("--workers", 2, script(tmp_path, MEETING))
    assert ended.code == 1, ended
    assert "failed: worker 1 was first" in ended.words, ended
    assert ended.seconds < 8


def test_the_start_timeout_is_over_when_all_have_met(tmp_path):
    path = script(
        tmp_path,
        """
from tfdist import process
process.report("phase", phase="strategy")
process.report("phase", phase="connected")
time.sleep(2.5)
""",
    )
    assert run("--workers", 2, "--start-timeout", 0.5, path).code == 0


def test_copies_that_made_no_strategy_are_told_loudly(tmp_path):
    ended = run("--workers", 2, script(tmp_path, "print('trained')\n"))
    assert ended.code == 0, ended
    assert "2 independent copies of" in ended.words, ended
    assert "tfdist.create_strategy()" in ended.words


@pytest.mark.parametrize("line", ["process.report('phase', phase='connected')", ""])
def test_copies_are_not_told_where_there_are_none(tmp_path, line):
    workers = 2 if line else 1
    ended = run("--workers", workers, script(tmp_path, f"from tfdist import process\n{line}\n"))
    assert "independent copies" not in ended.err, ended


def test_the_summary_has_each_task(tmp_path):
    path = script(
        tmp_path,
        """
from tfdist import process
process.report("step", step=12)
if me[1] == 1:
    wait("ready")
    os.kill(os.getpid(), signal.SIGKILL)
mark("ready")
forever()
""",
    )
    logs = tmp_path / "logs"
    ended = run("--workers", 2, "--log-dir", logs, path)
    summary = json.loads((logs / "summary.json").read_text())
    assert (summary["exit_code"], summary["first_failure"]) == (137, "worker 1"), ended
    first, second = summary["tasks"]
    assert (first["task"], first["stopped"], first["last_step"]) == ("worker 0", True, 12)
    assert (second["code"], second["signal"], second["stopped"]) == (-9, "SIGKILL", False)
    assert os.getpid() not in (first["pid"], second["pid"])


def test_a_reader_that_goes_away_ends_the_run(tmp_path):
    path = script(tmp_path, "while True:\n    print('x' * 100)\n")
    with started("--workers", 2, path) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        launcher.stdout.close()
        launcher.stdout = None
        ended = finish(launcher)
    assert ended.code == 141, ended
    assert ended.seconds < 8


def test_a_reader_that_stalls_does_not_stop_the_run_from_ending(tmp_path):
    path = script(tmp_path, "mark(f'{os.getpid()}.pid')\nwhile True:\n    print('x' * 100)\n")
    with started("--workers", 2, "--shutdown-timeout", 1, path) as launcher:
        pids = pids_in(tmp_path, 2)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(15) == 143
    assert not any(map(is_alive, pids))


def test_closed_standard_streams_are_no_trouble(tmp_path):
    path = script(tmp_path, "print('x')\nmark('ran')\n")
    command = f'"{sys.executable}" -m tfdist.run "{path}" <&- >&- 2>&-'
    code = subprocess.run(["sh", "-c", command], env=environment(), timeout=30, check=False).returncode
    assert (code, (tmp_path / "ran").exists()) == (0, True)
