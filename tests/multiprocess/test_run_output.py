"""What comes out of a run: prefixes, whole lines, the live line, noise, log files."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from launching import DEADLINE_S, environment, run, write


def test_lines_of_many_tasks_are_whole_and_named(tmp_path):
    path = write(
        tmp_path,
        """
        import json, os, sys
        me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        for i in range(10_000):
            sys.stdout.write(f"{i} ")
            sys.stdout.write(str(me) * 50 + "\\n")
            if i % 10 == 0:
                sys.stderr.write(f"e{i} " + str(me) * 30 + "\\n")
        """,
    )
    ended = run("--workers", 3, path)
    for me in range(3):
        assert ended.said_by(f"worker {me}") == [f"{i} {str(me) * 50}" for i in range(10_000)]
        errors = [line for line in ended.err.splitlines() if line.startswith(f"[worker {me}] ")]
        assert errors == [f"[worker {me}] e{i} {str(me) * 30}" for i in range(0, 10_000, 10)]
    assert len(ended.out.splitlines()) == 30_000


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("sys.stdout.write('no end')", ["no end"]),
        ("sys.stdout.write('a\\nb'); sys.stdout.flush(); os._exit(0)", ["a", "b"]),
        ("print()", [""]),
        ("sys.stdout.buffer.write(b'\\xff\\xfe\\n')", ["\\xff\\xfe"]),
        ("print('grüße')", ["grüße"]),
        ("sys.stdout.write('one\\r\\ntwo\\r\\n')", ["one", "two"]),
        ("sys.stdout.write('10%\\r50%\\r100%\\n')", ["100%"]),
        ("print('x' * 300_000)", ["x" * 300_000]),
        ("sys.stdout.write('y' * 2_500_000)", ["y" * 1_048_576] * 2),
    ],
)
def test_lines_come_out_as_written(tmp_path, code, lines):
    ended = run("--workers", 1, write(tmp_path, f"import os, sys\n{code}\n"))
    assert ended.code == 0, ended.err
    said = ended.said_by("worker 0")
    if len(lines[0]) == 1_048_576:  # pieces may be a read longer than the limit, and nothing is lost
        assert "".join(said) == "y" * 2_500_000
        assert all(len(line) < 1_200_000 for line in said)
    else:
        assert said == lines


def test_stdout_and_stderr_stay_apart(tmp_path):
    ended = run("--workers", 1, write(tmp_path, "import sys\nprint('out')\nprint('err', file=sys.stderr)\n"))
    assert ended.out == "[worker 0] out\n"
    assert "[worker 0] err\n" in ended.err


NOISE = """
import sys
for line in (
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1796061556.847052    5383 port.cc:153] oneDNN custom operations are on.",
    "E0000 00:00:1796061562.368303    5383 cuda_platform.cc:52] failed call to cuInit: UNKNOWN ERROR (303)",
    "E0000 00:00:1796061562.368303    5383 executor.cc:52] out of coffee",
    "a word of the script",
):
    print(line, file=sys.stderr)
"""


def test_start_up_noise_is_left_out_on_the_console_and_kept_in_the_log(tmp_path):
    ended = run("--workers", 1, "--log-dir", tmp_path / "logs", write(tmp_path, NOISE))
    shown = [line for line in ended.err.splitlines() if line.startswith("[worker 0] ")]
    assert len(shown) == 2, ended
    assert "out of coffee" in shown[0]
    assert "a word of the script" in shown[1]
    assert len((tmp_path / "logs" / "worker-0.log").read_text().splitlines()) == 5


def test_raw_shows_the_noise(tmp_path):
    ended = run("--workers", 1, "--raw", write(tmp_path, NOISE))
    assert ended.err.count("[worker 0] ") == 5, ended


def test_each_task_has_a_log_file_with_all_it_wrote(tmp_path):
    path = write(
        tmp_path,
        """
        import json, os, sys
        me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        print("out", me)
        print("err", me, file=sys.stderr)
        """,
    )
    logs = tmp_path / "made" / "by us"
    assert run("--workers", 2, "--log-dir", logs, path).code == 0
    for me in range(2):
        assert sorted((logs / f"worker-{me}.log").read_text().splitlines()) == [f"err {me}", f"out {me}"]


# Behind a terminal


class Screen:
    """What a terminal of one screen would show of the bytes written to it: enough of one for our escapes."""

    def __init__(self) -> None:
        self.lines = [""]
        self.column = 0

    def feed(self, text: str) -> None:
        i = 0
        while i < len(text):
            if text.startswith("\x1b[K", i):
                self.lines[-1] = self.lines[-1][: self.column]
                i += 3
                continue
            character = text[i]
            i += 1
            if character == "\n":
                self.lines.append("")
            elif character == "\r":
                self.column = 0
            elif character == "\b":
                self.column = max(0, self.column - 1)
            else:
                line = self.lines[-1]
                self.lines[-1] = line[: self.column] + character + line[self.column + 1 :]
                self.column += 1


def run_in_terminal(*arguments, columns=100, until=None, then=None):
    """Runs the launcher in a terminal of its own; returns its exit code and all it wrote."""

    def take_terminal():
        # So that it gets the signals of keys and of a new size.
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    launcher = subprocess.Popen(
        [sys.executable, "-m", "tfdist.run", *map(str, arguments)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(),
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    data, deadline = b"", time.monotonic() + DEADLINE_S
    try:
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 0.1)[0]:
                continue
            try:
                more = os.read(ours, 65536)
            except OSError:
                break
            if not more:
                break
            data += more
            if until is not None and until in data:
                then(ours)
                until = None
        return launcher.wait(max(0.1, deadline - time.monotonic())), data.decode()
    finally:
        launcher.kill()
        os.close(ours)


PROGRESS = """
import json, os, pathlib, shutil, sys, time
me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
here = pathlib.Path(__file__).parent
def wait(name):
    while not (here / name).exists():
        time.sleep(0.01)
