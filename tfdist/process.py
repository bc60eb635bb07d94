"""What a task knows of itself: its launcher, its cluster and group, and how it starts and ends.

Synopsis, inside a task:

    info = LaunchInfo.read(os.environ)      # what `tfdist.run` told this task; all of it optional
    set_current(Current(config, group))     # done once, by create_strategy
    is_chief(), barrier("data ready"), all_reduce(loss, op="mean")
    report("phase", phase="connected")      # one line to the launcher, if there is one

and as the program that starts a task's script: `python -m tfdist.process [-m] script args...`. The script runs as it
would under `python script args...`; around it stand a parent-death signal, stack dumps on SIGUSR1, a readable record
of its failure, and an end that does not wait for TensorFlow's teardown.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from tfdist import failure, script
from tfdist.control import QUIET_MARK, Control
from tfdist.errors import StrategyError, TfdistError

if TYPE_CHECKING:
    import numpy as np

    from tfdist.cluster import TFConfig
    from tfdist.collectives import Group

DEFAULT_STEP_TIMEOUT_S = 1800.0
# A dead task's atexit functions may clean up, but not keep its peers waiting.
ATEXIT_GRACE_S = 3.0


@dataclass(frozen=True)
class LaunchInfo:
    """What the launcher told this task; the defaults are those of a script started without it.

    Attributes:
        run_dir: Private folder of the job on this host, with `secret`, `control.sock` and the error files.
        secret: The job's secret, by which its tasks know each other.
        local_index: Which task of this host this is.
        local_count: How many tasks of the job run on this host.
        attempt: How many starts of this task there were before: 0, or more after a restart.
        last_failure: One line on what it is started again after.
        start_timeout_s: How long the tasks wait for each other at the start, where the launcher was told.
        step_timeout_s: How long a task waits for another in a step, where the launcher was told.
        heartbeat_timeout_s: Silence after which a task counts as lost: TFDIST_HEARTBEAT_TIMEOUT_S, which no flag sets.
    """

    run_dir: str | None = None
    secret: bytes | None = None
    local_index: int = 0
    local_count: int = 1
    attempt: int = 0
    last_failure: str = ""
    start_timeout_s: float | None = None
    step_timeout_s: float | None = None
    heartbeat_timeout_s: float | None = None

    @staticmethod
    def read(environ: Mapping[str, str]) -> LaunchInfo:
        """Returns what `environ` says of the launcher.

        Raises:
            StrategyError: A variable is not a number, or the secret can not be read.
        """
        run_dir = environ.get("TFDIST_RUN_DIR") or None
        return LaunchInfo(
            run_dir=run_dir,
            secret=_read_secret(run_dir),
            local_index=int(_number(environ, "TFDIST_LOCAL_INDEX") or 0),
            local_count=int(_number(environ, "TFDIST_LOCAL_COUNT") or 1),
            attempt=int(_number(environ, "TFDIST_ATTEMPT") or 0),
            last_failure=environ.get("TFDIST_LAST_FAILURE", ""),
            start_timeout_s=_number(environ, "TFDIST_START_TIMEOUT_S"),
            step_timeout_s=_number(environ, "TFDIST_STEP_TIMEOUT_S"),
            heartbeat_timeout_s=_number(environ, "TFDIST_HEARTBEAT_TIMEOUT_S"),
        )


def _number(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise StrategyError(f"{name} must be a number, not {text!r}; tfdist.run sets it, so unset it") from None


def _read_secret(run_dir: str | None) -> bytes | None:
    if run_dir is None:
        return None
    try:
        with open(os.path.join(run_dir, "secret"), "rb") as file:
            return file.read().strip() or None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StrategyError(f"TFDIST_RUN_DIR={run_dir!r}: the job's secret can not be read: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Who this task is


@dataclass(frozen=True)
class Current:
    """The one cluster and group of this process.

    Attributes:
        config: What TF_CONFIG said, or None without a cluster.
        group: The training tasks' group, or None in a task that does not train (or trains alone without one).
        presence: All tasks of a parameter-server cluster: it makes no collective calls, and tells who is still there.
        strategy: The newest strategy that create_strategy returned.
    """

    config: TFConfig | None = None
    group: Group | None = None
    presence: Group | None = None
    strategy: Any = None


_current: Current | None = None


def current() -> Current | None:
    """Returns this process's cluster and group, or None before `create_strategy`."""
    return _current


