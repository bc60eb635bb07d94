"""Functions and scripts of a test on real tasks: results and exceptions as themselves, an end to everything.

The functions that run on tasks stand in this file, as a user's would. Those without a strategy need no TensorFlow.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from launching import environment, is_alive, pids_in, wait_for, write

import tfdist
from tfdist.errors import ParityError, TaskFailedError, TaskTimeoutError, TravelError
from tfdist.testing import assert_parity, local_cluster


class Odd(Exception):
    """Made from other arguments than it holds."""

    def __init__(self, reason, *, rows):
        super().__init__(f"{reason} on {len(rows)} rows")
        self.rows = rows


def index():
    return tfdist.resolve().training_index


def describe(values, *, scale):
    return {"task": str(tfdist.resolve().task), "values": values * scale, "folder": Path.cwd()}


def process_id():
    return os.getpid()


def note_process(folder):
    """Leaves a file that says that the task runs, and waits for longer than any test."""
    (folder / f"{os.getpid()}.pid").touch()
    time.sleep(300)


def fail_on_worker_1(folder):
    print("worker", index(), "says this", flush=True)
    if index() == 1:
        wait_for(lambda: list(folder.glob("*.pid")), "worker 0 to run")
        raise Odd("wrong", rows=np.arange(3))
    note_process(folder)


def fail_or_wait_in_a_barrier(strategy):
    if index() == 1:
        raise KeyError("what worker 1 lacks")
    tfdist.barrier("never")


def die_on_worker_1():
    if index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)


def return_on_worker_0():
    if index() == 1:
        stay_here()


def stay_here():
    time.sleep(300)


def skip():
    pytest.skip("no such device")


def leave():
    sys.exit("early")


def leave_at_once():
    os._exit(0)


def return_something_else():
    return {"model": [object()]}


def pid_and_numbers(strategy, rows):
    import keras

    numbers = keras.random.normal((rows,))
    return os.getpid(), strategy.num_replicas_in_sync, numbers, np.random.random(2), tfdist.all_reduce(1)


def train(strategy, rows):
    import keras

    x = np.random.default_rng(3).normal(size=(rows, 4)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
        model.compile("adam", "mse", jit_compile=False)
    history = model.fit(x, x[:, :1], batch_size=13, epochs=2, shuffle=False, verbose=0)
    result = {**history.history, "weights": model.get_weights(), "outputs": model(x[:3])}
    if rows < 30:
        # Goes with the number of tasks, as a mistake would.
        result["wrong"] = np.full(3, strategy.num_replicas_in_sync)
    return result


def train_through_servers(strategy):
    import keras

    x = np.random.default_rng(3).normal(size=(60, 4)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
        model.compile("adam", "mse", jit_compile=False)
    model.fit(x, x[:, :1], batch_size=10, epochs=3, verbose=0)
    devices = {variable.value.device.partition("/replica")[0] for variable in model.trainable_variables}
    tasks = {re.search(r"/task:(\d+)", variable.value.device)[1] for variable in model.trainable_variables}
    return {"pid": os.getpid(), "iterations": int(model.optimizer.iterations), "on": (devices, tasks)}


def train_through_processes():
    """The workers and ps serve in create_strategy."""
    strategy = tfdist.create_strategy()
    return str(tfdist.resolve().task), train_through_servers(strategy)["iterations"]


def fail_on_the_chief():
    fail_under(tfdist.create_strategy(), "not so")


def fail_under(strategy, words):
    raise Odd(words, rows=[type(strategy).__name__])


@pytest.fixture(scope="module")
def together():
    """Two tasks with a strategy, for several tests."""
    with local_cluster(workers=2, strategy="synchronous") as cluster:
        yield cluster


# -- functions


def test_arguments_and_results_are_themselves_in_the_order_of_tasks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with local_cluster(workers=2, chief=True) as cluster:
        results = cluster.run(describe, np.arange(3, dtype="float32"), scale=2)
    assert (
        [result["task"] for result in results] == ["chief 0", "worker 0", "worker 1"] == list(map(str, cluster.tasks))
    )
    for result in results:
        assert result["folder"] == tmp_path
        assert result["values"].dtype == "float32"
        assert result["values"].tolist() == [0, 2, 4]


def test_without_a_strategy_every_run_has_fresh_processes():
    with local_cluster(workers=1) as cluster:
        first, second = cluster.run(process_id), cluster.run(process_id)
    assert first != second
    assert not any(map(is_alive, first + second))


def test_with_a_strategy_all_functions_run_in_the_same_processes_from_the_same_seed(together):
    first, second = together.run(pid_and_numbers, 3), together.run(pid_and_numbers, 3)
    for one, other in zip(first, second, strict=True):
        assert one[0] == other[0]
        assert one[1] == one[4] == 2
        assert one[2].tolist() == other[2].tolist() == first[0][2].tolist()
        assert one[3].tolist() == other[3].tolist() == first[0][3].tolist()
    assert first[0][0] != first[1][0]


def test_the_exception_of_the_task_that_failed_first_is_raised_and_fresh_tasks_follow(together):
    (before, *_), _ = together.run(pid_and_numbers, 3)
    with pytest.raises(KeyError, match="what worker 1 lacks"):
        together.run(fail_or_wait_in_a_barrier)
    assert not is_alive(before)
    results = together.run(pid_and_numbers, 3)
    assert [result[4] for result in results] == [2, 2]


def test_an_argument_that_can_not_be_sent_leaves_the_tasks_as_they_are(together):
    before = [result[0] for result in together.run(pid_and_numbers, 3)]
    with pytest.raises(TravelError, match=r"argument 0 of pid_and_numbers\(\)"):
        together.run(pid_and_numbers, object())
    assert [result[0] for result in together.run(pid_and_numbers, 3)] == before


# -- failures


def test_an_exception_comes_as_itself_with_its_traceback_and_what_all_tasks_wrote(tmp_path):
    with local_cluster(workers=2) as cluster, pytest.raises(Odd, match="wrong on 3 rows") as caught:
        cluster.run(fail_on_worker_1, tmp_path)
    assert caught.value.rows.tolist() == [0, 1, 2]
    report = caught.value.__cause__
    assert isinstance(report, TaskFailedError)
    assert (report.task, report.code) == ("worker 1", 1)
    text = str(report)
    assert text.startswith("fail_on_worker_1() failed: worker 1 was first (exit code 1)")
    assert re.search(r"test_testing.py\", line \d+, in fail_on_worker_1\n", text)
    assert text.count("Traceback") == 1
    assert text.index("worker 0 says this") < text.index("worker 1 says this")
    assert "tfdist/testing/task.py" not in text


def test_a_task_that_is_killed_is_named_with_the_signal():
    with local_cluster(workers=2) as cluster, pytest.raises(TaskFailedError, match="killed by SIGKILL") as caught:
        cluster.run(die_on_worker_1)
    assert caught.value.task == "worker 1"


def test_what_takes_too_long_is_an_error_that_says_where_each_task_is():
    with local_cluster(workers=2, timeout_s=3) as cluster, pytest.raises(TaskTimeoutError) as caught:
        cluster.run(return_on_worker_0)
    text = str(caught.value)
    assert text.startswith("return_on_worker_0() took longer than 3 s: worker 0 returned, worker 1 did not\n")
    assert re.search(r"worker 1 wrote\n.*\n.*test_testing.py\", line \d+ in stay_here\n", text)


OTHER_ENDS = {
    "a skip": (skip, pytest.skip.Exception, "no such device"),
    "sys.exit": (leave, RuntimeError, r"the function called sys.exit\('early'\)"),
    "os._exit": (leave_at_once, TaskFailedError, r"ended with exit code 0 before it returned \(os\._exit\?\)"),
    "a result that can not be sent": (
        return_something_else,
        TravelError,
        r"the result of return_something_else\['model'\]\[0\] is an object",
    ),
}


@pytest.mark.parametrize("name", OTHER_ENDS)
def test_other_ends_of_a_function_are_errors_of_the_test(name):
    function, error, message = OTHER_ENDS[name]
    with local_cluster(workers=1) as cluster, pytest.raises(error, match=message):
        cluster.run(function)


# -- parameter servers


def test_functions_train_through_servers_in_a_process_of_their_own_which_is_the_chief():
    with local_cluster(workers=2, ps=2, strategy=True) as cluster:
        assert [str(task) for task in cluster.tasks] == ["chief 0", "worker 0", "worker 1", "ps 0", "ps 1"]
        (first,), (second,) = cluster.run(train_through_servers), cluster.run(train_through_servers)
        assert first["pid"] == second["pid"] != os.getpid()
        for result in (first, second):
            assert result["iterations"] == 3 * 6
            assert result["on"] == ({"/job:ps"}, {"0", "1"})
        with pytest.raises(Odd, match="not so on 1 rows") as caught:
            cluster.run(fail_under, "not so")
        assert caught.value.rows == ["ParameterServerStrategyV2"]
        assert re.search(r"chief 0 was first \(exit code 1\)\n(.*\n)*.*, in fail_under\n", str(caught.value.__cause__))
        assert not is_alive(first["pid"])
        (after,) = cluster.run(train_through_servers)
        assert after["pid"] != first["pid"]
        assert after["iterations"] == 3 * 6
    assert not is_alive(after["pid"])


def test_without_a_strategy_the_servers_are_processes_and_the_chief_s_result_is_the_only_one():
    with local_cluster(workers=1, ps=1) as cluster:
        assert cluster.run(train_through_processes) == [("chief 0", 3 * 6)]
        with pytest.raises(Odd, match="not so on 1 rows") as caught:
            cluster.run(fail_on_the_chief)
        assert caught.value.__cause__.task == "chief 0"


# -- scripts

SCRIPT = """
    import sys, tfdist
    task = tfdist.resolve().task
    print(task, *sys.argv[1:])
    print("aside", file=sys.stderr)
    if sys.argv[-1] == "fail" and str(task) == "worker 1":
        raise LookupError("nothing here")
