"""A pass over the data in step with the other tasks: executions of steps, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.trainer.function import Steps
from tfdist.trainer.inputs import Input
from tfdist.trainer.passes import Pass
from tfdist.trainer.watchdog import Watchdog

if TYPE_CHECKING:
    from tfdist.trainer.synchronous import SynchronousEngine


def run_pass(engine: SynchronousEngine, model: Any, function: Steps, the_pass: Pass) -> dict[str, Any]:
    """Runs one pass; returns the logs of its last step."""
    logs: dict[str, Any] = {}
    step = 0
    with Watchdog(engine.step_timeout_s) as watchdog:
        for step, count, iterator in the_pass.data.epoch(the_pass.epoch, model.steps_per_execution):
            the_pass.begin(step)
            try:
                done = count
                if the_pass.data.needs_agreement or (the_pass.data.steps is None and count > 1):
                    logs, checksum, done = _execute_one_by_one(engine, function, the_pass.data, iterator, step, count)
                else:
                    logs, checksum = _execute(function, the_pass.data, iterator, count)
            except (StopIteration, tf.errors.OutOfRangeError):
                the_pass.data.ran_out(step)
                break
            if step == 0 and the_pass.data.source.split == "sliced":
                engine.agreement.check_same_batch(int(checksum))
            the_pass.end(step + done - 1, logs)
            engine.progress(done)
            watchdog.pat()
            when = f"after step {step + done} of epoch {the_pass.epoch + 1}"
            if engine.agreement.any_after_step(the_pass.stopped(), the_pass.numbers, when):
                break
            if done < count:
                the_pass.data.ran_out(step + done)
                break
    return logs


def _execute(function: Steps, data: Input, iterator: Any, count: int) -> tuple[dict[str, Any], Any]:
    """Runs `count` steps, the first on what was peeked at; returns the last one's logs and the first one's checksum."""
    peeked = data.take_peeked()
    if peeked is None:
        return function(iterator, count)
    logs, checksum = function.on_element(peeked)
    if count > 1:
        logs, _ = function(iterator, count - 1)
    return logs, checksum


def _execute_one_by_one(
    engine: SynchronousEngine,
    function: Steps,
    data: Input,
    iterator: Any,
    step: int,
    count: int,
) -> tuple[dict[str, Any], Any, int]:
    """Runs up to `count` steps, each after the tasks have told each other whether they have rows for it.

    Returns the logs and checksum of the last one, and how many there were.
    """
    result, done = None, 0
    while done < count:
        element = engine.next_element(data, iterator, step + done)
        if element is None:
            break
        result = function.on_element(element)
        done += 1
    if result is None:
        raise StopIteration
    return *result, done


class Predicting:
    """A predict function whose logs are the outputs of whole batches, which it also keeps."""

    def __init__(self, engine: SynchronousEngine, function: Steps, batches: list[Any]) -> None:
        self._engine, self._function, self._batches = engine, function, batches

    def on_element(self, element: Any) -> tuple[dict[str, Any], Any]:
        outputs, checksum = self._function.on_element(element)
        self._batches.append(self._engine.whole(outputs, int(element[1])))
        return {"outputs": self._batches[-1]}, checksum

    def __call__(self, iterator: Any, steps: int) -> tuple[dict[str, Any], Any]:
        first = len(self._batches)
        checksum = 0
        for _ in range(steps):
            element = next(iterator, None)
            if element is None:
                break
            _, checksum = self.on_element(element)
        if len(self._batches) == first:
            raise StopIteration
        self._batches[first:] = [concatenate(self._batches[first:])]
        return {"outputs": self._batches[-1]}, checksum


def concatenate(parts: Sequence[Any]) -> Any:
    def join(*outputs: Any) -> Any:
        if isinstance(outputs[0], tf.RaggedTensor):
            return tf.concat(outputs, axis=0)
        return np.concatenate([np.asarray(o) for o in outputs])

    return parts[0] if len(parts) == 1 else keras.tree.map_structure(join, *parts)
