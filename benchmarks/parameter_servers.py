"""Prints how fast `fit` steps through parameter servers, as a share of legacy Keras' steps per second there.

    python benchmarks/parameter_servers.py [--repeats 5]

`tf_keras` is the last Keras whose own fit knows `ParameterServerStrategy`; `pip install -e '.[bench]'` brings it. It
and ours train one model (20-64-64-1, batches of 64, Adam, accuracy and AUC), each in a process of its own with two
workers and two ps, and take turns. Everything is compared with legacy Keras' fit of one step per execution.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ratios

SCRIPT = Path(__file__).with_name("parameter_server_fit.py")
STEPS, FEW_STEPS = 480, 16
BASE = "own data, k=1"


def main() -> None:
    options = ratios.options("Compare fit through parameter servers with that of legacy Keras.")
    words = "fit of 2 workers and 2 ps / tf_keras with k=1, steps per second"
    if importlib.util.find_spec("tf_keras") is None:
        print(f"{words}: not measured, for want of tf_keras: pip install -e '.[bench]'", flush=True)
        return
    print(f"{words}: median of {options.repeats} (least to most)", flush=True)
    steps = FEW_STEPS if options.quick else STEPS
    with trainer("ours", steps) as ours, trainer("tf_keras", steps) as theirs:
        ways = {f"ours, {way}": ours(way) for way in ("own data, k=1", "own data, k=8", "fed arrays, k=1")}
        if not options.quick:
            ways["tf_keras, own data, k=8"] = theirs("own data, k=8")
        base = theirs(BASE)
        for train in (*ways.values(), base):
            train()  # traces
        results: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.repeats):
            for name, train in ways.items():
                results[name] += ratios.compare(train, base, 1)
    for name, ratios_of_way in results.items():
        ratios.show(name, [1 / ratio for ratio in ratios_of_way])


@contextmanager
def trainer(kind: str, steps: int) -> Iterator[Callable[[str], Callable[[], float]]]:
    """Yields a function: a way of training -> a function that trains for some steps and returns the seconds."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), kind, str(steps)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def of(way: str) -> Callable[[], float]:
        def train() -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{way}\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith("took "):
                    return float(line.split()[1])
            raise SystemExit(f"{SCRIPT.name} {kind}: exit code {process.wait()}; run it by hand: echo '{way}' | python")

        return train

    try:
        yield of
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
