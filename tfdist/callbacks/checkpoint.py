"""Training that can be stopped at any moment -> training that goes on from its last saved epoch."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import keras
import numpy as np

from tfdist import checkpoints, files, process, saving
from tfdist.errors import LoadError
from tfdist.internals import keras as internals
from tfdist.internals.tensorflow import local_component

logger = logging.getLogger(__name__)


class Checkpoint(keras.callbacks.Callback):
    """Saves training after epochs, and lets the next `fit` go on from the newest checkpoint.

    `fit(epochs=n)` then means n epochs in all: started again after a crash it trains the rest, and the end is that of
    a run without a crash, bit by bit, where the script sets a seed and its data comes in the same order (arrays do,
    shuffled too; with `steps_per_epoch` a new start begins the data anew). Weights, the optimizer, and the random
    generators of layers such as Dropout are saved; what other callbacks remember is not: EarlyStopping counts anew.

    The chief writes, and reads for all: the folder need not be visible to the other tasks, but every task's `fit` needs
    the callback. A kill at any moment leaves whole checkpoints; a broken one is passed over with a warning. The number
    of tasks may change in between. Checkpoints stay when training ends, and `done.json` says that it has. Use one
    folder for each `fit` of a script.

    The evaluator (`tfdist.run --evaluator`) must see the folder: its `fit` evaluates validation_data on each checkpoint
    there, `tfdist.evaluator` tells how.

    Args:
        folder: Where the checkpoints are, local or remote; made if missing. `tfdist.checkpoints` describes the files.
        keep: How many checkpoints stay, the newest; None for all.
        every_epochs: How often to save. The last epoch is always saved, also where a callback stops training. An
            epoch after which a weight is not a number is not, so that older checkpoints stay to go on from.
        evaluator_timeout_s: How long the evaluator, if there is one, waits for the next checkpoint, a day by default;
            more than an epoch takes.

    Raises:
        LoadError: In `fit`, on every task: the checkpoints are of another model, or not one of them is whole.
        SaveError: In `fit`, on the chief: a checkpoint can not be written, which is tried before the first step. Older
            ones are untouched.

    Example:
        model.fit(x, y, epochs=20, callbacks=[tfdist.callbacks.Checkpoint("run/checkpoints")])
    """

    # Keras may call the hooks of batches beside the next step: they only count.
    async_safe = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        every_epochs: int = 1,
        evaluator_timeout_s: float = 86400.0,
    ) -> None:
        super().__init__()
        for name, value in (("keep", 1 if keep is None else keep), ("every_epochs", every_epochs)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number from 1 on, not {value!r}")
        self.folder, self.keep, self.every_epochs = os.fspath(folder), keep, every_epochs
        if not self.folder:
            raise ValueError("folder is empty: name one, such as 'run/checkpoints'")
        if not evaluator_timeout_s > 0:  # nan neither
            raise ValueError(f"evaluator_timeout_s must be a number of seconds above 0, not {evaluator_timeout_s!r}")
        self.evaluator_timeout_s = evaluator_timeout_s
        self._step = 0  # at the start of the epoch
        self._batches = 0  # of the epoch
        self._unsaved: int | None = None  # the number of epochs done, where the last of them is not saved

    def on_train_begin(self, logs: Any = None) -> None:
        saving.build_optimizer(self.model)  # Keras' own fit may do so later
        position = self._restore()
        self._step = 0 if position is None else position.step
        self._unsaved = None
        if position is not None:
            internals.set_initial_epoch(self.model, position.epoch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # With steps_per_execution the last batch of an execution is told, which may lie past the epoch's end.
        self._batches = min(batch + 1, self.params.get("steps") or batch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._step += self._batches
        self._unsaved = epoch + 1
        is_last = epoch + 1 == self.params.get("epochs") or self.model.stop_training
        if is_last or (epoch + 1) % self.every_epochs == 0:
            self._save(epoch + 1)

    def on_train_end(self, logs: Any = None) -> None:
        if self._unsaved is not None:
            # A callback behind this one, or one of another task, has ended training after an epoch that was not saved.
            self._save(self._unsaved)
        if process.is_chief():
            checkpoints.end(self.folder, step=self._step)
        # Keras' own fit leaves it on the model, and the next fit would run no epoch.
        internals.set_initial_epoch(self.model, None)

    def _save(self, epochs: int) -> None:
        self._unsaved = None
        if not process.is_chief():
            return
        lost = next((v.path for v in self.model.trainable_variables if np.isnan(saving.values_of([v])[0]).any()), None)
        if lost is not None:
            logger.warning(
                "%s is not a number after epoch %d: that is not saved, and older checkpoints in %s stay",
                lost,
                epochs,
                self.folder,
            )
            return
        checkpoints.write(
            self.folder,
            self.model,
            checkpoints.Position(self._step, epochs),
            tasks=len(_tasks()),
            global_batch_size=self.params.get("batch_size"),
            seeds={"script": internals.RANDOM_SEED.find()(), "fit": _number_of_fit(self.model)},
        )
        checkpoints.prune(self.folder, self.keep, step=self._step)

    def _restore(self) -> checkpoints.Position | None:
        """Gives every task the newest checkpoint's values, which the chief reads; returns its position."""
        told: dict[str, Any] = {}
        error: Exception | None = None
        if process.is_chief():
            try:
                files.require_writable(self.folder)
                found = checkpoints.newest(self.folder)
                if found is not None:
                    checkpoints.read(found, self.model)
                    position = found.position
                    told = {"position": [position.step, position.epoch, position.batch]}
                    _log(found, len(_tasks()), self.params.get("epochs"))
                checkpoints.begin(self.folder)
            except Exception as caught:
                error, told = caught, {"error": str(caught) or type(caught).__name__}
        told = _from_chief(told)
        if error is not None:
            raise error
        if "error" in told:
            raise LoadError(f"{_tasks()[0]} could not go on from the checkpoints: {told['error']}")
        if "position" not in told:
            return None
        _share(self.model)
        return checkpoints.Position(*told["position"])


