"""The evaluator: a task beside the cluster, in which `fit` trains nothing and evaluates what the others train.

    python -m tfdist.run --workers 2 --evaluator train.py

It runs the same script, alone on a device of its own:

    model.fit(
        x, y, epochs=20,
        validation_data=(x_test, y_test),
        callbacks=[tfdist.callbacks.Checkpoint("run/checkpoints")],
    )

There it waits for whole checkpoints in the folder and evaluates validation_data on each, in order. It ends by itself
when training has ended and the last checkpoint is evaluated, and returns a History of `val_loss` and the metrics: what
the tasks that train get for the same weights. What stands in the folder from before is evaluated as well; what was
removed before its turn (`keep`) is named and passed over. Then the model has the weights of the last checkpoint,
`evaluate` and `predict` work in the evaluator alone, and saving is left to the chief.

The tasks that train validate all the same: they do not know of an evaluator, and EarlyStopping may need the numbers. To
leave it to the evaluator, give validation_data there alone:

    config = tfdist.resolve()
    is_evaluator = config is not None and config.is_evaluator
    model.fit(..., validation_data=(x_test, y_test) if is_evaluator else None)

Callbacks get `on_train_begin`, for each checkpoint `on_epoch_begin`, `on_test_...` and `on_epoch_end` with `val_...`
alone in the logs, and `on_train_end`; `stop_training` has no effect, for training ends elsewhere. Those of Keras that
steer training, save or send do not run, those of tfdist do nothing. CSVLogger and TensorBoard write beside the chief's
files: `log.evaluator.csv` for `log.csv`, `logs/evaluator` for `logs`.

What tasks do together (`tfdist.barrier`, `tfdist.all_reduce`) is an error in the evaluator, which is none of them.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import keras

from tfdist import checkpoints, process, saving
from tfdist.callbacks import Checkpoint
from tfdist.errors import UnsupportedError, WaitError
from tfdist.internals import keras as internals
from tfdist.trainer import loop
from tfdist.trainer.callbacks import flat, for_evaluator
from tfdist.trainer.synchronous import SynchronousEngine

logger = logging.getLogger(__name__)

LOOK_S = 1.0
SAY_AFTER_S = 5.0
# How long tasks wait for each other at their start, where the launcher was not told.
START_TIMEOUT_S = 300.0


def fit(engine: SynchronousEngine, model: Any, *args: Any, **kwargs: Any) -> keras.callbacks.History:
    """Evaluates validation data on the checkpoints of a training elsewhere; arguments are those of `keras.Model.fit`.

    Raises:
        UnsupportedError: There is no validation data, or no Checkpoint among the callbacks.
        LoadError: The checkpoints are of another model.
        WaitError: Neither a checkpoint nor training's end has come in time.
    """
    bound = inspect.signature(loop.fit).bind(engine, model, *args, **kwargs)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    internals.assert_compiled(model, "fit")
    checkpoint = _checkpoint_of(given.callbacks)
    with engine.errors():
        end = _End(checkpoint.folder)
        x, y, sample_weight = internals.UNPACK.find()(_validation_data_of(given))
        batch_size, steps = given.validation_batch_size or given.batch_size, given.validation_steps
        validation = engine.input(x, y, sample_weight, batch_size=batch_size, steps=steps)
        engine.prepare(model, validation.source.element_spec, training=False)
        saving.build_optimizer(model)
        callbacks = keras.callbacks.CallbackList(
            for_evaluator(given.callbacks, checkpoint),
            add_history=True,
            verbose=given.verbose,
            epochs=given.epochs,
            model=model,
        )
        callbacks.on_train_begin()
        logs = None
        for found in _arriving(checkpoint, end):
            if not _read(found, model):
                continue
            epoch = found.position.epoch - 1
            callbacks.on_epoch_begin(epoch)
            logs = loop.validate(engine, model, validation, callbacks)
            callbacks.on_epoch_end(epoch, logs)
            if given.verbose != 0:
                internals.PRINT.find()(_line(found.position, logs))
        loop.finish_weights(model)
        callbacks.on_train_end(logs)
    return model.history


def _checkpoint_of(callbacks: Any) -> Checkpoint:
    found = next((callback for callback in flat(callbacks) if isinstance(callback, Checkpoint)), None)
    if found is None:
        raise UnsupportedError(
            "the evaluator's fit evaluates the checkpoints of a training, and no callback of this one saves any: add "
            'callbacks=[tfdist.callbacks.Checkpoint("run/checkpoints")], on every task, or start without --evaluator'
        )
    return found


def _validation_data_of(given: SimpleNamespace) -> Any:
    if given.validation_data is None and given.validation_split:
        split = internals.SPLIT.find()
        return split((given.x, given.y, given.sample_weight), validation_split=given.validation_split)[1]
    if given.validation_data is None:
        raise UnsupportedError(
            "the evaluator's fit evaluates validation_data on each checkpoint, and has none: add validation_data=(x, "
            "y), or start without --evaluator"
        )
    return given.validation_data


class _End:
    """The end of a training elsewhere, as it can be seen in its folder.

    A training that goes on removes what an earlier one has left there, but maybe only after we looked. Notes bear the
    name of a run under one launcher, and the attempt. Where that does not tell (there is no such launcher, or we alone
    were started again), a note that stays as it was for as long as tasks may wait for each other at their start is of
    this training after all, which had ended before we came.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._fit = folder, checkpoints.count_fit(folder)
        self._run, self._attempt = checkpoints.this_run()
        self._from_before = checkpoints.ended(folder)
        told = process.LaunchInfo.read(os.environ).start_timeout_s
        self._believed_at = time.monotonic() + (START_TIMEOUT_S if told is None else told)

    def has_come(self) -> bool:
        noted = checkpoints.ended(self._folder)
        if noted is None:
            self._from_before = None
            return False
        if self._run is not None and noted.get("run") != self._run:
            return False
        if self._run is not None and noted.get("attempt") == self._attempt:
            return bool(noted.get("fit", 0) >= self._fit)
        return noted != self._from_before or time.monotonic() >= self._believed_at


