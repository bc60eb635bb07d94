"""A step as a Python function -> a function that TensorFlow runs, on elements or on an iterator over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf


class Steps(Protocol):
    """What the loop runs: steps on what an iterator yields, or one on an element at hand."""

    def on_element(self, element: Any) -> tuple[Any, Any]:
        """Returns (logs, checksum) of one step on (data, rows, total, checksum)."""

    def __call__(self, iterator: Any, steps: int) -> tuple[Any, Any]:
        """Returns (logs, checksum) of the last of `steps` steps; raises StopIteration at the end of the data."""


class StepFunction:
    """Runs a step, once for each element.

    Args:
        step: (data, rows, total, checksum) -> (logs, checksum).
        eager: Runs it as Python, for debugging.
        jit_compile: Compiles it with XLA.
    """

    def __init__(self, step: Callable[..., Any], *, eager: bool, jit_compile: bool) -> None:
        self._eager = eager
        if eager:
            self._on_element = step
            return
        traced = tf.function(step, autograph=False, reduce_retracing=True, jit_compile=jit_compile)
        body = traced if jit_compile else step

        def single(iterator: Any) -> Any:
            return body(*iterator.get_next())

        def several(iterator: Any, steps: tf.Tensor) -> Any:
            def next_step(number: tf.Tensor) -> tf.Tensor:
                logs, _ = body(*iterator.get_next())
                with tf.control_dependencies(tf.nest.flatten(logs)):
                    return number + 1

            tf.while_loop(lambda n: n < steps - 1, next_step, [tf.constant(0)], parallel_iterations=1)
            return body(*iterator.get_next())

        self._on_element = traced
        self._single = tf.function(single, autograph=False, reduce_retracing=True)
        self._several = tf.function(several, autograph=False, reduce_retracing=True)

    def on_element(self, element: Any) -> tuple[Any, Any]:
        """Returns (logs, checksum) of one step on an element that is at hand."""
        return self._on_element(*element)

    def __call__(self, iterator: Any, steps: int) -> tuple[Any, Any]:
        """Returns (logs, checksum) of the last of `steps` steps on what the iterator yields.

        Raises:
            StopIteration, tf.errors.OutOfRangeError: It has ended.
        """
        if self._eager:
            return [self.on_element(next(iterator)) for _ in range(steps)][-1]
        return self._single(iterator) if steps == 1 else self._several(iterator, tf.constant(steps))
