"""What a run is, and what happens in it -> the one-line news that the user reads while it goes on."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.launch.blame import Verdict
from tfdist.launch.plan import Plan
from tfdist.launch.report import describe_end
from tfdist.launch.task_process import TaskProcess

MANY = 8


def plan(plan: Plan) -> str:
    """Returns which tasks run here, and where."""
    tasks = plan.tasks
    listed = ", ".join(map(str, tasks[:MANY])) + (f" and {len(tasks) - MANY} more" if len(tasks) > MANY else "")
    logs = f"; logs in {plan.options.log_dir}" if plan.options.log_dir else ""
    cluster = plan.cluster.tasks
    is_share = len(cluster) > len(tasks) and any(task.task in cluster for task in tasks)
    of_all = f" of the cluster's {len(cluster)}" if is_share else ""
    return f"{len(tasks)}{of_all} task{'s' * (len(tasks) > 1 or bool(of_all))} on this host: {listed}{logs}"


def end(task: TaskProcess, *, out_of_memory: bool = False) -> str:
    """Returns how a task ended: "worker 1 (pid 71) was killed by SIGSEGV"."""
    who = f"{task.task} (pid {task.pid})"
    if task.given_up:
        return f"{who} was given up and killed: {task.given_up}"
    if task.words is not None:
        return f"{who} failed: {task.words.text}"
    how = describe_end(task.code, out_of_memory=out_of_memory)
    return f"{who} {'was' if task.code is not None and task.code < 0 else 'ended with'} {how}"


def failure(verdict: Verdict, tasks: Sequence[TaskProcess], *, out_of_memory: bool = False) -> str:
    """Returns which task failed first, and how."""
    by_name = {task.task: task for task in tasks}
    if verdict.kind == "left":
        return f"{verdict.task} left with exit code 0, while others still needed it"
    if verdict.by is None:
        return end(by_name[verdict.task], out_of_memory=out_of_memory)
    words = by_name[verdict.by].words
    said = words.text if words is not None else "no more is known"
    if verdict.elsewhere is not None:
        return f"{verdict.elsewhere}, which runs on another host, was lost by {verdict.by}: {said}"
    if verdict.by == verdict.task:
        return f"{verdict.task} lost another task: {said}"
    return f"{verdict.task} was given up by {verdict.by}: {said}"


def late(meeting: Sequence[str], timeout_s: float) -> str:
    """Returns which tasks the start waited for in vain."""
    return f"the tasks did not meet within {timeout_s:g} s ({'; '.join(line.strip() for line in meeting)})"


def restart_of_all(count: int, pause_s: float, which: str) -> str:
    """Returns what follows a failure that all tasks are started again after."""
    tasks = f"all {count} tasks are" if count > 1 else "the task is"
    return f"{tasks} started again in {pause_s:g} s (restart {which})"


def remaining(workers: int) -> str:
    """Returns what follows the end of a worker that the others do without."""
    return f"training goes on with {workers} worker{'s' * (workers > 1)}"
