"""Processes that do one thing together, started once, so that several such teams can take turns.

The script that compares them:

    with teams.started() as start:
        ours = start("ours", [[sys.executable, "worker.py", "0"], [sys.executable, "worker.py", "1"]])
        seconds = ours.run("small")  # all its processes get ready, then start at one time

Each process, `worker.py`:

    teams.serve(prepare)  # prepare("small") -> a function that does it and returns the seconds

No process outlives the script, however that ends. Only the standard library is imported here: every worker imports this
first, whatever else it trains with.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

DEADLINE_S = 300
END_S = 10
TEAM_SIZE = 2
PR_SET_PDEATHSIG = 1


class Team:
    """Processes that work at the same time; one answers when told to, so that idle ones cost nothing."""

    def __init__(
        self, name: str, commands: Sequence[Sequence[str]], environs: Sequence[Mapping[str, str]], folder: Path
    ) -> None:
        self.name = name
        self._logs = [folder / f"{name}-{i}.log".replace(" ", "-") for i in range(len(commands))]
        self._processes: list[subprocess.Popen[str]] = []
        for command, extra, log in zip(commands, environs, self._logs, strict=True):
            with log.open("w") as file:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env={**clean_environment(), **extra},
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=file,
                        text=True,
                        start_new_session=True,  # Ctrl-C is the script's, which ends them
                    )
                )

    def run(self, order: str) -> float:
        """Returns the seconds that the order took, the mean over the processes, which started at one time."""
        self._tell(order)
        self._answers()
        self._tell("go")
        return statistics.mean(float(answer) for answer in self._answers())

    def let_go(self) -> None:
        """Tells the processes that there will be no more."""
        for process in self._processes:
            with suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]

    def end(self, wait_s: float) -> None:
        """Ends the processes that have not gone by then."""
        until = time.monotonic() + wait_s
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # TensorFlow ignores SIGTERM while it waits for peers
                process.wait()
            process.stdout.close()  # type: ignore[union-attr]

    def _tell(self, line: str) -> None:
        for process in self._processes:
            try:
                process.stdin.write(f"{line}\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
            except BrokenPipeError:
                self._fail(f"{self.name}: a process has ended")

    def _answers(self) -> list[str]:
        deadline = time.monotonic() + DEADLINE_S
        answers: dict[int, str] = {}
        outs: dict[IO[str], int] = {p.stdout: i for i, p in enumerate(self._processes)}  # type: ignore[misc]
        while outs:
            # One that dies is seen at once, though another waits for it.
            ready, _, _ = select.select(list(outs), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"{self.name}: no answer within {DEADLINE_S} s from process {sorted(outs.values())}")
            for out in ready:
                answers[outs[out]] = out.readline()
                if not answers[outs[out]]:
                    self._fail(f"{self.name}: process {outs[out]} has ended")
                del outs[out]
        return [answers[i] for i in range(len(self._processes))]

    def _fail(self, what: str) -> None:
        texts = [f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in self._logs]
        raise SystemExit("\n".join([what, *texts]))


@contextmanager
def started() -> Iterator[Callable[..., Team]]:
    """Yields `start(name, commands, environs)`, whose teams end with the block."""
    signal.signal(signal.SIGTERM, _leave)
    teams: list[Team] = []
    wait_s = 0.0
    with tempfile.TemporaryDirectory() as folder:

        def start(
            name: str, commands: Sequence[Sequence[str]], environs: Sequence[Mapping[str, str]] | None = None
        ) -> Team:
            teams.append(Team(name, commands, environs or [{}] * len(commands), Path(folder)))
            return teams[-1]

        try:
            yield start
            wait_s = END_S  # else, after an error or an interrupt, no process gets time
        finally:
            for team in teams:
                team.let_go()
            for team in teams:
                team.end(wait_s)


def take_turns(teams: Mapping[str, Team], order: str, repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of each team in each round. Every other round goes backwards, so that each has been first."""
    seconds: dict[str, list[float]] = {name: [] for name in teams}
    for i in range(repeats):
        for name in list(teams)[:: 1 if i % 2 == 0 else -1]:
            seconds[name].append(teams[name].run(order))
    return seconds


def clean_environment() -> dict[str, str]:
    """Returns this process's environment without what would make a worker a task, or lead its messages elsewhere."""
    ours = ("TF_CONFIG", "TFDIST_", "OMP_NUM_THREADS", "TF_NUM_")
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(ours) and not k.lower().endswith("_proxy")},
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def free_addresses(count: int = TEAM_SIZE) -> list[str]:
    import portpicker  # a worker's Python may lack it

    return [f"127.0.0.1:{portpicker.pick_unused_port()}" for _ in range(count)]


def share_cores(count: int = TEAM_SIZE) -> str:
    """Leaves this process and those that it starts so many processors; returns words for it."""
    if not hasattr(os, "sched_setaffinity"):
        return f"all {os.cpu_count()} processors (this system does not let a process choose)"
    chosen = sorted(os.sched_getaffinity(0))[:count]
    os.sched_setaffinity(0, chosen)
    return f"{len(chosen)} processor{'s' * (len(chosen) != 1)}"


def load() -> str:
    """Returns words for how busy this machine is; where it does something else too, whoever waits for peers suffers."""
    return f"load average {os.getloadavg()[0]:.1f}"


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


# In a worker


def serve(prepare: Callable[[str], Callable[[], float]]) -> None:
    """Does what the script says until it says no more; `prepare` may take as long as it likes."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    known: dict[str, Callable[[], float]] = {}
    for line in sys.stdin:
        order = line.strip()
        if order not in known:
            known[order] = prepare(order)
        print("ready", file=out, flush=True)
        if not sys.stdin.readline():
            return
        print(known[order](), file=out, flush=True)


def end_with_parent() -> None:
    """Ends this process when the script is killed, even while it waits for a peer. Call it first."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
