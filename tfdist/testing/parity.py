"""A training function -> an error unless it gives on several tasks what it gives in one plain Keras process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.errors import ParityError, UnsupportedError
from tfdist.testing.cluster import PLAIN, TIMEOUT_S, LocalCluster
from tfdist.testing.comparison import FLOOR, TOLERANCE, Comparison, compare
from tfdist.testing.verifying import verify


def assert_parity(
    function: Callable[..., Any],
    *arguments: Any,
    workers: int | Sequence[int] = 2,
    ps: int = 0,
    tolerance: float = TOLERANCE,
    floor: float = FLOOR,
    strategy: bool | str | Mapping[str, Any] = True,
    seed: int = 0,
    timeout_s: float = TIMEOUT_S,
    env: Mapping[str, str] | None = None,
) -> None:
    """Raises unless `function` gives on N workers the numbers that it gives in one process of plain Keras.

    The function gets a strategy, makes and compiles its model in the strategy's scope, and returns numbers and arrays:
    logs, weights, predictions. In the plain process that is TensorFlow's default strategy, which does nothing, and
    `fit` is Keras' own. Every process starts with the same seed. Leave out what differs by its nature: dropout draws
    other numbers on each task, and `fit(shuffle=True)`, the default for arrays, takes another order than Keras' own
    (the same on any number of tasks). So pass `shuffle=False`.

    A function without parameters is one that returns a compiled model, as for `verify`, which then does the training
    and looks at every step: `assert_parity(build, (x, y))`.

    Args:
        function: At the top level of a file, as for `local_cluster`.
        arguments: What it gets after the strategy; or the data of the model that it returns.
        workers: The number of workers, or several to try one after the other.
        ps: The number of parameter servers. One worker trains through them as one process does; several train at their
            own pace, and no two of their runs give the same numbers.
        tolerance: The largest max|a - b| / max|b| of an array that counts as equal.
        floor: Arrays whose largest value is below this are compared with it instead.
        strategy: What the workers make: True, a kind, or arguments of `create_strategy`.
        seed: What `keras.utils.set_random_seed` is given in every process.
        timeout_s: How long each number of workers may take.
        env: Environment variables of all processes.

    Raises:
        ParityError: The numbers differ; the message is a table of the worst arrays.
        UnsupportedError: Parameter servers with several workers, or with a function that returns a compiled model.

    Example:
        def train(strategy):
            with strategy.scope():
                model = build()
                model.compile("adam", "mse")
            history = model.fit(x, y, batch_size=32, shuffle=False, verbose=0)
            return {**history.history, "weights": model.get_weights()}

        def test_training_gives_what_one_process_gives():
            tfdist.testing.assert_parity(train)
    """
    counts = [workers] if isinstance(workers, int) else list(workers)
    if ps and counts != [1]:
        raise UnsupportedError(
            f"workers={workers} with ps={ps}: several workers train through parameter servers at their own pace, and "
            "no two of their runs give the same numbers. Pass workers=1, which gives those of one process; for more, "
            "let cluster.run(function) return what must hold of any run, such as model.optimizer.iterations"
        )
    if not inspect.signature(function).parameters:
        if ps:
            raise UnsupportedError(
                f"ps={ps}: {function.__qualname__}() returns a model, whose steps are compared on workers that train "
                "together; write a function of a strategy that trains it, and returns logs and weights"
            )
        verify(
            function,
            *arguments,
            workers=workers,
            tolerance=tolerance,
            strategy=strategy,
            seed=seed,
            timeout_s=timeout_s,
            env=env,
        ).check()
        return

    def results(count: int, kind: bool | str | Mapping[str, Any]) -> list[Any]:
        servers = 0 if kind == PLAIN else ps
        with LocalCluster(workers=count, ps=servers, strategy=kind, seed=seed, timeout_s=timeout_s, env=env) as cluster:
            return cluster.run(function, *arguments)

    (expected,) = results(1, PLAIN)
    too_far: list[tuple[int, str, Comparison]] = []
    for count in counts:
        for index, got in enumerate(results(count, strategy)):
            comparison = compare(got, expected, tolerance=tolerance, floor=floor)
            if not comparison.differences:
                raise ParityError(f"{function.__qualname__} returns nothing to compare: return logs, weights, outputs")
            if not comparison:
                too_far.append((count, "chief 0" if ps else f"worker {index}", comparison))
    if too_far:
        raise ParityError(_table(function.__qualname__, too_far, tolerance))


def _table(name: str, too_far: Sequence[tuple[int, str, Comparison]], tolerance: float) -> str:
    lines = [
        f"{name} gives other numbers on several workers than in one process",
        f"{'workers':>7}  {'task':<9} {'array':<40} max|a-b|/max|b|, at most {tolerance:g}",
    ]
    for count, task, comparison in too_far:
        lines += [f"{count:>7}  {task:<9} {line}" for line in str(comparison).splitlines()]
    lines.append("(shuffle=True and dropout are other on purpose: pass shuffle=False to fit, and leave dropout out)")
    return "\n".join(lines)
