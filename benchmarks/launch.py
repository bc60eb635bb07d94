"""Prints how long two workers take from the command line to their first step, compared with one plain process.

    python benchmarks/launch.py [--repeats 5]

The plain process imports Keras and makes its first step; it never imports tfdist. Two workers do that side by side, on
the same processors, and meet.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ratios

SCRIPT = Path(__file__).with_name("first_step.py")
DEADLINE_S = 300


def main() -> None:
    options = ratios.options("Compare the launcher's time to the first step with that of one process.")
    launcher = ["-m", "tfdist.run", "--workers", "2", str(SCRIPT)]
    plain = seconds_of(str(SCRIPT), "plain")
    print(f"launch to first step, 2 workers / 1 plain process: median of {options.repeats} (least to most)", flush=True)
    kinds = {"MultiWorkerMirroredStrategy": "default", 'kind="synchronous"': "synchronous"}
    if options.quick:
        kinds.popitem()
    else:
        plain()  # files come from memory from now on
    for name, kind in kinds.items():
        ratios.show(name, ratios.compare(seconds_of(*launcher, kind), plain, options.repeats))


def seconds_of(*arguments: str) -> Callable[[], float]:
    """Returns a function that runs the command and returns the seconds until its first step."""

    def run() -> float:
        environ = {**os.environ, "BENCHMARK_START": repr(time.time())}
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{arguments}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return float(done.stdout.split("first step after")[1].split()[0])

    return run


if __name__ == "__main__":
    main()
