"""Functions and scripts of a test -> what they return on the real tasks of a cluster on this host.

The launcher (`tfdist.launch`) runs in a child process and starts the tasks, as it does on a command line. Functions,
arguments, results and errors travel as files in a private folder (`values`, `functions`, `failures`); no code does.
A strategy with parameter servers needs one process alone, which is the chief and has the others' servers (`servers`).
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tfdist import process
from tfdist.cluster import Task
from tfdist.errors import LaunchError, UnsupportedError
from tfdist.launch.plan import Options
from tfdist.launch.rundir import make_run_dir, remove_run_dir
from tfdist.testing import functions, task
from tfdist.testing.launched import Launched
from tfdist.testing.started import END_TIMEOUT_S, Deadline, Started, failed, timed_out

TIMEOUT_S = 120.0
PLAIN = "plain"


@dataclass(frozen=True)
class ScriptResult:
    """How a script ended as one task.

    Attributes:
        task: Which task.
        code: Its exit code, -n for signal n; None where it is not known.
        out: What it wrote to stdout.
        log: What it wrote to stdout and stderr, in order.
    """

    task: Task
    code: int | None
    out: str
    log: str


def local_cluster(
    workers: int = 2,
    *,
    chief: bool = False,
    ps: int = 0,
    strategy: bool | str | Mapping[str, Any] = False,
    seed: int = 0,
    timeout_s: float = TIMEOUT_S,
    env: Mapping[str, str] | None = None,
) -> LocalCluster:
    """Returns a cluster of real processes on this host, which run functions and scripts for a test.

    Processes start with the first `run`, and all of them are gone after the `with`, however it ends. To import
    TensorFlow takes them some seconds; with `strategy` they pay that once for all functions.

    Args:
        workers: Number of worker tasks.
        chief: Whether a chief trains beside the workers.
        ps: Number of parameter servers. With any there is a chief, which runs the function and whose result is the
            only one. With `strategy` the servers of all workers and ps are in the chief's own process, on CPUs: that
            starts in the time of one process, and a training takes a second. Without, they are processes of their own.
        strategy: Without it every `run` has fresh processes, and the function calls `tfdist.create_strategy()` itself
            if it wants to. With True, a kind ("synchronous") or arguments of `create_strategy` each task makes that
            strategy once, and each function gets it as first argument; a function that fails ends the processes, and
            the next has fresh ones. With ps the arguments are `kind`, `seed` and `step_timeout_s`.
        seed: With `strategy`, what `keras.utils.set_random_seed` is given before each function.
        timeout_s: How long each `run` may take, with the start of the processes.
        env: Environment variables of the tasks, besides those that this process has when they start;
            {"CUDA_VISIBLE_DEVICES": ""} leaves the GPUs alone.

    Raises:
        LaunchError: There can be no such cluster.
        UnsupportedError: Arguments of a strategy that servers in one process can not follow, or a cluster inside a task
            of one.

    Example:
        def train(strategy, epochs):
            with strategy.scope():
                model = build()
                model.compile("adam", "mse")
            return model.fit(x, y, epochs=epochs, verbose=0).history

        def test_two_tasks_learn_the_same():
            with tfdist.testing.local_cluster(workers=2, strategy=True) as cluster:
                first, second = cluster.run(train, epochs=3)
                assert first == second

        def test_it_learns_through_parameter_servers():
            with tfdist.testing.local_cluster(workers=2, ps=2, strategy=True) as cluster:
                (logs,) = cluster.run(train, epochs=3)
                assert logs["loss"][-1] < logs["loss"][0]
    """
    return LocalCluster(workers=workers, chief=chief, ps=ps, strategy=strategy, seed=seed, timeout_s=timeout_s, env=env)


class LocalCluster:
    """What `local_cluster` returns.

    Attributes:
        tasks: The tasks: the chief, workers, parameter servers. Results are in this order; functions have those of
            tasks that train or, with parameter servers, of the chief alone.
        timeout_s: How long each `run` may take.
    """

    def __init__(
        self,
        *,
        workers: int,
        chief: bool = False,
        ps: int = 0,
        strategy: bool | str | Mapping[str, Any] = False,
        seed: int = 0,
        timeout_s: float = TIMEOUT_S,
        env: Mapping[str, str] | None = None,
    ) -> None:
        _refuse_inside_task()
        if not 0 < timeout_s < 1e9:
            raise LaunchError(f"timeout_s must be a number of seconds above 0, not {timeout_s!r}")
        self._options = Options(command=("-m", task.__name__), workers=workers, chief=chief, ps=ps)
        self._setup = _setup(strategy, seed)
        if ps and self._setup["strategy"] is not None:
            self._setup.update(_setup_of_servers(self._setup["strategy"], workers, ps))
        self.tasks = self._options.tasks
        self.timeout_s = timeout_s
        self._env = dict(env or {})
        self._folder: str | None = None
        self._started: Started | None = None
        self._starts = 0

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait_s=END_TIMEOUT_S if kind is None else 0.0)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(map(str, self.tasks))}>"

    # -- functions

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float | None = None, **named: Any
    ) -> list[Any]:
        """Returns what `function(*arguments, **named)` returns on each task, in the order of `tasks`.

        With `strategy` the function gets that as first argument, before these. With parameter servers the list has one
        item, what it returns on the chief. Without `strategy` the workers and ps call it too: they serve in its
        `create_strategy()`, and do not come back from there.

        A task imports the function's file, so it must stand at the top level of one: a file of tests will do; lambdas
        and functions in functions will not. Arguments and results are numbers, text, bytes, paths, arrays, and lists,
        tuples, sets and dicts of them; tensors and variables come back as NumPy arrays. The function runs in the
        working folder of this call. `assert` says more here than there: let it return what you ask about.

        Args:
            function: What to run.
            arguments: What to give it.
            timeout_s: How long it may take; by default the cluster's.
            named: What to give it by name.

        Raises:
            Exception: What the function raised in the task that failed first, where its type can be imported here; its
                `__cause__` is a TaskFailedError.
            TaskFailedError: A task failed otherwise. Its text holds what all tasks wrote.
            TaskTimeoutError: The tasks were not done in time. Its text says where each of them was.
            TravelError: The function, an argument or the result can not be sent; the message says what to do.
        """
        request = functions.make_request(function, arguments, named)
        deadline = Deadline(timeout_s or self.timeout_s)
        try:
            started = self._start()
            results = started.call(request, deadline)
            if self._setup["strategy"] is None:
                started.finish(f"{request['function']['name']}()")
        except BaseException:
            # Also a Ctrl-C: no test goes on with tasks that are nobody knows where.
            self._stop()
            raise
        return results

    def run_script(
        self, path: str | os.PathLike[str], *arguments: object, timeout_s: float | None = None, check: bool = True
    ) -> list[ScriptResult]:
        """Runs a script on each task, as `python -m tfdist.run` does, and returns how each ended.

        It has processes of its own, and makes its own strategy.

        Args:
            path: The script.
            arguments: Its arguments, as text.
            timeout_s: How long it may take; by default the cluster's.
            check: Whether a failure is an error; else the results tell.

        Raises:
            TaskFailedError: It failed. The text holds what all tasks wrote.
            TaskTimeoutError: It did not end in time.

        Example:
            results = cluster.run_script("train.py", "--epochs", 2)
            assert "accuracy" in results[0].out
        """
        if not os.path.exists(path):
            raise LaunchError(f"the script {os.fspath(path)!r} is not in {os.getcwd()!r}")
        command = (os.fspath(path), *map(str, arguments))
        deadline = Deadline(timeout_s or self.timeout_s)
        options = dataclasses.replace(self._options, command=command)
        launched = Launched(options, self._new_folder(), self._environ())
        try:
            if not launched.wait(deadline.at):
                raise timed_out(launched, command[0], deadline.timeout_s)
        finally:
            launched.stop()
        if check and launched.code != 0:
            raise failed(launched, command[0])
        ended = launched.summary.get("tasks", [])
        codes = {entry["task"]: entry["code"] for entry in ended}
        return [
            ScriptResult(task, codes.get(str(task)), _said_by(str(task), launched.out), launched.log(task))
            for task in self.tasks
        ]

    def close(self, *, wait_s: float = END_TIMEOUT_S) -> None:
        """Ends all processes and removes the cluster's folder; calling it again changes nothing.

        Args:
            wait_s: How long idle tasks may take to end by themselves, with what their functions registered for that.
        """
        try:
            self._stop(wait_s=wait_s)
        finally:
            if self._folder is not None:
                remove_run_dir(self._folder)
                self._folder = None

    def _start(self) -> Started:
        """Returns tasks that wait for a call, or are about to."""
        if self._started is None or self._started.launched.code is not None:
            self._stop()
            folder = self._new_folder()
            options = dataclasses.replace(self._options, command=(*self._options.command, folder))
            if self._setup["servers"] is not None:
                options = dataclasses.replace(options, chief=True, workers=0, ps=0)
            self._started = Started(options, self._setup, folder, self._environ())
        return self._started

    def _stop(self, *, wait_s: float = 0.0) -> None:
        started, self._started = self._started, None
        if started is not None:
            started.stop(wait_s=wait_s)

    def _new_folder(self) -> str:
        if self._folder is None:
            self._folder = make_run_dir()
        self._starts += 1
        folder = os.path.join(self._folder, str(self._starts))
        os.mkdir(folder)
        return folder

    def _environ(self) -> dict[str, str]:
        return {**os.environ, **self._env}


def _setup(strategy: bool | str | Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Returns what each task reads before the first call."""
    if strategy is False:
        return {"strategy": None, "seed": None, "servers": None}
    if isinstance(strategy, Mapping):
        strategy = dict(strategy)
    elif strategy != PLAIN:
        strategy = {} if strategy is True else {"kind": strategy}
    return {"strategy": strategy, "seed": seed, "servers": None}


