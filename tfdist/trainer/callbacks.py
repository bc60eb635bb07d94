"""Which callbacks run on this task, and what the tasks must know of each other's.

Every callback runs on every task, with the same logs, so that all take the same decision; but those of Keras that write
files, send messages or draw run on the chief alone, or all tasks would write the same file at once. `docs/callbacks.md`
says so to users; a test compares it with the two tuples here, and these with what Keras has.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import keras

from tfdist.trainer.passes import Watched

# BackupAndRestore loads in on_train_begin; `fit` then gives the chief's variables and epoch to all tasks.
ON_THE_CHIEF = (
    "BackupAndRestore",
    "CSVLogger",
    "ModelCheckpoint",
    "OrbaxCheckpoint",  # Keras 3.13
    "ProgbarLogger",
    "RemoteMonitor",
    "TensorBoard",
)
ON_EVERY_TASK = (
    "EarlyStopping",
    "History",
    "LambdaCallback",
    "LearningRateScheduler",
    "ReduceLROnPlateau",
    "SwapEMAWeights",
    "TerminateOnNaN",
)
# A task beside the cluster, which trains nothing; the others steer training, save, or send what the chief sends.
IN_THE_EVALUATOR = ("CSVLogger", "History", "LambdaCallback", "SwapEMAWeights", "TensorBoard")
NOT_IN_THE_EVALUATOR = tuple(
    getattr(keras.callbacks, name)
    for name in ON_THE_CHIEF + ON_EVERY_TASK
    if name not in IN_THE_EVALUATOR and hasattr(keras.callbacks, name)
)
CHIEF_ONLY = tuple(getattr(keras.callbacks, name) for name in ON_THE_CHIEF if hasattr(keras.callbacks, name))
# These change the model: on some tasks only, they would leave the others with another one.
_CHANGE_THE_MODEL = (
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)
_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def flat(callbacks: Any) -> list[Any]:
    """Returns the callbacks of what a user passes as `callbacks`: one, nested lists, a CallbackList, None."""
    every: list[Any] = []
    for callback in [] if callbacks is None else keras.tree.flatten(callbacks):
        every += flat(callback.callbacks) if isinstance(callback, keras.callbacks.CallbackList) else [callback]
    return every


def for_this_task(callbacks: Any, *, is_chief: bool) -> list[Any]:
    """Returns the callbacks that this task calls, in order."""
    every = [] if callbacks is None else keras.tree.flatten(callbacks)
    every = [list_for_this_task(c, is_chief=is_chief) if _is_list(c) else c for c in every]
    return [c for c in every if is_chief or not isinstance(c, CHIEF_ONLY)]


def list_for_this_task(callbacks: keras.callbacks.CallbackList, *, is_chief: bool) -> keras.callbacks.CallbackList:
    """Returns a user's CallbackList as this task calls it; the user's own stays as it is."""
    if is_chief:
        return callbacks
    mine = copy.copy(callbacks)
    mine.callbacks = for_this_task(callbacks.callbacks, is_chief=False)
    return mine


def for_evaluator(callbacks: Any, saver: Any) -> list[Any]:
    """Returns the callbacks that the evaluator calls, in order; those that write have files of their own.

    Args:
        callbacks: What the user passes.
        saver: The one of them that saves what is evaluated.
    """
    every = flat(callbacks)
    saved_swapped = [c for c in every[: every.index(saver)] if getattr(c, "swap_on_epoch", False)]
    mine = [c for c in every if not isinstance(c, NOT_IN_THE_EVALUATOR) and c not in saved_swapped]
    return [_in_evaluator(callback) for callback in mine]


def _in_evaluator(callback: Any) -> Any:
    mine = copy.copy(callback)
    if isinstance(callback, keras.callbacks.CSVLogger):
        stem, suffix = os.path.splitext(callback.filename)
        mine.filename = f"{stem}.evaluator{suffix}"
    elif isinstance(callback, keras.callbacks.TensorBoard):
        mine.log_dir = os.path.join(callback.log_dir, "evaluator")
    elif isinstance(callback, keras.callbacks.SwapEMAWeights):
        mine.swap_on_epoch = False  # each epoch begins with the weights of a checkpoint
    else:
        return callback
    return mine


def needed_on_every_task(callbacks: Any) -> list[str]:
    """Returns the names of those of Keras' callbacks that change the model, in order."""

    def name_of(callback: Any) -> str | None:
        if isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights:
            return "EarlyStopping(restore_best_weights=True)"
        return next((kind.__name__ for kind in _CHANGE_THE_MODEL if isinstance(callback, kind)), None)

    return [name for name in map(name_of, flat(callbacks)) if name is not None]


def may_act_between_steps(callbacks: Any) -> bool:
    """Whether code of the user's runs between two steps of `fit`, which might change the learning rate."""
    theirs = [callback for callback in flat(callbacks) if not _leaves_optimizer_alone(callback)]
    return any(_overrides(callback, hook) for callback in theirs for hook in _BATCH_HOOKS)


def watched(callbacks: Any, kind: str) -> Watched:
    """Whether one of the callbacks gets the logs of single "train" or "test" batches, and acts on them."""
    theirs = [callback for callback in flat(callbacks) if _sees_batches(callback, kind)]
    if not theirs:
        return Watched.NEVER
    bars = (keras.callbacks.ProgbarLogger,)
    return Watched.SOMETIMES if all(type(callback) in bars for callback in theirs) else Watched.ALWAYS


def _sees_batches(callback: Any, kind: str) -> bool:
    return any(_overrides(callback, hook) for hook in ("on_batch_end", f"on_{kind}_batch_end"))


def _is_list(callback: Any) -> bool:
    return isinstance(callback, keras.callbacks.CallbackList)


def _leaves_optimizer_alone(callback: Any) -> bool:
    """Whether it is one of Keras' own, but for that which takes functions, or may run beside the next step."""
    kind = type(callback)
    name = kind.__name__
    is_keras = name in ON_THE_CHIEF + ON_EVERY_TASK and kind is getattr(keras.callbacks, name, None)
    return (is_keras and name != "LambdaCallback") or getattr(callback, "async_safe", False)


def _overrides(callback: Any, hook: str) -> bool:
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(keras.callbacks.Callback, hook)
