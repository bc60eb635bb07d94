"""Writes the support matrix, docs/support.md: `python tests/multiprocess/parity/support.py [--all] [CASE ...]`.

Its rows are CASES and REFUSED, and its verdicts are measured: cases that `measured.json` lacks (or those named, or all)
run in one plain process and in every cluster of `matrix.RUNS`, and what came out is kept there. The page is a function
of that file and of the cases, which a test checks; `--page` only writes the page.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "support.md"
MEASURED = Path(__file__).with_name("measured.json")
SAME, OTHER = "right", "wrong"

AREAS = {
    "inputs": "What `fit` takes",
    "sizes": "Rows, batches and tasks",
    "losses": "Losses",
    "metrics": "Metrics",
    "models": "Models",
    "state": "Layers with a state, or random numbers",
    "optimizing": "Optimizers",
    "precision": "Number formats",
    "own_steps": "A `train_step` of your own",
    "own_loops": "A loop of your own",
    "ways": "Ways to train, and callbacks",
}
# name of a run -> head of its column
COLUMNS = {
    "1 task": "1",
    "2 tasks": "2",
    "3 tasks": "3",
    "4 tasks": "4",
    "2 tasks without TensorFlow's servers": '2, `"synchronous"`',
    "2 tasks through TensorFlow's ring": "2, ring",
}
TOP = """\
# What is right on several tasks

Written by `tox -e docs`; the verdicts are those of test runs, not of an author.

Each feature was trained in one process of plain Keras, and by tfdist on 1, 2, 3 and 4 tasks of
`MultiWorkerMirroredStrategy`, on 2 of `tfdist.create_strategy("synchronous")`, and on 2 whose gradients go through
TensorFlow's own ring (`communication="ring"`). Compared are logs of batches and epochs, weights, predictions and
whatever else the feature is about.