if me == 0:
    print("terminal", sys.stdout.isatty(), sys.stderr.isatty(), *shutil.get_terminal_size())
    previous = 0
    for step in range(1, 6):
        bar = f"step {step}/5 " + "=" * step
        sys.stdout.write("\\b" * previous + "\\r" + bar)
        previous = len(bar)
        sys.stdout.flush()
        (here / f"at{step}").touch()
        if step == 3:
            wait("said")
    sys.stdout.write("\\n")
else:
    print("terminal", sys.stdout.isatty(), sys.stderr.isatty())
    wait("at3")
    print("from the other task")
    time.sleep(0.2)
    (here / "said").touch()
"""


def test_the_chief_has_a_terminal_and_its_line_is_live_among_others(tmp_path):
    code, text = run_in_terminal("--workers", 2, write(tmp_path, PROGRESS))
    screen = Screen()
    screen.feed(text)
    lines = [line.rstrip() for line in screen.lines]
    assert code == 0, text
    assert "[worker 0] terminal True True 89 30" in lines, text
    assert "[worker 1] terminal False False" in lines, text
    assert "[worker 1] from the other task" in lines, text
    assert "[worker 0] step 5/5 =====" in lines, text
    # Shown while it grew, and again below the other's line.
    other = text.index("from the other task")
    assert "step 3/5 ===" in text[:other]
    assert "[worker 0] step 3/5 ===" in text[other:]
    assert not any("step" in line and "from" in line for line in lines), text


def test_without_a_terminal_or_with_no_pty_nobody_has_one(tmp_path):
    path = write(tmp_path, "import sys\nprint('terminal', sys.stdout.isatty(), sys.stderr.isatty())\n")
    assert run("--workers", 1, path).said_by("worker 0") == ["terminal False False"]
    _, text = run_in_terminal("--workers", 1, "--no-pty", path)
    assert "terminal False False" in text


def test_the_chief_has_a_terminal_again_after_a_restart(tmp_path):
    path = write(
        tmp_path,
        """
        import os, signal, sys
        attempt = os.environ["TFDIST_ATTEMPT"]
        print("attempt", attempt, sys.stdout.isatty())
        sys.stdout.write("step 1/5 ")
        sys.stdout.flush()
        if attempt == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.stdout.write("\\rstep 5/5 \\n")
        """,
    )
    code, text = run_in_terminal("--workers", 1, "--max-restarts", 1, path)
    screen = Screen()
    screen.feed(text)
    shown = [line.rstrip() for line in screen.lines]
    assert code == 0, text
    of_the_task = [line.removeprefix("[worker 0] ") for line in shown if line.startswith("[worker 0] ")]
    assert of_the_task == ["attempt 0 True", "step 1/5", "attempt 1 True", "step 5/5"], text
    assert any("is started again in 1 s" in line for line in shown), text


def test_the_chief_hears_of_a_new_window_size(tmp_path):
    path = write(
        tmp_path,
        """
        import os, time
        print("ready")
        while os.get_terminal_size(1).columns != 59:
            time.sleep(0.01)
        print("narrow")
        """,
    )

    def narrow(terminal):
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 70, 0, 0))

    code, text = run_in_terminal("--workers", 1, path, until=b"ready", then=narrow)
    assert code == 0, text
    assert "[worker 0] narrow" in text


def test_ctrl_c_typed_in_the_terminal_ends_the_run(tmp_path):
    path = write(tmp_path, "import time\nprint('ready')\ntime.sleep(600)\n")
    code, text = run_in_terminal(
        "--workers", 2, path, until=b"ready", then=lambda terminal: os.write(terminal, b"\x03")
    )
    assert code == 130, text
    assert "Traceback" not in text
