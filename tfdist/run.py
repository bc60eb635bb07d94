"""Starts a training script as the tasks of a cluster on this host, and ends when they end.

Usage by case
-------------
Two workers that train one model (the script calls `tfdist.create_strategy()`):

    python -m tfdist.run --workers 2 train.py --epochs 5

A module instead of a file, one log file per task:

    python -m tfdist.run --workers 2 --log-dir logs -m my_project.train

One worker for each GPU of this host, which is also what happens without --workers:

    python -m tfdist.run --workers gpu train.py

Several hosts: on each of them, with a TF_CONFIG that has one entry per host and says which one this is, the same line
starts this host's share of the cluster, one task per GPU:

    python -m tfdist.run train.py
    python -m tfdist.run --tasks-per-host 4 train.py

A chief that trains beside the workers; parameter servers, with a chief that coordinates:

    python -m tfdist.run --workers 2 --chief train.py
    python -m tfdist.run --workers 2 --ps 1 train.py

A task beside them that evaluates the checkpoints of `tfdist.callbacks.Checkpoint` as they come (`tfdist.evaluator`):

    python -m tfdist.run --workers 2 --evaluator train.py

Started again after a failure that may pass (with a `tfdist.callbacks.Checkpoint`, from the last saved epoch on):

    python -m tfdist.run --workers 2 --max-restarts 3 train.py

Our own flags stand before the script; everything after it is the script's.

Definitions
-----------
cluster     all tasks of a run with their addresses
task        one process, named by its job and its index there: worker 0, worker 1, ps 0
chief       the task that writes files: `chief`, or worker 0 where there is none
evaluator   a task that stands outside the cluster: `fit` in it trains nothing

Several hosts
-------------
With {"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}} and K tasks per host, host a
runs workers 0 .. K-1 at ports 2222 .. 2222+K-1 and host b, whose TF_CONFIG has index 1, workers K .. 2K-1. K is the
number of the host's GPUs, or 1 without, or what --tasks-per-host says. Every host must come to the same K, for they do
not ask each other: where they differ, the tasks do not meet and say which cluster each believes in.

Only tasks that train are split. A chief that trains stays the chief, and the other tasks of its host are the first
workers. A ps, an evaluator and the chief of a parameter-server cluster stay one task each; the evaluator has a GPU.
A TF_CONFIG with several entries for one host has one for each task already: K is then 1, and each has its own GPU.
Without a TF_CONFIG, --tasks-per-host means --workers; --workers, --ps, --chief and --evaluator ask for a cluster of
this host alone. (Beside a cluster of several hosts the evaluator is one more task, with a TF_CONFIG of that type.)

What a task gets
----------------
Each task runs the script in this folder, with this environment and
    TF_CONFIG                   its cluster and which task it is
    TF_GRPC_REUSE_PORT=1        its port is held for it until the run ends
    OMP_NUM_THREADS, TF_NUM_INTRAOP_THREADS, TF_NUM_INTEROP_THREADS
                                a share of the processors, where none of the three is set
    CUDA_VISIBLE_DEVICES        one GPU for each training task and the evaluator, where there are GPUs (of those that
                                the launcher's own CUDA_VISIBLE_DEVICES names, else of /dev/nvidia*); more tasks than
                                GPUs share them
    no_proxy, no_grpc_proxy     grown by the cluster's hosts, where a proxy is set
    TFDIST_ATTEMPT              0; after a restart, how many starts of it there were before
    TFDIST_LAST_FAILURE         after a restart, one line on why
    TFDIST_RUN_DIR and others   how tfdist in the task finds its launcher
Its stdin is empty. What it prints comes out here line by line behind `[worker 1] `, stdout on stdout and stderr on
stderr. TensorFlow's start-up noise is left out (--raw shows it; log files have everything). Where stdout is a
terminal the chief has one too, so its progress bar is live.

Every flag has a default in the environment: TFDIST_RUN_WORKERS=2, TFDIST_RUN_LOG_DIR=logs, TFDIST_RUN_RAW=1.

Failure modes
-------------
A task fails: it is named, with its exit code or signal and its traceback; all others are stopped within 2 s.
A task ends with 0 while others still train: they fail for want of it, and it is named.
A task of another host fails: the tasks here lose it and are stopped, it is named, and its own launcher tells why.
A task does not come to the start: after --start-timeout it is named, and all are stopped.
Ctrl-C, SIGTERM, SIGHUP, SIGQUIT: the tasks get SIGINT (Ctrl-C) or SIGTERM, and SIGKILL after --shutdown-timeout. A
second Ctrl-C kills at once. (A worker of MultiWorkerMirroredStrategy takes no notice of SIGTERM.)
This launcher is killed: so are the tasks, within a second.
In every case nothing stays: what a task has started in its own process group is killed too.

Restarts
--------
With --max-restarts N tasks are started again up to N times in a run: the same command at the same addresses.
What may pass is tried again: a task killed by a signal (or code 128+n), the loss of a task, time-outs (75), a
preemption that we did not ask for (42). An error of the script's own is not, nor a task that left too early.
    Workers that train in step, a ps, the chief: all tasks are stopped, and started again after a pause of 1 s, then
        2, 4, ... 30 s. What they had not saved is lost: tfdist.callbacks.Checkpoint saves each epoch, and goes on.
    A worker beside parameter servers: that task alone, at once; the others train on meanwhile. When no restart is left
        they go on without it, and the run fails with the last of this host's workers.
Each is told in a line on stderr. A log file has all starts of its task, one after the other, and summary.json counts
them. On several hosts give each launcher the same N: each counts for itself, and one that tries again waits for the
others as at the first start.

Exit codes
----------
0    all tasks ended with 0 (parameter servers and their workers end when the chief does, and it may train on without
     a worker that died; the evaluator, when it has evaluated the last checkpoint)
n    the code of the task that failed first, where no restart is left or would help; 1 for one that left with 0 too
     early, or that runs on another host; 128+n for death by signal n
2    nothing was started: wrong usage
42   the tasks saved on SIGTERM and left
75   the tasks did not meet in time, or a step took too long
130  Ctrl-C; 143 SIGTERM; 129 SIGHUP; 131 SIGQUIT; 141 nobody read stdout any more
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from tfdist.errors import LaunchError, TfdistError

if TYPE_CHECKING:
    from tfdist.launch.plan import Options

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
PREFIX = "TFDIST_RUN_"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (that of this process by default) and returns the exit code."""
    try:
        options = read_command_line(sys.argv[1:] if argv is None else argv, os.environ)
    except LaunchError as error:
        print(f"tfdist: {error}", file=sys.stderr)
        return EXIT_USAGE
    # Only now, so that --help is quick.
    from tfdist.launch.launcher import launch

    try:
        return launch(options, os.environ)
    except KeyboardInterrupt:
        # Before the tasks, or after them.
        return EXIT_INTERRUPTED
    except TfdistError as error:
        print(f"tfdist: {error}", file=sys.stderr)
        return 1