- **right**: every number is that of one process, up to rounding: max|a - b| / max|b| of each array is at most 1e-5
  (where 16 bits or a reason in the case's code allow more, that stands in the last column), and all tasks hold the same
  bits. The last column is the largest there was.
- **rule**: right by the rule stated below the table, which is another one than that of one process; all tasks hold the
  same bits.
- an empty place: not run there. Four tasks, `"synchronous"` and the ring run a core of the cases, since they differ
  from the others in their number, in how they start, and in the way of a sum alone.

Under `ParameterServerStrategy` (`--ps N`) each worker trains on batches of its own at its own pace, so that weights are
those of one process with one worker alone; `fit`, `evaluate`, `predict`, saving and checkpoints work there, and steps,
rows and metrics are counted exactly with any number of workers.

`python -m tfdist.verify` checks a model of your own in this way.
"""


def main(arguments: Sequence[str]) -> None:
    from parity import CASES

    measured = read()
    if "--page" not in arguments:
        named = [argument for argument in arguments if not argument.startswith("--")]
        unknown = [name for name in named if name not in CASES]
        if unknown:
            sys.exit(f"there is no case {unknown[0]}")
        wanted = named or [name for name in CASES if "--all" in arguments or name not in measured["cases"]]
        kept = {name: _of_runs(name, value) for name, value in measured["cases"].items() if name in CASES}
        if wanted:
            kept.update(_measure(wanted))
        measured = {"versions": _versions(), "cases": {name: kept[name] for name in CASES if name in kept}}
        MEASURED.write_text(_text(measured), encoding="utf-8")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(measured), encoding="utf-8")


def read() -> dict[str, Any]:
    """Returns what was measured: {"versions": ..., "cases": {case: {run: [verdict, error]}}}."""
    return json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {"versions": {}, "cases": {}}


def _text(measured: Mapping[str, Any]) -> str:
    """JSON with a line for each case."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in measured["cases"].items())
    return f'{{\n "versions": {json.dumps(measured["versions"])},\n "cases": {{\n{lines}\n }}\n}}\n'


def _measure(wanted: Sequence[str]) -> dict[str, dict[str, Any]]:
    from parity import CASES
    from parity.matrix import RUNS, compared, other_bits, run_plain, run_tasks

    found: dict[str, dict[str, Any]] = {name: {} for name in wanted}
    with tempfile.TemporaryDirectory() as folder:
        reference = run_plain(_new(folder, "plain"), wanted)
        for name, clusters in RUNS.items():
            cases = [case for case in clusters.cases if case in wanted]
            if not cases:
                continue
            print(f"{name}: {len(cases)} cases", flush=True)
            results, log = run_tasks(name, _new(folder, name), cases)
            for case in cases:
                comparisons = [compared(case, got, reference[case][0]) for got in results[case]]
                ended = all(got and "error" not in got for got in results[case])
                same = ended and not any(other_bits(results[case], i) for i in range(1, len(results[case])))
                right = same and (bool(CASES[case].differs) or all(comparisons))
                worst = 0.0 if CASES[case].differs else max(comparison.worst for comparison in comparisons)
                found[case][name] = [SAME if right else OTHER, float(f"{worst:.1e}") if worst < 1e9 else None]
                if not right:
                    print(f"WRONG: {case} on {name}: {comparisons[0]}\n{log if not ended else ''}", flush=True)
    return found


def _of_runs(case: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what was found in the runs that the case still belongs to."""
    from parity.matrix import RUNS

    return {name: value for name, value in found.items() if name in RUNS and case in RUNS[name].cases}


def _new(folder: str, name: str) -> Path:
    path = Path(folder, name.replace(" ", "-"))
    path.mkdir()
    return path


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("tensorflow", "keras")}


# -- the page


def page(measured: Mapping[str, Any]) -> str:
    """Returns the text of the page."""
    from parity import CASES
    from parity.refused import REFUSED

    versions = measured["versions"]
    parts = [TOP]
    if versions:
        parts.append(f"Measured with TensorFlow {versions['tensorflow']} and Keras {versions['keras']} on CPUs.\n")
    unknown = [area for area in dict.fromkeys(case.area for case in CASES.values()) if area not in AREAS]
    for area, title in {**AREAS, **{name: name.replace("_", " ").capitalize() for name in unknown}}.items():
        cases = [case for case in CASES.values() if case.area == area]
        if not cases:
            continue
        rules = list(dict.fromkeys(case.differs for case in cases if case.differs))
        lines = [
            f"## {title}\n",
            f"| | {' | '.join(COLUMNS.values())} | furthest off |",
            "|---" * (len(COLUMNS) + 2) + "|",
        ]
        lines += [_line(case, measured["cases"].get(case.name), rules) for case in cases]
        lines += ["", *(f"({i}) {rule}.  " for i, rule in enumerate(rules, 1))] if rules else []
        parts.append("\n".join(lines) + "\n")
    refused = "\n".join(f"| {entry.feature} | {entry.instead} |" for entry in REFUSED.values())
    parts.append(
        f"## Refused\n\nOn every task, before or in the first step, with an error that names the way out.\n\n"
        f"| | instead |\n|---|---|\n{refused}\n"
    )
    return "\n".join(parts)


def _line(case: Any, found: Mapping[str, Any] | None, rules: Sequence[str]) -> str:
    from parity.matrix import RUNS

    cells = []
    for name in COLUMNS:
        if case.name not in RUNS[name].cases:
            cells.append("")
        elif found is None or name not in found:
            cells.append("?")
        elif found[name][0] != SAME:
            cells.append("**wrong**")
        else:
            by_rule = case.differs and RUNS[name].size > 1
            cells.append(f"rule ({rules.index(case.differs) + 1})" if by_rule else "right")
    worst = max((value[1] or 0.0 for value in (found or {}).values()), default=0.0)
    feature = case.feature[:1].upper() + case.feature[1:]
    off = "" if case.differs or not found else f"{worst:.0e}" if worst else "0"
    allowed = f" of {case.tolerance:.0e}" if case.tolerance and off else ""
    return f"| {feature} | {' | '.join(cells)} | {off}{allowed} |"


if __name__ == "__main__":
    main(sys.argv[1:])