def _arriving(callback: Checkpoint, end: _End) -> Iterator[checkpoints.Checkpoint]:
    """Yields the checkpoints in the callback's folder as they come, in order, until training has ended."""
    seen: list[str] = []
    epoch = 0
    since, has_said = time.monotonic(), False
    while True:
        is_last_look = end.has_come()  # asked first: what was saved before is there then
        new = [path for path in checkpoints.whole(callback.folder) if path not in seen]
        for path in new:
            found = _open(path)
            if found is not None:
                _say_what_is_missing(callback, epoch, found.position.epoch)
                epoch = found.position.epoch
                yield found
                since = time.monotonic()
        seen += new
        if is_last_look:
            return
        if new:
            continue
        waited = time.monotonic() - since
        if waited >= callback.evaluator_timeout_s:
            raise WaitError(
                f"no checkpoint has come to {callback.folder} for {callback.evaluator_timeout_s:g} s, after "
                f"{_done(epoch)}, nor word that training has ended: was the chief lost? Where an epoch takes longer: "
                "Checkpoint(..., evaluator_timeout_s=...)"
            )
        if waited >= SAY_AFTER_S and not has_said:
            has_said = True
            logger.warning(
                "the evaluator waits for checkpoints in %s, for %g s at most each; so far %s",
                callback.folder,
                callback.evaluator_timeout_s,
                _done(epoch),
            )
        time.sleep(LOOK_S)


def _open(path: str) -> checkpoints.Checkpoint | None:
    try:
        return checkpoints.at(path)
    except checkpoints.BrokenError as error:
        if checkpoints.is_whole(path):  # else it was removed meanwhile
            logger.warning("%s is broken (%s) and is passed over", path, error)
        return None


def _say_what_is_missing(callback: Checkpoint, after: int, before: int) -> None:
    missing = [epoch for epoch in range(after + 1, before) if epoch % callback.every_epochs == 0]
    if missing:
        logger.warning(
            "%s %s not evaluated: there is no checkpoint of %s in %s any more (keep=%s)",
            f"epoch {missing[0]}" if len(missing) == 1 else f"{len(missing)} epochs from {missing[0]} to {missing[-1]}",
            "is" if len(missing) == 1 else "are",
            "it" if len(missing) == 1 else "them",
            callback.folder,
            callback.keep,
        )


def _read(found: checkpoints.Checkpoint, model: Any) -> bool:
    """Puts a checkpoint's values into the model; returns False where it was removed meanwhile."""
    try:
        checkpoints.read(found, model)
    except Exception:
        if checkpoints.is_whole(found.path):
            raise
        return False
    return True


def _done(epoch: int) -> str:
    return f"epoch {epoch}" if epoch else "none"


def _line(position: checkpoints.Position, logs: dict[str, Any]) -> str:
    numbers = " - ".join(f"{name}: {_shown(value)}" for name, value in logs.items())
    return f"epoch {position.epoch}, step {position.step}: {numbers}"


def _shown(value: Any) -> str:
    """As many digits as Keras shows."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if abs(value) > 1e-3 else f"{value:.4e}"