def _setup_of_servers(arguments: Mapping[str, Any], workers: int, ps: int) -> dict[str, Any]:
    """Returns what one process reads that is to be the chief and have the servers of workers and ps."""
    arguments = {"kind": "parameter_server", "step_timeout_s": process.DEFAULT_STEP_TIMEOUT_S, **arguments}
    kind = arguments.pop("kind")
    if kind not in (None, "parameter_server"):
        raise UnsupportedError(f"a strategy of kind {kind!r} has no parameter servers: leave out ps={ps}, or the kind")
    for name in arguments.keys() - {"seed", "step_timeout_s"}:
        raise UnsupportedError(
            f"strategy={{{name!r}: ...}} with ps={ps}: servers in one process take seed and step_timeout_s alone. "
            "Leave out `strategy`, and let the function call tfdist.create_strategy(...): every task is a process then"
        )
    return {"strategy": arguments, "servers": {"workers": workers, "ps": ps}}


def _refuse_inside_task() -> None:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name == task.__name__:
        raise UnsupportedError(
            "a task of a local cluster starts another: it has imported the file of its function, and that starts one. "
            'Put what starts the cluster into a test, or under `if __name__ == "__main__":`'
        )


def _said_by(name: str, out: str) -> str:
    prefix = f"[{name}] "
    return "".join(line[len(prefix) :] for line in re.findall(r".*\n", out) if line.startswith(prefix))
