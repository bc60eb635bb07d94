"""Prints how much of what two processors can do is left when two workers train one model on them.

    python benchmarks/synchronous.py [--repeats 15] [--torch-python PATH]

Two workers, two processors, one intra-op and one inter-op thread each; whole epochs on arrays, of rows in a new order
every time. *The limit* is what the same processors train without a word between the workers: two processes at the same
time, each with a model of its own on half of the data, through `fit` of one task of tfdist. *Share of the limit* is
the examples per second of a way, divided by that; 1 means that communication costs nothing.

Ways: `tfdist`, what `create_strategy()` gives two workers; with `communication="ring"`, the same through TensorFlow's
own collectives; with `kind="synchronous"`, the small strategy; stock TensorFlow, a `MultiWorkerMirroredStrategy` in the
loop of its guide, as Keras 3's `fit` refuses it; and DDP, PyTorch's `DistributedDataParallel` over gloo, as a share of
what PyTorch reaches without it, and compared by its examples per second. `--torch-python` names a Python that has torch
and NumPy, which need no place in this environment.

In each repeat all ways train the same case, one after the other; a repeat's figure is a ratio within it, and printed
are the median over the repeats, the least and the most. Whatever else the machine does hurts the ways more than the
limit, since workers that train together both wait for the one that is disturbed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import ratios
import synchronous_cases as cases
import teams

HERE = Path(__file__).parent
LIMIT, TORCH_LIMIT, OURS, STOCK, DDP = "limit", "PyTorch's limit", "tfdist", "stock TensorFlow", "DDP"
KERAS_WAYS = {
    LIMIT: "alone",
    OURS: "tfdist",
    'tfdist, kind="synchronous"': "synchronous",
    'tfdist, communication="ring"': "ring",
    STOCK: "stock",
}
TORCH_WAYS = {TORCH_LIMIT: "alone", DDP: "ddp"}
QUICK_WAYS = (LIMIT, OURS, STOCK, *TORCH_WAYS)


def main() -> None:
    options = parse_arguments()
    cores = teams.share_cores()
    print(f"2 workers on {cores}, {teams.load()}: median of {options.repeats} (least to most)", flush=True)
    if not options.torch_python:
        print("DDP: not measured, for want of --torch-python", flush=True)
    chosen = ["quick"] if options.quick else options.case or [name for name in cases.CASES if name != "quick"]
    with teams.started() as start:
        ways = {}
        for name, way in KERAS_WAYS.items():
            if not options.quick or name in QUICK_WAYS:
                ways[name] = start(name, commands(sys.executable, "synchronous_keras.py", way))
        if options.torch_python:
            for name, way in TORCH_WAYS.items():
                ways[name] = start(name, commands(options.torch_python, "synchronous_torch.py", way))
        for case in chosen:
            show(case, teams.take_turns(ways, case, options.repeats))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare synchronous training of two workers with what they do without communication."
    )
    parser.add_argument("--repeats", type=int, default=15, help="of each measurement, interleaved (15)")
    parser.add_argument("--quick", action="store_true", help="a few steps only: whether it runs, not how fast")
    parser.add_argument("--torch-python", metavar="PATH", help="a Python that has torch and NumPy, for DDP")
    parser.add_argument("--case", action="append", choices=list(cases.CASES), help="only this (may be repeated)")
    return parser.parse_args()


def commands(python: str, script: str, way: str) -> list[list[str]]:
    addresses = teams.free_addresses()
    return [[python, str(HERE / script), way, str(index), *addresses] for index in range(cases.WORKERS)]


def show(case: str, seconds: dict[str, list[float]]) -> None:
    def ratio(one: str, other: str) -> list[float]:
        return [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]

    limit_s = statistics.median(seconds[LIMIT])
    print(f"{cases.CASES[case]} ({limit_s:.2g} s a turn at the limit, {teams.load()})", flush=True)
    for way in seconds:
        if way not in (LIMIT, TORCH_LIMIT):
            limit = TORCH_LIMIT if way == DDP else LIMIT
            ratios.show(f"{way}: share of {limit if way == DDP else 'the limit'}", ratio(limit, way))
    for other in (STOCK, DDP):
        if other in seconds:
            ratios.show(f"tfdist / {other}, examples per second", ratio(other, OURS))


if __name__ == "__main__":
    main()
