"""Tasks that silently drift apart -> an error that names the variable and the step."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.trainer.agreement import check_same


class CheckSame(keras.callbacks.Callback):
    """Compares the variables of all tasks every few steps, by checksums, and ends training where they differ.

    All tasks hold the same values after every step; what breaks that is code that changes a variable on some tasks
    only, or from a task's own rows past the optimizer. `fit` compares after every epoch; this finds the step. Every
    task's `fit` needs it. A check reads all values once (about two seconds for 1 GB) and sends a few bytes.

    Args:
        every_steps: How often to compare, in steps of the whole `fit`.
        trainable_only: Whether to leave out moving statistics, seeds and the optimizer's variables.

    Raises:
        MismatchError: In `fit`, on every task: the message names the first variable that differs, the tasks, the
            epoch and the step, both counted from 1.

    Example:
        model.fit(x, y, epochs=20, callbacks=[tfdist.callbacks.CheckSame(every_steps=100)])
    """

    def __init__(self, every_steps: int = 100, *, trainable_only: bool = False) -> None:
        super().__init__()
        if isinstance(every_steps, bool) or not isinstance(every_steps, int) or every_steps < 1:
            raise ValueError(f"every_steps must be a whole number from 1 on, not {every_steps!r}")
        self.every_steps, self.trainable_only = every_steps, trainable_only
        self._epoch = 0
        self._batches = 0  # of the epoch
        self._unchecked = 0  # steps since the last check

    def on_train_begin(self, logs: Any = None) -> None:
        self._unchecked = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._batches = epoch, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # With steps_per_execution the last batch of an execution is told, which may lie past the epoch's end.
        done = min(batch + 1, self.params.get("steps") or batch + 1)
        self._unchecked += done - self._batches
        self._batches = done
        if self._unchecked < self.every_steps:
            return
        self._unchecked = 0
        what = self.model.trainable_variables if self.trainable_only else self.model
        check_same(what, f"after step {done} of epoch {self._epoch + 1}")
