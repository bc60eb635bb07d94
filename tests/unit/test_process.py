"""What a task knows of itself, and how its script starts and ends."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from tfdist import failure, process
from tfdist.errors import MeetingError, PeerLostError, StrategyError, TFConfigError, WaitError
from tfdist.process import LaunchInfo


def config(job="worker", index=0, **jobs):
    return {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})}


TWO = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
PS = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, True),
        (config(**TWO), True),
        (config(index=1, **TWO), False),
        (config("chief", chief=["127.0.0.1:1"], worker=["127.0.0.1:2"]), True),
        (config(chief=["127.0.0.1:1"], worker=["127.0.0.1:2"]), False),
        (config("chief", **PS), True),
        (config("worker", **PS), False),
        (config("ps", **PS), False),
        (config("evaluator", **TWO), False),
    ],
)
def test_one_task_is_the_chief(environ, expected):
    assert process.is_chief(environ) is expected


def test_who_is_chief_can_not_be_said_of_a_broken_tf_config():
    with pytest.raises(TFConfigError):
        process.is_chief({"TF_CONFIG": "{"})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, LaunchInfo()),
        ({"TFDIST_LOCAL_INDEX": "2", "TFDIST_LOCAL_COUNT": "4"}, LaunchInfo(local_index=2, local_count=4)),
        ({"TFDIST_ATTEMPT": "1", "TFDIST_LAST_FAILURE": "worker 1"}, LaunchInfo(attempt=1, last_failure="worker 1")),
        ({"TFDIST_START_TIMEOUT_S": "1.5", "TFDIST_STEP_TIMEOUT_S": ""}, LaunchInfo(start_timeout_s=1.5)),
        ({"TFDIST_RUN_DIR": "/no/such"}, LaunchInfo(run_dir="/no/such")),
    ],
)
def test_the_launchers_words_are_all_optional(environ, expected):
    assert LaunchInfo.read(environ) == expected


def test_the_secret_is_read_from_the_private_folder(tmp_path):
    (tmp_path / "secret").write_text("ab12\n")
    assert LaunchInfo.read({"TFDIST_RUN_DIR": str(tmp_path)}).secret == b"ab12"


def test_a_launchers_word_that_is_no_number_is_an_error_with_its_name():
    with pytest.raises(StrategyError, match="TFDIST_LOCAL_INDEX must be a number, not 'x'"):
        LaunchInfo.read({"TFDIST_LOCAL_INDEX": "x"})


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


@pytest.mark.parametrize(
    ("value", "op", "expected"), [(3, "sum", 3), (3, "mean", 3.0), (2.5, "max", 2.5), (True, "sum", 1)]
)
def test_alone_a_number_reduces_to_itself(alone, value, op, expected):
    result = process.all_reduce(value, op)
    assert result == expected
    assert type(result) is type(expected)


def test_alone_an_array_reduces_to_its_copy(alone):
    np = pytest.importorskip("numpy")
    array = np.arange(3)
    result = process.all_reduce(array)
    array[0] = 9
    assert result.tolist() == [0, 1, 2]
    assert [item.tolist() for item in process.all_reduce([array, array])] == [[9, 1, 2], [9, 1, 2]]


def test_alone_a_barrier_is_passed(alone):
    process.barrier("here")


def test_an_unknown_operation_is_named(alone):
    with pytest.raises(ValueError, match="not 'product'"):
        process.all_reduce(1, op="product")


def test_tasks_that_have_not_met_are_told_how_to_meet(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config(**TWO)["TF_CONFIG"])
    with pytest.raises(StrategyError, match=r"call tfdist\.create_strategy\(\) before it"):
        process.barrier("here")


def chained(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("x"), 1),
        (PeerLostError("gone"), 1),
        (MeetingError("twice"), 1),
        (TimeoutError("of the script's own"), 1),
        (WaitError("late"), 75),
        (chained(RuntimeError("x"), WaitError("late")), 75),
        (MeetingError("nobody came", timed_out=True), 75),
    ],
)
def test_a_time_out_of_the_group_has_its_own_exit_code(error, code):
    assert failure.exit_code(error) == code


@contextlib.contextmanager
def unconfigured_logging():
    """Logging as in a fresh script; within a test, since pytest brings handlers of its own to each."""
    root, ours = logging.getLogger(), logging.getLogger("tfdist")
    kept = root.handlers, ours.handlers, ours.level
    root.handlers, ours.handlers = [], []
    ours.setLevel(logging.NOTSET)
    try:
        yield ours
    finally:
        root.handlers, ours.handlers = kept[:2]
        ours.setLevel(kept[2])


def log_decision_and_warning():
    logging.getLogger("tfdist.strategy").info("decided")
    logging.getLogger("tfdist.strategy").warning("waiting")


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({}, "tfdist: decided\ntfdist: waiting\n"),
        (config(**TWO), "tfdist: decided\ntfdist: waiting\n"),
        (config(index=1, **TWO), "tfdist: waiting\n"),
        ({"TF_CONFIG": "{"}, "tfdist: waiting\n"),
    ],
)
def test_the_chief_shows_decisions_and_every_task_its_warnings_once(environ, shown, capsys):
    with unconfigured_logging():
        process.show_decisions(environ)
        process.show_decisions(environ)
        log_decision_and_warning()
    assert capsys.readouterr().err == shown


def test_a_level_that_the_script_set_stays(capsys):
    with unconfigured_logging() as ours:
        ours.setLevel(logging.ERROR)
        process.show_decisions({})
        log_decision_and_warning()
    assert capsys.readouterr().err == ""


def test_a_script_that_configured_logging_gets_no_second_handler():
    with unconfigured_logging() as ours:
        logging.getLogger().addHandler(logging.NullHandler())
        process.show_decisions({})
        assert ours.handlers == []


def test_a_script_that_configures_logging_later_is_left_to_show_the_lines(capsys):
    with unconfigured_logging():
        process.show_decisions({})
        logging.getLogger().addHandler(logging.NullHandler())
        log_decision_and_warning()
    assert capsys.readouterr().err == ""


def test_words_without_a_launcher_are_lost_in_silence(monkeypatch):
    monkeypatch.delenv("TFDIST_RUN_DIR", raising=False)
    process.report("phase", phase="strategy")
    monkeypatch.setenv("TFDIST_RUN_DIR", "/no/such")
    process.report("phase", phase=object())


def test_words_reach_the_launcher_as_json_lines(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "control.sock"))
        listener.listen()
        listener.settimeout(20)
        code = (
            "from tfdist import process\n"
            "process.report('phase', phase='waiting', **{'for': 'worker 1'})\n"
            "for step in range(1000):\n"
            "    process.report('step', step=step)\n"
        )
        environ = {**os.environ, "TFDIST_RUN_DIR": str(tmp_path), "TFDIST_LOCAL_INDEX": "3", "TFDIST_ATTEMPT": "2"}
        child = subprocess.Popen([sys.executable, "-c", code], env=environ)
        connection, _ = listener.accept()
        connection.settimeout(20)
        with connection, connection.makefile() as lines:
            messages = [json.loads(line) for line in lines]
    assert child.wait(20) == 0
    assert messages[0] == {"kind": "hello", "task": "3", "attempt": "2", "pid": child.pid}
    assert messages[1] == {"kind": "phase", "phase": "waiting", "for": "worker 1"}
    # Steps may be many a millisecond; a few words suffice.
    assert messages[2] == {"kind": "step", "step": 0}
    assert len(messages) < 10


# The wrapper: each script does under `python -m tfdist.process` what it does under `python`.

SCRIPTS = {
    "who it is": "import sys; print(sys.argv, sys.path[0], __name__, __file__, __spec__, __package__, __doc__)",
    "docstring": "'''words'''\nprint(__doc__)",
    "code 0": "import sys; sys.exit()",
    "code 3": "import sys; sys.exit(3)",
    "code -1": "import sys; sys.exit(-1)",
    "code 256": "import sys; sys.exit(256)",
    "code None": "import sys; sys.exit(None)",
    "code text": "import sys; sys.exit('no data')",
    "code list": "import sys; sys.exit([1])",
    "quit": "quit(4)",
    "exception": "def f(x):\n    raise ValueError(x)\nf('bad')",
    "exception with a cause": "try:\n    1/0\nexcept Exception as e:\n    raise RuntimeError('x') from e",
    "syntax error": "def f(: pass",
    "no such import": "import no_such_module",
    "own excepthook": "import sys\nsys.excepthook = lambda *a: print('hook', a[1], flush=True)\n1/0",
    "atexit in order": "import atexit\natexit.register(print, 'first')\natexit.register(print, 'second')",
    "atexit after an error": "import atexit\natexit.register(print, 'cleaned')\n1/0",
    "no line end": "import sys; sys.stdout.write('rest')",
    "threads are joined": (
        "import threading, time\n"
        "def f():\n    time.sleep(0.2)\n    print('late')\n"
        "threading.Thread(target=f).start()\nprint('end')"
    ),
    "daemon threads are not": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=[60], daemon=True).start()\nprint('end')"
    ),
    "an executor's work is done": (
        "import concurrent.futures as c, time\n"
        "pool = c.ThreadPoolExecutor(1)\npool.submit(lambda: (time.sleep(0.2), print('late')))\nprint('end')"
    ),
    "names in threads after the end": (
        "import threading, time, pickle\n"
        "class A: pass\n"
        "def f():\n    time.sleep(0.2)\n    print(type(pickle.loads(pickle.dumps(A()))) is A)\n"
        "threading.Thread(target=f).start()"
    ),
    "multiprocessing spawn": (
        "import multiprocessing as m\n"
        "def f(x):\n    return x * 2\n"
        "if __name__ == '__main__':\n"
        "    with m.get_context('spawn').Pool(1) as pool:\n        print(pool.map(f, [1, 2]))"
    ),
    "dataclass in main": "import dataclasses, sys\n@dataclasses.dataclass\nclass A:\n    x: 'int' = 1\nprint(A())",
    "globals": "x = 1\ndef f():\n    global x\n    x += 1\nf()\nprint(x, sorted(k for k in globals() if k[0] != '_'))",
    "a module beside it": "import beside\nprint(beside.x)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "interrupted": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
    "encoding": "# -*- coding: latin-1 -*-\nprint(len('\xe9'))",
}


def outcome(arguments, folder):
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        timeout=60,
        check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith("TFDIST_")},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    return ended.returncode, ended.stdout.decode(), ended.stderr.decode()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_what_it_does_under_python(tmp_path, name):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPTS[name] + "\n", encoding="latin-1" if name == "encoding" else "utf-8")
    (folder / "beside.py").write_text("x = 7\n")
    ours = outcome(["-m", "tfdist.process", "code/script.py", "a", "--b"], tmp_path)
    assert ours == outcome(["code/script.py", "a", "--b"], tmp_path)


MODULE = "import sys\nprint(sys.argv, sys.path[0], __name__, __package__, __spec__.name, __file__)\n"


@pytest.mark.parametrize("name", ["pack", "pack.sub", "lone", "no_such", "pack.no_such", "empty"])
def test_a_module_does_what_it_does_under_python_m(tmp_path, name):
    (tmp_path / "pack").mkdir()
    (tmp_path / "empty").mkdir()
    for path in ("pack/__init__.py", "empty/__init__.py"):
        (tmp_path / path).write_text("")
    for path in ("pack/__main__.py", "pack/sub.py", "lone.py"):
        (tmp_path / path).write_text(MODULE)
    ours = outcome(["-m", "tfdist.process", "-m", name, "a", "--b"], tmp_path)
    pythons = outcome(["-m", name, "a", "--b"], tmp_path)
    assert ours[:2] == pythons[:2]
    assert bool(ours[2]) == bool(pythons[2])


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_a_folder_or_zip_file_runs_as_under_python(tmp_path, kind):
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "__main__.py").write_text("import sys, part\nprint(sys.argv, sys.path[0], __name__, part.x)\n")
    (folder / "part.py").write_text("x = 5\n")
    path = "app"
    if kind == "zip":
        import shutil

        path = os.path.basename(shutil.make_archive(str(tmp_path / "packed"), "zip", folder))
    assert outcome(["-m", "tfdist.process", path, "a"], tmp_path) == outcome([path, "a"], tmp_path)


def test_a_script_sees_one_copy_of_this_module(tmp_path):
    code = textwrap.dedent("""
        import gc, types, tfdist.process
        print(sum(isinstance(o, types.ModuleType) and o.__name__ == "tfdist.process" for o in gc.get_objects()))
    """)
    (tmp_path / "script.py").write_text(code)
    assert outcome(["-m", "tfdist.process", "script.py"], tmp_path)[1] == "1\n"


def test_stacks_are_dumped_on_sigusr1(tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, signal\ndef dream():\n    os.kill(os.getpid(), signal.SIGUSR1)\ndream()\nprint('alive')\n"
    )
    code, out, err = outcome(["-m", "tfdist.process", "script.py"], tmp_path)
    assert (code, out) == (0, "alive\n")
    assert "in dream" in err


def test_an_atexit_function_that_hangs_does_not_keep_a_failed_task(tmp_path):
    (tmp_path / "script.py").write_text("import atexit, time\natexit.register(time.sleep, 600)\n1/0\n")
    code, _, err = outcome(["-m", "tfdist.process", "script.py"], tmp_path)
    assert code == 1
    assert "ZeroDivisionError" in err