"""


def test_a_script_returns_how_it_ended_as_each_task(tmp_path):
    script = write(tmp_path, SCRIPT)
    with local_cluster(workers=1, chief=True) as cluster:
        results = cluster.run_script(script, "--epochs", 2)
    assert [(str(result.task), result.code) for result in results] == [("chief 0", 0), ("worker 0", 0)]
    for result in results:
        assert result.out == f"{result.task} --epochs 2\n"
        assert set(result.log.splitlines()) == {f"{result.task} --epochs 2", "aside"}


def test_a_script_runs_with_parameter_servers(tmp_path):
    with local_cluster(workers=1, ps=1) as cluster:
        chief, *others = cluster.run_script(write(tmp_path, SCRIPT))
    assert chief.code == 0
    assert [str(result.task) for result in others] == ["worker 0", "ps 0"]


def test_a_script_that_fails_is_an_error_or_where_asked_a_result(tmp_path):
    script = write(tmp_path, SCRIPT)
    with local_cluster(workers=2) as cluster:
        with pytest.raises(TaskFailedError, match=r"script.py failed: worker 1 was first \(exit code 1\)") as caught:
            cluster.run_script(script, "fail")
        results = cluster.run_script(script, "fail", check=False)
    assert "LookupError: nothing here" in str(caught.value)
    assert results[1].code == 1


# -- nothing stays

USES_CLUSTER = """
    import sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from test_testing import note_process
    from tfdist.testing import local_cluster

    if __name__ == "__main__":
        with local_cluster(workers=2, env={{"TMPDIR": {folder!r}}}) as cluster:
            cluster.run(note_process, Path({folder!r}))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)])