def _log(found: checkpoints.Checkpoint, tasks: int, epochs: int | None) -> None:
    position, saved_by = found.position, found.manifest.get("tasks")
    if epochs is not None and position.epoch >= epochs:
        logger.warning(
            "all %d epochs are done, so nothing is left to train: %s was saved after epoch %d. Give more epochs (they "
            "count from the first), or another folder for another training",
            epochs,
            found.path,
            position.epoch,
        )
        return
    logger.info(
        "going on after epoch %d (step %d) from %s%s",
        position.epoch,
        position.step,
        found.path,
        "" if saved_by == tasks else f"; it was saved by {saved_by} tasks, now there are {tasks}",
    )


def _number_of_fit(model: Any) -> int | None:
    """Returns how many fits this model had before this one: part of the order of shuffled arrays."""
    fits = vars(model).get("_tfdist_fits")
    return None if fits is None else fits - 1


def _tasks() -> tuple[Any, ...]:
    current = process.current()
    return ("this task",) if current is None or current.group is None else tuple(current.group.tasks)


def _from_chief(told: dict[str, Any]) -> dict[str, Any]:
    current = process.current()
    if current is None or current.group is None:
        return told
    text = np.frombuffer(json.dumps(told).encode(), np.uint8)
    answer: dict[str, Any] = json.loads(current.group.broadcast([text], root=0, tag="Checkpoint")[0].tobytes())
    return answer


def _share(model: Any) -> None:
    """Gives all tasks the chief's values, so that only the chief must see the folder."""
    current = process.current()
    if current is None or current.group is None:
        return
    variables = [variable for group in checkpoints.state(model).values() for variable in group]
    arrays = saving.values_of(variables)
    for variable, array in zip(
        variables, current.group.broadcast(arrays, root=0, tag="Checkpoint values"), strict=True
    ):
        local_component(internals.native(variable)).assign(array)
