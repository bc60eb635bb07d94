"""The loop: epochs, steps, callbacks, validation, logs and History, as Keras' own, over an engine.

It knows nothing of devices or messages. Signatures and meaning are those of `keras.Model.fit`, `evaluate` and
`predict`; `batch_size` and a dataset's batches are global batches.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import keras

from tfdist.internals import keras as internals
from tfdist.trainer.asynchronous import AsynchronousEngine
from tfdist.trainer.callbacks import (
    for_this_task,
    list_for_this_task,
    may_act_between_steps,
    needed_on_every_task,
    watched,
)
from tfdist.trainer.passes import Pass
from tfdist.trainer.stepping import concatenate
from tfdist.trainer.synchronous import SynchronousEngine

logger = logging.getLogger(__name__)
Engine = SynchronousEngine | AsynchronousEngine


def fit(
    engine: Engine,
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: Any = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
) -> keras.callbacks.History:
    """Trains the model on all tasks of the engine; see `keras.Model.fit`."""
    internals.assert_compiled(model, "fit")
    cap = internals.MAX_EPOCHS.find()()
    if cap and cap < epochs:
        warnings.warn(f"Limiting epochs to {cap}", stacklevel=3)
        epochs = cap
    with engine.errors():
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = internals.SPLIT.find()(
                (x, y, sample_weight), validation_split=validation_split
            )
        data: Any = engine.input(
            x,
            y,
            sample_weight,
            model=model,
            batch_size=batch_size,
            steps=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
        )
        validation = None
        if validation_data is not None:
            vx, vy, vw = internals.UNPACK.find()(validation_data)
            validation = engine.input(
                vx, vy, vw, batch_size=validation_batch_size or batch_size, steps=validation_steps
            )
        engine.agreement.require_same(
            "fit",
            {
                "epochs": epochs,
                "initial_epoch": initial_epoch,
                "steps_per_execution": model.steps_per_execution,
                **engine.summary(model),
                **data.summary(""),
                **(validation.summary("validation ") if validation else {}),
                "validation_freq": validation_freq if validation else None,
                "callbacks that change the model": needed_on_every_task(callbacks),
            },
        )
        acts_between_steps = engine.agreement.any(may_act_between_steps(callbacks), "callbacks")
        engine.prepare(model, data.source.element_spec, training=True)
        engine.warn(model)
        callbacks = _callback_list(engine, model, callbacks, verbose, epochs=epochs, data=data, history=True)
        model.stop_training = False
        callbacks.on_train_begin()
        # After on_train_begin, where BackupAndRestore loads: on the chief only.
        engine.agreement.share_variables(model, optimizer=True)
        first_epoch = engine.agreement.from_chief(internals.initial_epoch(model) or initial_epoch, "initial epoch")
        data.reset()
        engine.try_functions(model, lambda: data.peek(first_epoch)[0])
        if verbose != 0:
            engine.log_plan(data)
        numbers = engine.small_variables(model)
        training_logs: dict[str, Any] | None = None
        for epoch in range(first_epoch, epochs):
            engine.reset_metrics(model)
            callbacks.on_epoch_begin(epoch)
            engine.agreement.check_variables(numbers, f"at the beginning of epoch {epoch + 1}")
            one_epoch = Pass(
                data,
                callbacks.on_train_batch_begin,
                callbacks.on_train_batch_end,
                lambda: model.stop_training,
                epoch,
                numbers if acts_between_steps else (),
                watched(callbacks, "train"),
            )
            logs = engine.run_steps(model, "train", one_epoch)
            epoch_logs = dict(engine.results(model, logs))
            engine.agreement.collect_accumulated(model)
            if validation is not None and internals.should_evaluate(model, epoch, validation_freq):
                epoch_logs.update(validate(engine, model, validation, callbacks))
            callbacks.on_epoch_end(epoch, epoch_logs)
            training_logs = epoch_logs
            engine.agreement.check_variables(engine.shared_variables(model), f"after epoch {epoch + 1}")
            model.stop_training = engine.agreement.any(model.stop_training, "stop_training")
            if model.stop_training:
                break
        if epochs > 0:
            finish_weights(model)
        callbacks.on_train_end(logs=training_logs)
        internals.initial_epoch(model)
    return model.history


def finish_weights(model: Any) -> None:
    """Gives weights the values that training ends with: an optimizer may have kept averages of them."""
    if isinstance(model.optimizer, keras.optimizers.Optimizer):
        model.optimizer.finalize_variable_values(model.trainable_weights)


def evaluate(
    engine: Engine,
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
    **kwargs: Any,
) -> Any:
    """Returns loss and metrics over all rows, equal on every task; see `keras.Model.evaluate`."""
    internals.assert_compiled(model, "evaluate")
    if kwargs:
        raise ValueError(f"Arguments not recognized: {kwargs}")
    with engine.errors():
        data: Any = engine.input(x, y, sample_weight, batch_size=batch_size, steps=steps)
        engine.agreement.require_same("evaluate", data.summary(""))
        engine.prepare(model, data.source.element_spec, training=False)
        engine.agreement.share_variables(model, optimizer=False)
        data.reset()
        engine.try_functions(model, lambda: data.peek(0)[0])
        callbacks = _callback_list(engine, model, callbacks, verbose, epochs=1, data=data)
        logs = _evaluate(engine, model, data, callbacks)
    return logs if return_dict else internals.metrics_in_order(model, logs)


def validate(engine: Engine, model: Any, validation: Any, callbacks: Any) -> dict[str, Any]:
    """Returns the logs of validation data, read from its beginning, as `fit` names them: `val_loss` and others."""
    validation.reset()
    logs = _evaluate(engine, model, validation, callbacks)
    return {f"val_{name}": number for name, number in logs.items()}


def _evaluate(engine: Engine, model: Any, data: Any, callbacks: Any) -> dict[str, Any]:
    model.stop_evaluating = False
    callbacks.on_test_begin()
    engine.reset_metrics(model)
    one_pass = Pass(
        data,
        callbacks.on_test_batch_begin,
        callbacks.on_test_batch_end,
        lambda: model.stop_evaluating,
        watched=watched(callbacks, "test"),
    )
    logs = engine.run_steps(model, "test", one_pass)
    logs = engine.results(model, logs)
    callbacks.on_test_end(logs)
    return logs


def predict(
    engine: Engine,
    model: Any,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    """Returns the outputs for every row, once and in order, on every task; see `keras.Model.predict`."""
    with engine.errors():
        data: Any = engine.input(x, batch_size=batch_size, steps=steps)
        engine.agreement.require_same("predict", data.summary(""))
        if not model.built:
            engine.build_by_calling(model, data)
        engine.agreement.share_variables(model, optimizer=False)
        callbacks = _callback_list(engine, model, callbacks, verbose, epochs=1, data=data)
        model.stop_predicting = False
        callbacks.on_predict_begin()
        one_pass = Pass(
            data, callbacks.on_predict_batch_begin, callbacks.on_predict_batch_end, lambda: model.stop_predicting
        )
        batches = engine.predict(model, one_pass)
        callbacks.on_predict_end()
    if not batches:
        raise ValueError("predict: x holds no batch")
    return concatenate(batches)


def train_on_batch(
    engine: SynchronousEngine,
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    class_weight: dict[int, float] | None = None,
    return_dict: bool = False,
) -> Any:
    """Trains on one global batch, which every task passes whole; returns the logs of the whole batch."""
    internals.assert_compiled(model, "train_on_batch")
    if class_weight is not None:
        if sample_weight is not None:
            raise ValueError("Arguments `sample_weight` and `class_weight` cannot be specified at the same time.")
        sample_weight = internals.CLASS_WEIGHTS.find()(y, class_weight)
    return _logs_on_batch(engine, model, "train", (x, y, sample_weight), return_dict)


def test_on_batch(
    engine: SynchronousEngine,
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    return_dict: bool = False,
) -> Any:
    """Returns the logs of one global batch, which every task passes whole."""
    internals.assert_compiled(model, "test_on_batch")
    return _logs_on_batch(engine, model, "test", (x, y, sample_weight), return_dict)


def predict_on_batch(engine: SynchronousEngine, model: Any, x: Any) -> Any:
    """Returns the outputs for one global batch, which every task passes whole."""
    with engine.errors():
        element = engine.element_of_batch((x,))
        outputs, _ = engine.predict_function(model).on_element(element)
        return engine.whole(outputs, int(element[1]))


def _logs_on_batch(engine: SynchronousEngine, model: Any, kind: str, batch: Any, return_dict: bool) -> Any:
    with engine.errors():
        element = engine.element_of_batch(batch)
        engine.prepare_for_batches(model, element[0], training=kind == "train")
        if internals.resets_metrics(f"{kind}_on_batch"):
            engine.reset_metrics(model)
        logs, _ = engine.function(model, kind).on_element(element)
        logs = internals.PYTHONIFY.find()(logs)
    return logs if return_dict else internals.metrics_in_order(model, logs)


def _callback_list(
    engine: Engine,
    model: Any,
    callbacks: Any,
    verbose: Any,
    *,
    epochs: int,
    data: Any,
    history: bool = False,
) -> Any:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list_for_this_task(callbacks, is_chief=engine.is_chief)
    return keras.callbacks.CallbackList(
        for_this_task(callbacks, is_chief=engine.is_chief),
        add_history=history,
        add_progbar=verbose != 0 and engine.is_chief,
        verbose=verbose,
        epochs=epochs,
        steps=data.steps,
        batch_size=data.source.global_batch_size,
        model=model,
    )
