"""Which of the user's callbacks run on this task.

Every callback runs on every task, with the same logs, so that all take the same decision; but those of Keras that write
files, send messages or draw run on the chief alone, or all tasks would write the same file at once.
"""

from __future__ import annotations

from typing import Any

import keras

# BackupAndRestore loads in on_train_begin; `fit` then gives the chief's variables and epoch to all tasks.
CHIEF_ONLY = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def for_this_task(callbacks: Any, *, is_chief: bool) -> list[Any]:
    """Returns the callbacks that this task calls, in order."""
    every = [] if callbacks is None else keras.tree.flatten(callbacks)
    return [c for c in every if is_chief or not isinstance(c, CHIEF_ONLY)]