def set_current(value: Current | None) -> None:
    """Sets what `current()` returns; create_strategy does this once."""
    global _current
    _current = value


def is_chief(environ: Mapping[str, str] | None = None) -> bool:
    """Returns whether this task is the one that writes files and prints.

    True alone, for `chief`, for worker 0 where there is no chief, and for the coordinator of a parameter server
    cluster; false for every other task. Before `create_strategy` it answers from TF_CONFIG.

    Example:
        >>> tfdist.is_chief({})
        True
    """
    config = _config(environ)
    if config is None:
        return True
    if config.cluster.has_ps:
        return config.task.type == "chief"
    return config.is_chief


def barrier(name: str) -> None:
    """Returns when every training task has called it with the same name.

    Example:
        if tfdist.is_chief():
            prepare(folder)
        tfdist.barrier("folder is prepared")
    """
    group = _group("tfdist.barrier")
    if group is not None:
        group.barrier(f"barrier {name}")


def all_reduce(value: Any, op: str = "sum") -> Any:
    """Returns the sum (or "mean", "max", "min") of `value` over all training tasks, the same bits on each.

    Args:
        value: A number, an array, or a list or tuple of arrays; shapes and dtypes must agree on all tasks.
        op: "sum", "mean", "max" or "min".

    Returns:
        A number for a number, an array for an array, a list for a list or tuple.

    Example:
        rows = tfdist.all_reduce(len(my_rows))
    """
    if op not in ("sum", "mean", "max", "min"):
        raise ValueError(f"op must be 'sum', 'mean', 'max' or 'min', not {op!r}")
    group = _group("tfdist.all_reduce")
    if isinstance(value, (bool, int, float, complex)):
        return _all_reduce_number(group, value, op)
    import numpy as np

    if isinstance(value, (list, tuple)):
        arrays = [np.asarray(item) for item in value]
        return [array.copy() for array in arrays] if group is None else _reduced(group, arrays, op)
    array = np.asarray(value)
    return array.copy() if group is None else _reduced(group, [array], op)[0]


def _all_reduce_number(group: Group | None, value: complex, op: str) -> Any:
    # The mean of whole numbers is seldom whole, and the sum of booleans is a count.
    number = float(value) if op == "mean" and isinstance(value, int) else value
    if isinstance(number, bool):
        number = int(number)
    if group is None:
        return number
    import numpy as np

    return _reduced(group, [np.asarray(number)], op)[0].item()


def _reduced(group: Group, arrays: Sequence[np.ndarray[Any, Any]], op: Any) -> list[np.ndarray[Any, Any]]:
    return group.all_reduce(arrays, op=op, tag=f"tfdist.all_reduce {op}")


def _config(environ: Mapping[str, str] | None) -> TFConfig | None:
    if environ is None and _current is not None:
        return _current.config
    from tfdist import tf_config

    return tf_config.parse((os.environ if environ is None else environ).get("TF_CONFIG"))


def _group(caller: str) -> Group | None:
    if _current is not None and _current.group is not None:
        return _current.group
    config = _config(None)
    if config is None or len(config.cluster.training_tasks) <= 1:
        return None
    if _current is None:
        raise StrategyError(f"{caller} needs the tasks to have met: call tfdist.create_strategy() before it")
    raise StrategyError(f"{caller} is for training tasks, and {config.task} is none of them in this strategy")


# ---------------------------------------------------------------------------------------------------------------------
# Words to the launcher


_control = Control(os.environ)
_last_step: int | None = None


