"""A parameter-server cluster whose tasks are started one by one from a TF_CONFIG, as a platform would."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import portpicker
from launching import environment, wait_for, write

from tfdist import tf_config

DEADLINE_S = 240  # on a loaded machine five tasks take minutes to import TensorFlow


class Cluster:
    """A chief, workers and ps, called "worker 1" and the like, each of which can be killed and started anew.

    Args:
        folder: For the script and the tasks' logs.
        script: What all tasks run.
        arguments: The script's.
        without: The task that is not started.
        env: Environment variables of all tasks.
    """

    def __init__(
        self,
        folder: Path,
        script: str,
        *arguments: object,
        workers: int,
        ps: int,
        without: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        ports = [portpicker.pick_unused_port() for _ in range(1 + workers + ps)]
        cluster = tf_config.local_cluster(workers=workers, ps=ps, chief=True, ports=ports)
        self.folder = folder
        self._command = [sys.executable, "-u", str(write(folder, script)), *map(str, arguments)]
        self._environments = {
            str(task): {"TF_CPP_MIN_LOG_LEVEL": "2", **(env or {}), "TF_CONFIG": tf_config.build(cluster, task)}
            for task in cluster.tasks
        }
        self._without = without
        self._started: list[subprocess.Popen[bytes]] = []
        self.tasks: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        for name in self._environments:
            if name != self._without:
                self.start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.wait()

    def start(self, name: str) -> None:
        """Starts a task, or starts it anew."""
        with open(self._log_file(name), "ab") as log:
            self.tasks[name] = subprocess.Popen(
                self._command, env=environment(self._environments[name]), stdout=log, stderr=subprocess.STDOUT
            )
        self._started.append(self.tasks[name])

    def kill(self, name: str) -> None:
        self.tasks[name].kill()
        self.tasks[name].wait()

    def bring_back(self, name: str) -> None:
        """Starts a task anew, and waits until the chief uses it."""
        begun = len(self.log("chief 0"))
        self.start(name)
        self.wait_for_words(f"{name} is back", begun=begun)

    def log(self, name: str) -> str:
        path = self._log_file(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def _log_file(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float = DEADLINE_S) -> None:
        try:
            wait_for(condition, what, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self}") from None

    def wait_for_words(self, pattern: str, times: int = 1, *, begun: int | None = None) -> None:
        """Waits until the chief has said this so many times more, from now or from a place in its log on."""
        begun = len(self.log("chief 0")) if begun is None else begun

        def has_said() -> bool:
            has_ended = self.tasks["chief 0"].poll() is not None  # asked first: what it said last counts
            found = len(re.findall(pattern, self.log("chief 0")[begun:], re.MULTILINE)) >= times
            assert found or not has_ended, f"the chief ended before it said {pattern!r} {times} times"
            return found

        self.wait_for(has_said, f"the chief to say {pattern!r} {times} times")

    def codes(self, *names: str, timeout_s: float = DEADLINE_S) -> dict[str, int]:
        """Waits for tasks to end, all or those named; returns their exit codes."""
        tasks = {name: process for name, process in self.tasks.items() if not names or name in names}
        self.wait_for(
            lambda: all(p.poll() is not None for p in tasks.values()), f"{', '.join(tasks)} to end", timeout_s
        )
        return {name: process.returncode for name, process in tasks.items()}

    def __str__(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name)[-6000:]}" for name in self._environments)
