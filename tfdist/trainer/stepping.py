"""A pass over the data in step with the other tasks: executions of steps, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.trainer.function import Steps
from tfdist.trainer.inputs import Input
from tfdist.trainer.watchdog import Watchdog

if TYPE_CHECKING:
    from tfdist.trainer.synchronous import SynchronousEngine


def run_epoch(
    engine: SynchronousEngine,
    model: Any,
    function: Steps,
    data: Input,
    epoch: int,
    begin: Callable[[int], None],
    end: Callable[[int, Any], None],
    stopped: Callable[[], bool],
    numbers: Sequence[Any] = (),
) -> dict[str, Any]:
    """Runs one pass; returns the logs of its last step.

    Args:
        numbers: Variables of one number each that no callback may change on some tasks only.
        begin, end: Called before and after each execution of steps.
        stopped: Asked after each of them, on every task.
    """
    logs: dict[str, Any] = {}
    step = 0
    with Watchdog(engine.step_timeout_s) as watchdog:
        for step, count, iterator in data.epoch(epoch, model.steps_per_execution):
            begin(step)
            try:
                done = count
                if data.needs_agreement or (data.steps is None and count > 1):
                    logs, checksum, done = _execute_one_by_one(engine, function, data, iterator, step, count)
                else:
                    logs, checksum = function(iterator, count)
            except (StopIteration, tf.errors.OutOfRangeError):
                data.ran_out(step)
                break
            if step == 0 and data.source.split == "sliced":
                engine.agreement.check_same_batch(int(checksum))
            end(step + done - 1, logs)
            engine.progress(step + done)
            watchdog.pat()
            if engine.agreement.any_after_step(stopped(), numbers, f"after step {step + done} of epoch {epoch + 1}"):
                break
            if done < count:
                data.ran_out(step + done)
                break
    return logs


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