def report(kind: str, **fields: object) -> None:
    """Sends one line to the launcher, if there is one; never raises, never blocks for more than a moment.

    Args:
        kind: "phase" (with `phase`), "step" (with `step`; sent at most twice a second), "lost" (with the `task` that
            hangs and must be ended, and `why`), "error" or "bye".
        fields: What else the launcher should know, as plain values.
    """
    global _last_step
    with contextlib.suppress(Exception):
        if kind == "step":
            step = fields.get("step")
            _last_step = int(step) if isinstance(step, int) else _last_step
            if not _control.is_time_for_step():
                return
        _control.send({"kind": kind, **fields})


# ---------------------------------------------------------------------------------------------------------------------
# The end of a task

_exit_code: int | None = None  # known under our wrapper; a bare script's atexit functions are not told
_goodbye_said = False
_hooks_installed = False


def install_exit_hooks() -> None:
    """Makes this process say goodbye to its peers however its script ends; calling it again changes nothing.

    At a clean end the task waits for its peers' goodbyes, so that a quick task's end does not look like a failure to
    a slower one. At any other end it waits for nobody.
    """
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    atexit.register(_say_goodbye)
    # At an interactive prompt an error is not the end.
    if not hasattr(sys, "ps1") and not sys.flags.interactive:
        previous = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if isinstance(error, KeyboardInterrupt):
                _say_goodbye(128 + signal.SIGINT, "interrupted")
                previous(kind, error, trace)
            else:
                fail(error.with_traceback(trace), print_with=previous)

        sys.excepthook = excepthook


def fail(error: BaseException, *, print_with: Any = None) -> NoReturn:
    """Ends this process because of `error`: the one place where a task dies of an exception.

    Prints the traceback, records it for the launcher, tells the peers, lets atexit functions clean up for a moment,
    and leaves without TensorFlow's teardown, which takes up to half a minute and hides the message in noise.
    """
    code = failure.exit_code(error)
    error.__traceback__ = _trimmed(error.__traceback__)
    with contextlib.suppress(Exception):
        _record(error, code)
    _print_traceback(error, print_with)
    _say_goodbye(code, failure.one_line(error))
    _run_atexit_functions(limit_s=ATEXIT_GRACE_S, code=code)
    _leave_process(code)


def _say_goodbye(code: int | None = None, reason: str = "") -> None:
    global _goodbye_said
    if _goodbye_said:
        return
    _goodbye_said = True
    code = _exit_code if code is None else code
    report("bye", code=code, step=_last_step)
    group = None if _current is None else _current.group or _current.presence
    if group is None:
        return
    wait_s = 0.0
    if code in (0, None):
        try:
            told = LaunchInfo.read(os.environ).step_timeout_s
        except StrategyError:
            told = None
        wait_s = DEFAULT_STEP_TIMEOUT_S if told is None else told
    with contextlib.suppress(Exception):
        group.leave(code, reason, wait_s=wait_s)
        group.close()


def _record(error: BaseException, code: int) -> None:
    """Writes the error file that the launcher's report is made of, and says so over the control socket."""
    config = None if _current is None else _current.config
    task = None if config is None else str(config.task)
    record = failure.describe(error, task=task, code=code, step=_last_step)
    info = LaunchInfo.read(os.environ)
    if info.run_dir is not None:
        path = os.path.join(info.run_dir, f"error-{info.local_index}.json")
        with open(path + ".part", "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(path + ".part", path)
    report("error", **{name: value for name, value in record.items() if name != "traceback"})


def _print_traceback(error: BaseException, print_with: Any) -> None:
    trace = error.__traceback__
    if _control.connect():
        with contextlib.suppress(Exception):
            print(QUIET_MARK, file=sys.stderr, flush=True)
    try:
        (print_with or sys.__excepthook__)(type(error), error, trace)
    except Exception:
        traceback.print_exception(type(error), error, trace)


def _trimmed(trace: TracebackType | None) -> TracebackType | None:
    # Our own frames above the script are of no use to its author.
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, script.__file__):
        trace = trace.tb_next
    return trace


