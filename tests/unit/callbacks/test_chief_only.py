"""`tfdist.callbacks.ChiefOnly`: the callback's hooks on the chief, none on another task."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfdist
from tfdist import process, tf_config

X = np.ones((8, 2), "float32")


class Notes(keras.callbacks.Callback):
    """Notes every hook that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []


def _note(name: str):
    return lambda self, *args, **kwargs: self.calls.append(name)


HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]
for _name in HOOKS:
    if _name not in ("on_batch_begin", "on_batch_end"):  # the default on_train_batch_* call these
        setattr(Notes, _name, _note(_name))


@pytest.fixture(params=["worker 0", "worker 1"])
def task(request):
    """This process as one of two tasks; the tasks don't meet."""
    before = process.current()
    index = request.param[-1]
    text = '{"cluster": {"worker": ["127.0.0.1:5001", "127.0.0.1:5002"]}, "task": {"type": "worker", "index": %s}}'
    process.set_current(process.Current(tf_config.parse(text % index)))
    yield request.param
    process.set_current(before)


def run(callback: keras.callbacks.Callback) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    list_ = keras.callbacks.CallbackList([callback], model=model, epochs=1, steps=2)
    list_.on_train_begin()
    list_.on_epoch_begin(0)
    for batch in range(2):
        list_.on_train_batch_begin(batch)
        list_.on_train_batch_end(batch, {"loss": 1.0})
    list_.on_epoch_end(0, {"loss": 1.0})
    list_.on_train_end({"loss": 1.0})
    for kind in ("test", "predict"):
        for hook in ("begin", "batch_begin", "batch_end", "end"):
            arguments = (0,) if "batch" in hook else ()
            getattr(list_, f"on_{kind}_{hook}")(*arguments)
    return model


def test_every_hook_runs_on_the_chief_alone(task):
    direct, notes = Notes(), Notes()
    run(direct)
    run(tfdist.callbacks.ChiefOnly(notes))
    assert set(direct.calls) == set(HOOKS) - {"on_batch_begin", "on_batch_end"}
    assert notes.calls == (direct.calls if task == "worker 0" else [])


def test_the_callback_knows_model_and_params_on_the_chief(task):
    notes = Notes()
    model = run(tfdist.callbacks.ChiefOnly(notes))
    if task == "worker 0":
        assert notes.model is model
        assert notes.params == {"epochs": 1, "steps": 2}
    else:
        assert notes.params is None


def test_the_old_names_of_batch_hooks_and_functions_of_a_lambda_callback_are_forwarded(strategy):
    calls = []

    class Old(keras.callbacks.Callback):
        def on_batch_end(self, batch, logs=None):
            calls.append(f"batch {batch}")

    run(tfdist.callbacks.ChiefOnly(Old()))
    run(
        tfdist.callbacks.ChiefOnly(
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: calls.append(f"end {epoch} {logs}"))
        )
    )
    assert calls == ["batch 0", "batch 1", "end 0 {'loss': 1.0}"]


def test_it_can_stop_training(strategy):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    history = model.fit(X, X[:, :1], epochs=5, verbose=0, callbacks=[tfdist.callbacks.ChiefOnly(Stop())])
    assert history.epoch == [0]


@pytest.mark.parametrize("wrong", [print, [Notes()], None])
def test_only_a_callback_can_be_wrapped(wrong):
    with pytest.raises(TypeError, match=r"wraps one keras\.callbacks\.Callback, not a "):
        tfdist.callbacks.ChiefOnly(wrong)
