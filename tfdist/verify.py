"""Checks your own model: does it train on N workers as in one process of plain Keras?

Usage by case
-------------
A file with a function that returns a compiled model, and one that returns what `fit` takes:

    # my_training.py
    def build():
        model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    def data():
        return x, y  # or (x, y, sample_weight), a tf.data.Dataset of batches, a keras.utils.PyDataset

    python -m tfdist.verify my_training.py:build my_training.py:data --workers 2,3

One function that returns all of it, `(model, x, y)` or `(model, dataset)`, in a module:

    python -m tfdist.verify my_project.training:everything

For a program instead of a reader:

    python -m tfdist.verify my_training.py:build my_training.py:data --json

The functions take no arguments. The file is imported by every process, so what trains or calls `create_strategy` stands
under `if __name__ == "__main__":`. In a test, `tfdist.testing.verify` gives the same report.

What is compared
----------------
The model trains for a few steps (--epochs, --steps, --batch-size) in one process of plain Keras and on N workers of
this host, from one seed and without shuffling:
    data                        what the functions return is the same in every process
    weights at the start        to the last bit
    loss and metrics            after each batch, after each epoch, of evaluate
    change of the weights       of every variable in every step; so a small learning rate hides nothing
    optimizer's variables       after every step
    change of other state       moving statistics, counters, seeds
    predictions                 of the first rows
    same bits on all tasks      after every step
Arrays are cut so that the last batch of an epoch is smaller: workers get uneven shares.

Verdicts
--------
right  not further off than --tolerance, or than ten times what rounding alone does to this training by then
WRONG  further off. Below the table stand the first step at which anything is wrong, and which variables, in the order
       of the model's layers
noise  rounding alone changes it as much as any fault would

What rounding does is measured: the one process trains twice more, with the rows of each batch in reverse order, and
with each initial weight one rounding away from itself.

Dropout and noise layers are switched off, since each task draws other numbers by design. Notes below the table say so,
and name what else of the model is known to be other on several tasks.

Exit codes
----------
0    all is right
1    something is wrong, or the training itself failed
2    wrong usage; nothing was started
130  Ctrl-C
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tfdist.errors import LaunchError, TfdistError

EXIT_WRONG = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (that of this process by default) and returns the exit code."""
    try:
        values = _parser().parse_args(sys.argv[1:] if argv is None else argv)
        job = _job(values)
    except LaunchError as error:
        print(f"tfdist: {error}", file=sys.stderr)
        return EXIT_USAGE
    # Only now, so that --help is quick.
    import json

    from tfdist.testing.verifying import verify_described

    def say(words: str) -> None:
        print(f"tfdist: {words}", file=sys.stderr, flush=True)

    try:
        report = verify_described(
            job,
            values.workers,
            tolerance=values.tolerance,
            strategy="synchronous" if values.synchronous else True,
            timeout_s=values.timeout,
            on_progress=say,
        )
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        # What a function or fit raised in a process: its cause holds what that process wrote.
        wrote = f"{error.__cause__}\n" if isinstance(error.__cause__, TfdistError) else ""
        print(f"{wrote}tfdist: the training failed: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_WRONG
    print(json.dumps(report.as_dict(), indent=1) if values.json else report)
    return 0 if report else EXIT_WRONG


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(message)


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m tfdist.verify",
        description="Checks that a model trains on N workers as in one process of plain Keras, number by number.",
        epilog="What is compared, what verdicts mean: `python -m pydoc tfdist.verify`.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        help="file.py:function or module:function; returns a compiled model, or (model, x, y), (model, dataset)",
    )
    parser.add_argument("data", nargs="?", help="the same for a function that returns the data: (x, y), a dataset")
    parser.add_argument("--workers", type=_counts, default=(2,), metavar="N[,N]", help="how many workers (2)")
    parser.add_argument("--epochs", type=_whole, default=2, metavar="N", help="epochs (2)")
    parser.add_argument("--steps", type=_whole, default=20, metavar="N", help="steps of an epoch, at most (20)")
    parser.add_argument("--batch-size", type=_whole, default=32, metavar="N", help="rows of a batch of arrays (32)")
    parser.add_argument("--tolerance", type=_size, default=1e-5, metavar="T", help="always right up to this (1e-5)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of every process (0)")
    parser.add_argument("--synchronous", action="store_true", help='use the strategy create_strategy("synchronous")')
    parser.add_argument("--timeout", type=_size, default=600.0, metavar="S", help="for each number of workers (600)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_whole(part) for part in text.split(","))


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _size(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _job(values: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": describe(values.model),
        "data": None if values.data is None else {"function": describe(values.data)},
        **{name: getattr(values, name) for name in ("epochs", "batch_size", "steps", "seed")},
    }


def describe(text: str) -> Mapping[str, str]:
    """Returns how a task finds the function that `file.py:name` or `module:name` names, without importing it here.

    Raises:
        LaunchError: There is no such file or function.
    """
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise LaunchError(f"{text!r} names no function; write train.py:build, or package.module:build")
    if where.endswith(".py"):
        path, module = Path(where), Path(where).stem
        if not path.is_file():
            raise LaunchError(f"the file {where!r} is not in {os.getcwd()!r}")
        # It may import what stands beside it, as when it is run.
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
    else:
        path, module = _path_of(where), where
    defined = _functions(path)
    if name not in defined:
        known = ", ".join(list(defined)[:8]) or "none"
        raise LaunchError(f"{path} has no function {name!r} at its top level (it has {known})")
    required = defined[name]
    if required:
        raise LaunchError(
            f"{name}({', '.join(required)}) in {path} takes arguments; write one without, which calls it with them"
        )
    return {"module": module, "file": str(path.resolve()), "name": name}


def _path_of(module: str) -> Path:
    # The outermost package alone is looked up: to look inside one is to import it.
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin is not None:
        if not rest:
            return Path(spec.origin)
        for folder in spec.submodule_search_locations or ():
            inner = Path(folder, *rest)
            for path in (inner.with_suffix(".py"), inner / "__init__.py"):
                if path.is_file():
                    return path
    raise LaunchError(f"there is no module {module!r} to be found from {os.getcwd()!r}")


def _functions(path: Path) -> dict[str, list[str]]:
    """The functions at a file's top level, and the arguments that each must be given."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise LaunchError(f"{path}, line {error.lineno}: {error.msg}") from None
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            given = [*node.args.posonlyargs, *node.args.args]
            required = [a.arg for a in given[: len(given) - len(node.args.defaults)]]
            required += [
                a.arg for a, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if default is None
            ]
            found[node.name] = required
    return found


if __name__ == "__main__":
    if sys.path[:1] == [""]:
        sys.path[0] = os.getcwd()
    sys.exit(main())
