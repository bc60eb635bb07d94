"""Measures two ways of doing one thing in turns, and says how their times compare."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable


def options(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args()


def compare(ours: Callable[[], float], other: Callable[[], float], repeats: int) -> list[float]:
    """Returns ours / other of each repeat. The two take turns, so that a slow minute of the machine hits both."""
    results = []
    for i in range(repeats):
        first, second = (ours, other) if i % 2 == 0 else (other, ours)
        a, b = first(), second()
        results.append(a / b if first is ours else b / a)
    return results


def show(name: str, results: list[float]) -> None:
    spread = f"({min(results):.2f} to {max(results):.2f})"
    print(f"  {name:<52} {statistics.median(results):5.2f}  {spread}", flush=True)