def test_nothing_stays_when_the_test_is_interrupted_or_killed(number, code, tmp_path):
    script = write(tmp_path, USES_CLUSTER.format(tests=str(Path(__file__).parent), folder=str(tmp_path)))
    test = subprocess.Popen(
        [sys.executable, script],
        env=environment({"TMPDIR": str(tmp_path)}),
        stderr=subprocess.PIPE,
        text=True,
        # pytest may run in the background, where Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        tasks = pids_in(tmp_path, 2)
        test.send_signal(number)
        _, err = test.communicate(timeout=20)
    finally:
        test.kill()
    assert test.returncode == code, err
    wait_for(lambda: not any(map(is_alive, tasks)), "the tasks to end")
    wait_for(lambda: not list(tmp_path.glob("tfdist-*")), "the folders to go")


def test_a_script_that_starts_a_cluster_when_it_is_imported_is_told_so(tmp_path):
    script = write(
        tmp_path,
        """
        from tfdist.testing import local_cluster

        def f():
            pass

        with local_cluster(workers=1) as cluster:
            cluster.run(f)
        """,
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=40, env=environment())
    assert 'under `if __name__ == "__main__":`' in ended.stderr.splitlines()[-1]


# -- parity


def test_a_training_that_gives_the_same_passes():
    assert_parity(train, 40, workers=1)


def test_what_differs_is_shown_and_nothing_else():
    with pytest.raises(ParityError) as caught:
        assert_parity(train, 20, workers=2, strategy="synchronous")
    heading, _, *rows, hint = str(caught.value).splitlines()
    assert "pass shuffle=False to fit" in hint
    assert heading == "train gives other numbers on several workers than in one process"
    assert [row.split() for row in rows] == [
        ["2", "worker", "0", "wrong", "1.0e+00"],
        ["2", "worker", "1", "wrong", "1.0e+00"],
    ]


# -- the plugin, in a project of its own

PROJECT = {
    "pytest.ini": """
        [pytest]
        addopts = --strict-markers
        filterwarnings = error
    """,
    "tests/helper.py": "SIZE = 3",
    "tests/test_mine.py": """
        import os
        import sys
        import time

        import pytest
        from helper import SIZE

        LOADED = {name.partition(".")[0] for name in sys.modules}

        def task():
            import tfdist
            return str(tfdist.resolve().task), SIZE

        def pid(strategy):
            return os.getpid()

        def forever():
            time.sleep(300)

        def boom():
            raise ZeroDivisionError("in a task")

        def test_pytest_has_loaded_nothing_heavy():
            assert not LOADED & {"tensorflow", "keras", "numpy"}
            assert "tfdist.testing.plugin" in sys.modules

        def test_two_workers(tfdist_cluster):
            assert tfdist_cluster.run(task) == [("worker 0", 3), ("worker 1", 3)]

        @pytest.mark.parametrize("tfdist_cluster", [1, {"workers": 1, "chief": True}], indirect=True)
        def test_parameters(tfdist_cluster):
            assert len(tfdist_cluster.run(task)) == len(tfdist_cluster.tasks)

        PIDS = []

        @pytest.mark.tfdist_cluster(1, strategy="synchronous")
        @pytest.mark.parametrize("time", [1, 2])
        def test_the_same_cluster_twice(tfdist_cluster, time):
            PIDS.append(tfdist_cluster.run(pid))
            assert PIDS[0] == PIDS[-1]

        @pytest.mark.tfdist_deadline(1)
        @pytest.mark.tfdist_cluster(1)
        def test_deadline(tfdist_cluster):
            tfdist_cluster.run(forever)

        @pytest.mark.tfdist_cluster(1)
        def test_failing(tfdist_cluster):
            tfdist_cluster.run(boom)
    """,
    "tests/test_servers.py": """
        import os

        import keras
        import numpy as np
        import pytest
        import tensorflow as tf
        from tfdist.testing import local_cluster

        X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")

        def train(strategy, epochs=2):
            with strategy.scope():
                model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
                model.compile("adam", "mse", jit_compile=False)
            model.fit(X, X[:, :1], batch_size=8, epochs=epochs, verbose=0)
            return int(model.optimizer.iterations), os.getpid()

        def train_plainly():
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
            model.compile("adam", "mse")
            logs = model.fit(X, X[:, :1], epochs=2, verbose=0).history
            return model, np.concatenate([*map(np.ravel, model.get_weights()), logs["loss"]])

        @pytest.fixture(scope="module")
        def before():
            "What this process has and is before the first cluster."
            model, numbers = train_plainly()
            return model, model.predict(X, verbose=0), numbers, state()

        def state():
            return {
                "threads": len(os.listdir("/proc/self/task")),
                "files": len(os.listdir("/proc/self/fd")),
                "devices": [device.name for device in tf.config.list_logical_devices()],
                "strategy": type(tf.distribute.get_strategy()).__name__,
                "TF_CONFIG": os.environ.get("TF_CONFIG"),
            }

        PIDS = []

        @pytest.mark.tfdist_cluster(workers=2, ps=2, strategy=True)
        @pytest.mark.parametrize("epochs", [1, 3])
        def test_the_fixture_trains_through_the_same_servers(before, tfdist_cluster, epochs):
            ((steps, pid),) = tfdist_cluster.run(train, epochs)
            PIDS.append(pid)
            assert steps == 8 * epochs
            assert PIDS[0] == pid != os.getpid()

        def test_two_clusters_at_once(before):
            arguments = {"workers": 1, "ps": 1, "strategy": {"seed": 3, "step_timeout_s": 30}}
            with local_cluster(**arguments) as one, local_cluster(**arguments) as other:
                ((first, here),), ((second, there),) = one.run(train), other.run(train)
            assert first == second == 16
            assert len({here, there, *PIDS}) == 3

        def test_this_process_is_as_before(before, _tfdist_kept):
            model, predictions, numbers, was = before
            _tfdist_kept.close()
            assert state() == was
            np.testing.assert_array_equal(model.predict(X, verbose=0), predictions)
            np.testing.assert_array_equal(train_plainly()[1], numbers)
    """,
}


def pytest_in(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env=environment({"COLUMNS": "300"}),  # uncut lines
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    for name, text in PROJECT.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return folder


def test_another_project_gets_the_fixture_and_the_marks_without_asking(project):
    ended = pytest_in(project, "-q", "-rA", "tests/test_mine.py")
    failed = re.findall(r"^FAILED \S+::(\S+) - (.*)", ended.stdout, re.MULTILINE)
    assert [name for name, _ in failed] == ["test_deadline", "test_failing"], ended.stdout
    assert failed[0][1].startswith("tfdist.errors.TaskTimeoutError: forever() took longer than 1 s")
    assert failed[1][1] == "ZeroDivisionError: in a task"
    assert "boom() failed: worker 0 was first" in ended.stdout
    assert "6 passed" in ended.stdout.splitlines()[-1]


def test_another_project_gets_parameter_servers_and_its_own_process_stays_as_it_was(project):
    ended = pytest_in(project, "-q", "tests/test_servers.py")
    assert ended.stdout.splitlines()[-1].startswith("4 passed"), ended.stdout


def test_another_project_can_do_without(project):
    ended = pytest_in(project, "-p", "no:tfdist", "--fixtures", "tests/helper.py")
    assert "tfdist" not in ended.stdout


def test_the_marks_are_listed_with_what_they_are(project):
    marks = pytest_in(project, "--markers").stdout
    assert "@pytest.mark.tfdist_cluster(workers=2, **arguments): " in marks
    assert "@pytest.mark.tfdist_deadline(seconds): " in marks