def _run_atexit_functions(*, limit_s: float | None, code: int) -> None:
    if limit_s is not None:
        timer = threading.Timer(limit_s, _leave_process, args=[code])
        timer.daemon = True
        timer.start()
    # No public name runs them, and leaving by os._exit skips them.
    atexit._run_exitfuncs()  # noqa: SLF001


def _leave_process(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


# ---------------------------------------------------------------------------------------------------------------------
# Words to the user


def show_decisions(environ: Mapping[str, str] | None = None) -> None:
    """Sends what tfdist decides to the chief's stderr, and every task's warnings to its own; once in a process.

    A script that configures logging itself has the say: its handlers and its level for "tfdist" are used instead.
    """
    import logging

    logger = logging.getLogger("tfdist")
    if logger.handlers or logging.getLogger().handlers:
        return

    class Handler(logging.StreamHandler):  # type: ignore[type-arg]
        def emit(self, record: logging.LogRecord) -> None:
            if not logging.getLogger().handlers or not logger.propagate:  # else the script's own show it
                super().emit(record)

    handler = Handler()
    handler.setFormatter(logging.Formatter("tfdist: %(message)s"))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        shown = logging.WARNING
        # A broken TF_CONFIG is told by the call that needs it.
        with contextlib.suppress(TfdistError):
            shown = logging.INFO if is_chief(environ) else logging.WARNING
        logger.setLevel(shown)


def keep_showing_decisions() -> None:
    """Shows them as before from now on, whatever handlers the root logger gets.

    TensorFlow's coordinator logs through absl, whose first line calls `logging.basicConfig()`: that is not the script.
    """
    import logging

    if not logging.getLogger().handlers:
        logging.getLogger("tfdist").propagate = False


# ---------------------------------------------------------------------------------------------------------------------
# The wrapper: python -m tfdist.process [-m] script args...


def main(argv: Sequence[str]) -> NoReturn:
    """Runs a script or, after `-m`, a module as `__main__`, as the task that the environment describes."""
    _die_with_parent()
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    show_decisions()
    try:
        # From this greeting on the launcher passes a Ctrl-C to us.
        if os.environ.get("TFDIST_RUN_DIR") and not _control.connect():
            # The launcher died before the parent-death signal was armed.
            os._exit(128 + signal.SIGTERM)
        code = script.run(argv)
        global _exit_code
        _exit_code = code
        # Joins threads as the interpreter does at its end; executors' threads end only by this call.
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
        if code != 0:
            _say_goodbye(code)
        _run_atexit_functions(limit_s=None, code=code)
        _say_goodbye(code)
    except KeyboardInterrupt as error:
        _die_of_interrupt(error)
    except BaseException as error:
        hook = sys.excepthook
        fail(error, print_with=None if getattr(hook, "__module__", "") == __name__ else hook)
    _leave_process(code)


def _die_of_interrupt(error: KeyboardInterrupt) -> None:
    # As Python itself: the traceback, then death by the signal, so that a parent sees what happened.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    error.__traceback__ = _trimmed(error.__traceback__)
    _print_traceback(error, None)
    _say_goodbye(128 + signal.SIGINT, "interrupted")
    _run_atexit_functions(limit_s=ATEXIT_GRACE_S, code=128 + signal.SIGINT)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os.kill(os.getpid(), signal.SIGINT)


def _die_with_parent() -> None:
    """Asks Linux to kill this process when the launcher's thread that started it dies; a no-op elsewhere."""
    if sys.platform != "linux" or not os.environ.get("TFDIST_RUN_DIR"):
        return
    import ctypes

    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL), 0, 0, 0)


if __name__ == "__main__":
    # The script must find this module's state under its real name, not in a second copy called __main__.
    from tfdist.process import main as _main

    _main(sys.argv[1:])
