"""What happened to the tasks -> what the user reads: the failure block, the summary, one-line descriptions."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.launch.blame import Verdict
from tfdist.launch.restarts import EXIT_TIMEOUT, Restart
from tfdist.launch.task_process import TaskProcess

WIDTH = 80


def exit_code(code: int) -> int:
    """Returns a shell's exit code for a process' own: 128+n for death by signal n."""
    return 128 - code if code < 0 else code


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_end(code: int | None, *, out_of_memory: bool = False) -> str:
    """Returns how a process ended, in words.

    Example:
        >>> describe_end(-11)
        'killed by SIGSEGV'
    """
    if code is None:
        return "still running"
    if code == -signal.SIGKILL:
        reason = "out of memory, says the kernel" if out_of_memory else "out of memory?"
        return f"killed by SIGKILL ({reason})"
    if code < 0:
        return f"killed by {signal_name(-code)}"
    return f"exit code {code}" + (" (time-out)" if code == EXIT_TIMEOUT else "")


def failure_block(
    name: str,
    verdict: Verdict,
    tasks: Sequence[TaskProcess],
    record: Mapping[str, Any],
    meeting: Sequence[str],
    *,
    log_dir: str | None,
    out_of_memory: bool,
    restarts: str = "",
) -> list[str]:
    """Returns the lines that say which task failed first, how, and with which traceback."""
    first = next(task for task in tasks if task.task == verdict.task)
    if verdict.kind == "left":
        end = f"left with exit code 0{_at_step(first)}, while others still needed it"
    elif verdict.by not in (None, verdict.task):
        end = f"given up by {verdict.by}, which tells why below; then it was stopped"
    elif first.given_up:
        end = f"given up and killed: {first.given_up}"
    elif first.code is None or (first.stopped and first.words is not None):
        end = describe_end(None if first.words is None else first.words.code)
    else:
        end = describe_end(first.code, out_of_memory=out_of_memory)
    seconds = (first.ended_at or time.monotonic()) - first.started_at
    lines = [
        "=" * WIDTH,
        f"{name} failed: {verdict.task} was first",
        "-" * WIDTH,
        f"  task : {first.plan}, host {socket.gethostname()}, pid {first.pid}",
        f"  end  : {end}",
        f"  time : {time.strftime('%Y-%m-%d %H:%M:%S')}, {seconds:.1f} s after its start{_at_step(first)}",
    ]
    if log_dir is not None:
        lines.append(f"  log  : {log_path(log_dir, first.plan.task)}")
    lines.extend(_restarts(restarts))
    others = [task for task in tasks if task is not first]
    if others:
        lines.append(f"  other: {'; '.join(f'{task.task} {_other(task)}' for task in others)}")
    lines.extend(_last_words(verdict, first, meeting, record))
    lines.append("=" * WIDTH)
    return lines


def lost_block(
    name: str,
    verdict: Verdict,
    address: str,
    tasks: Sequence[TaskProcess],
    record: Mapping[str, Any],
    *,
    restarts: str = "",
) -> list[str]:
    """Returns the lines that say which task of another host failed first, as one of this host saw it."""
    witness = next(task for task in tasks if task.task == verdict.task)
    return [
        "=" * WIDTH,
        f"{name} failed: {verdict.elsewhere}, which runs on another host, was first",
        "-" * WIDTH,
        f"  task : {verdict.elsewhere} at {address}; its own launcher tells how it ended",
        f"  time : {time.strftime('%Y-%m-%d %H:%M:%S')}, lost by {witness.task}{_at_step(witness)}",
        *_restarts(restarts),
        f"  here : {'; '.join(f'{task.task} {_other(task)}' for task in tasks)}",
        *_last_words(verdict, witness, (), record),
        "=" * WIDTH,
    ]


def meeting_lines(tasks: Sequence[TaskProcess]) -> list[str]:
    """Returns who has not asked for the cluster yet, and what the others wait for."""
    lines = []
    for task in tasks:
        if task.phase == "":
            state = "runs, but has not" if task.is_alive else f"ended ({describe_end(task.code)}) and had not"
            lines.append(f"  {task.task} {state} called tfdist.create_strategy()")
        elif task.phase in ("strategy", "waiting"):
            lines.append(f"  {task.task} waits for {task.waiting_for or 'the others'}")
    return lines


def timeout_block(name: str, meeting: Sequence[str], timeout_s: float, *, restarts: str = "") -> list[str]:
    """Returns the lines that say which tasks the start waited for in vain."""
    return [
        "=" * WIDTH,
        f"{name} failed: the tasks did not meet within {timeout_s:g} s (--start-timeout)",
        "-" * WIDTH,
        *meeting,
        *_restarts(restarts),
        "=" * WIDTH,
    ]


def summary(
    command: Sequence[str],
    tasks: Sequence[TaskProcess],
    *,
    code: int,
    first_failure: Verdict | None,
    restarts: Sequence[Restart] = (),
    started_at: float,
    duration_s: float,
) -> dict[str, Any]:
    """Returns the run as plain values, for `summary.json`."""
    return {
        "command": list(command),
        "exit_code": code,
        "started": _time(started_at),
        "duration_s": round(duration_s, 3),
        "first_failure": None if first_failure is None else first_failure.elsewhere or str(first_failure.task),
        "restarts": [
            {"task": restart.task or "all", "after": restart.why, "time": _time(restart.at)} for restart in restarts
        ],
        "tasks": [
            {
                "task": str(task.task),
                "address": task.plan.address,
                "host": socket.gethostname(),
                "pid": task.pid,
                "code": task.code,
                "signal": signal_name(-task.code) if task.code is not None and task.code < 0 else None,
                "stopped": task.stopped,
                "attempt": task.attempt,
                "duration_s": round((task.ended_at or time.monotonic()) - task.started_at, 3),
                "last_step": task.step,
            }
            for task in tasks
        ],
    }


def write_summary(log_dir: str, values: Mapping[str, Any]) -> None:
    """Writes `summary.json`, whole or not at all."""
    path = os.path.join(log_dir, "summary.json")
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.write("\n")
    os.replace(path + ".part", path)


def copies_warning(name: str, count: int) -> list[str]:
    """Returns what to tell one whose tasks trained apart from each other."""
    return [
        f"WARNING: no task called tfdist.create_strategy(): {count} independent copies of {name} ran, "
        "each on all of its data.",
        "To train one model together, make it in the strategy's scope:",
        "    strategy = tfdist.create_strategy()",
        "    with strategy.scope():",
        "        model = ...",
        "(A script that made its own tf.distribute strategy from TF_CONFIG needs none of this.)",
    ]


def log_path(log_dir: str, task: object) -> str:
    return os.path.join(log_dir, f"{str(task).replace(' ', '-')}.log")


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(at))


def _restarts(words: str) -> list[str]:
    return [f"  again: {words}"] if words else []


def _at_step(task: TaskProcess) -> str:
    return "" if task.step is None else f" at step {task.step}"


def _other(task: TaskProcess) -> str:
    if task.stopped:
        return "was stopped"
    return f"ended with {describe_end(task.code)}"


def _last_words(verdict: Verdict, first: TaskProcess, meeting: Sequence[str], record: Mapping[str, Any]) -> list[str]:
    timed_out = first.words is not None and first.words.code == EXIT_TIMEOUT
    lines = list(meeting) if timed_out and first.phase in ("strategy", "waiting") else []
    if record.get("traceback"):
        whose = "" if verdict.kind == "own" else f"  What {record.get('by', 'another task')} saw:"
        return [*lines, whose, *str(record["traceback"]).rstrip().splitlines()]
    tail = [line.decode(errors="replace") for line in first.output.tail]
    if verdict.kind == "own" and tail:
        return [*lines, "", f"  The last lines of its stderr ({len(tail)}):", *tail]
    return lines