def read_command_line(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Returns what a command line asks for.

    Args:
        argv: The arguments after `python -m tfdist.run`.
        environ: Where flags that are not given have their defaults.

    Raises:
        LaunchError: It asks for nothing that can be started; the message is one sentence for the user.
    """
    parser = _parser()
    end = _end_of_flags(argv, parser)
    values = parser.parse_args([*_flags_from(environ, parser), *argv[:end]])
    given = parser.parse_args(argv[:end])
    if (given.workers is None) != (given.tasks_per_host is None):
        # Two ways to say the same, and what the environment says is a default.
        values.workers, values.tasks_per_host = given.workers, given.tasks_per_host
    command = list(argv[end:])
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise LaunchError("which script? For example: python -m tfdist.run --workers 2 train.py")
    (_check_module if values.module else _check_script)(command[0])

    from tfdist.launch.plan import Options
    from tfdist.launch.size import Asked, size_of_run

    size = size_of_run(
        Asked(
            workers=values.workers,
            tasks_per_host=values.tasks_per_host,
            ps=values.ps,
            chief=values.chief,
            evaluator=values.evaluator,
        ),
        environ,
    )
    return Options(
        command=("-m", *command) if values.module else tuple(command),
        workers=size.workers,
        ps=size.ps,
        chief=size.chief,
        evaluator=values.evaluator,
        share=size.share,
        log_dir=values.log_dir,
        raw=values.raw,
        pty=not values.no_pty,
        start_timeout_s=values.start_timeout,
        step_timeout_s=values.step_timeout,
        shutdown_timeout_s=values.shutdown_timeout,
        threads_per_task=values.threads_per_task,
        max_restarts=values.max_restarts,
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(message)


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m tfdist.run",
        usage="python -m tfdist.run [flags] script [arguments of the script]",
        description="Starts a training script as the tasks of a cluster on this host, and ends when they end.",
        epilog="Exit codes, what tasks get, what happens on failure: `python -m pydoc tfdist.run`.",
        allow_abbrev=False,
        add_help=False,
    )

    def flag(*names: str, help: str, **rest: object) -> None:
        # torchrun's users write underscores as well; the help shows one spelling.
        parser.add_argument(*names, help=help, **rest)  # type: ignore[arg-type]
        hidden = [name.replace("-", "_").replace("__", "--", 1) for name in names if "-" in name[2:]]
        if hidden:
            first = next(name for name in names if name.startswith("--"))
            rest.setdefault("dest", first[2:].replace("-", "_"))
            parser.add_argument(*hidden, help=argparse.SUPPRESS, **rest)  # type: ignore[arg-type]

    flag(
        "--workers",
        type=_whole_or_gpu,
        metavar="N",
        help="worker tasks on this host; gpu: one for each of its GPUs, which is the default (1 where it has none)",
    )
    flag(
        "--tasks-per-host",
        "--nproc-per-node",
        type=_whole_or_gpu,
        metavar="K",
        help="tasks of each entry of TF_CONFIG, where it has one per host; by default one for each GPU (1 without)",
    )
    flag("--chief", action="store_true", help="a chief that trains beside the workers")
    flag("--ps", type=_whole, default=0, metavar="N", help="parameter servers; adds the chief, the coordinator")
    flag("--evaluator", action="store_true", help="one more task, which evaluates each checkpoint of the training")
    flag("-m", "--module", action="store_true", help="the script is a module, as in `python -m`")
    flag("--log-dir", metavar="DIR", help="one log file per task, and summary.json")
    flag("--raw", action="store_true", help="show TensorFlow's start-up noise")
    flag("--no-pty", action="store_true", help="give the chief no terminal, so no live progress bar")
    flag("--threads-per-task", type=_whole, metavar="N", help="CPU threads of each task (a share of the processors)")
    flag(
        "--max-restarts",
        type=_whole,
        default=0,
        metavar="N",
        help="times that tasks are started again after a failure which is not the script's own (0)",
    )
    flag("--start-timeout", type=_seconds, default=300.0, metavar="S", help="for all tasks to meet (300)")
    flag("--step-timeout", type=_seconds, metavar="S", help="for a task to wait for another in a step (1800)")
    flag("--shutdown-timeout", type=_seconds, default=5.0, metavar="S", help="from Ctrl-C or SIGTERM to SIGKILL (5)")
    flag("-h", "--help", action="help", help="show this and end")
    flag("--version", action="version", version=f"tfdist {_version()}", help="show the version and end")
    return parser


def _version() -> str:
    from tfdist import __version__

    return __version__


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _whole_or_gpu(text: str) -> int | str:
    if text.lower() in ("gpu", "auto"):
        return text.lower()
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number, nor gpu (one per GPU) or auto (the same, and 1 without a GPU)"
        ) from None


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None


def _end_of_flags(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Returns where our flags end: at the script, whose own arguments may look like flags of ours.

    argparse has REMAINDER for this, which takes the value of an unknown flag for the script and eats a `--` of it.
    """
    known = _actions(parser)
    i = 0
    while i < len(argv) and argv[i].startswith("-") and argv[i] not in ("-", "--"):
        name, equals, _ = argv[i].partition("=")
        if name not in known:
            raise LaunchError(f"there is no flag {name}{_did_you_mean(name, list(known))}; --help lists them")
        i += 1 if equals or known[name].nargs == 0 else 2
    return min(i, len(argv))


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {
        name: action
        for action in parser._actions  # noqa: SLF001 (argparse has no public list of what was added)
        for name in action.option_strings
    }


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name.replace("_", "-"), [k for k in known if "_" not in k], 1, 0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def _flags_from(environ: Mapping[str, str], parser: argparse.ArgumentParser) -> list[str]:
    """Returns the flags that the environment gives, to stand before those of the command line."""
    flags = []
    for action in parser._actions:  # noqa: SLF001
        variable = PREFIX + action.dest.upper()
        text = environ.get(variable, "")
        if not text or action.dest in ("help", "version") or action.help is argparse.SUPPRESS:
            continue
        name = next(name for name in action.option_strings if name.startswith("--"))
        if action.nargs != 0:
            _check_value(variable, text, action.type)
            flags.append(f"{name}={text}")
        elif text.lower() in ("1", "true", "yes", "on"):
            flags.append(name)
        elif text.lower() not in ("0", "false", "no", "off"):
            raise LaunchError(f"{variable} must be 1 or 0, not {text!r}")
    return flags


def _check_value(variable: str, text: str, convert: object) -> None:
    if isinstance(convert, Callable):  # type: ignore[arg-type]
        try:
            convert(text)  # type: ignore[operator]
        except argparse.ArgumentTypeError as error:
            raise LaunchError(f"{variable}: {error}") from None


def _check_script(script: str) -> None:
    if os.path.isdir(script):
        if not os.path.exists(os.path.join(script, "__main__.py")):
            raise LaunchError(f"{script!r} is a folder without a __main__.py; which script in it?")
    elif not os.path.exists(script):
        hint = f"; for a module: -m {script}" if _is_module(script) else ""
        raise LaunchError(f"the script {script!r} is not in {os.getcwd()!r}{hint}")


def _check_module(name: str) -> None:
    if name.endswith(".py") and os.path.exists(name):
        raise LaunchError(f"{name!r} is a file; leave out -m, or write -m {name[:-3].replace('/', '.')}")
    if not _is_module(name):
        raise LaunchError(f"there is no module {name!r} to be found from {os.getcwd()!r}")


def _is_module(name: str) -> bool:
    import importlib.util

    # The outermost package alone: to look inside one is to import it.
    top = name.partition(".")[0]
    try:
        return bool(top) and importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False


if __name__ == "__main__":
    sys.exit(main())
