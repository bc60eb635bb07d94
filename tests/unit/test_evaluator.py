"""`fit` in the evaluator: each checkpoint of a training that went on elsewhere, with the numbers that were had there.

Training and evaluator take turns in this process; tests/multiprocess/test_evaluator.py has them side by side.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfdist
from tfdist import checkpoints, evaluator, process
from tfdist.errors import LoadError, StrategyError, UnsupportedError, WaitError

random = np.random.default_rng(0)
X = random.normal(size=(50, 6)).astype("float32")
Y = (X[:, :1] * X[:, 1:2]).astype("float32")
EPOCHS = 4
VALIDATION = (X[34:], Y[34:])
CLUSTER = {"worker": ["127.0.0.1:2222", "127.0.0.1:2223"]}
TF_CONFIG = json.dumps({"cluster": CLUSTER, "task": {"type": "evaluator", "index": 0}})
k = keras.callbacks


@pytest.fixture(scope="module")
def training():
    return tfdist.create_strategy(environ={})


@pytest.fixture(scope="module")
def beside(training):
    """The strategy of the evaluator; whatever kind the script asks for."""
    yield tfdist.create_strategy("synchronous", expected_tasks=2, environ={"TF_CONFIG": TF_CONFIG})
    process.set_current(process.Current())


@contextlib.contextmanager
def role(config: Any) -> Iterator[None]:
    before = process.current()
    process.set_current(process.Current(config))
    try:
        yield
    finally:
        process.set_current(before)


def make(strategy: Any, optimizer: Any = "adam", units: int = 8) -> keras.Model:
    keras.utils.set_random_seed(11)
    with strategy.scope():
        inputs = keras.Input((6,))
        hidden = keras.layers.Dropout(0.3)(keras.layers.Dense(units, activation="relu")(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(optimizer, "mse", metrics=["mae"])
    return model


def fit(model: keras.Model, *callbacks: Any, **kwargs: Any) -> keras.callbacks.History:
    arguments = {"batch_size": 16, "epochs": EPOCHS, "verbose": 0, "validation_data": VALIDATION, **kwargs}
    return model.fit(X[:34], Y[:34], callbacks=list(callbacks), **arguments)


def saver(folder: Path, **kwargs: Any) -> tfdist.callbacks.Checkpoint:
    return tfdist.callbacks.Checkpoint(folder, **{"keep": None, "evaluator_timeout_s": 60, **kwargs})


@pytest.fixture
def train(training):
    """Trains as the chief; the model is that of the History."""

    def train(*callbacks: Any, optimizer: Any = "adam", **kwargs: Any) -> keras.callbacks.History:
        with role(None):
            return fit(make(training, optimizer), *callbacks, **kwargs)

    return train


@pytest.fixture
def evaluate(beside, monkeypatch):
    """Calls the same as the evaluator, which takes what stands there from before for the end of this training."""
    monkeypatch.setenv("TFDIST_START_TIMEOUT_S", "0")

    def evaluate(*callbacks: Any, optimizer: Any = "adam", units: int = 8, **kwargs: Any) -> keras.callbacks.History:
        with role(tfdist.resolve({"TF_CONFIG": TF_CONFIG})):
            return fit(make(beside, optimizer, units), *callbacks, **kwargs)

    return evaluate


def without_training(history: Any) -> dict[str, list[float]]:
    return {name: values for name, values in history.history.items() if name.startswith("val_")}


# -- the numbers


def test_it_gets_bit_by_bit_what_training_got_for_the_same_weights(train, evaluate, tmp_path):
    trained = train(saver(tmp_path))
    found = evaluate(saver(tmp_path))
    assert found.epoch == trained.epoch == [0, 1, 2, 3]
    assert found.history == without_training(trained)


def test_a_part_of_the_training_data_can_be_held_back_for_it(train, evaluate, tmp_path):
    split = {"validation_data": None, "validation_split": 0.3, "validation_batch_size": 7}
    trained = train(saver(tmp_path), **split)
    assert evaluate(saver(tmp_path), **split).history == without_training(trained)


def test_afterwards_the_model_has_the_last_weights_and_evaluates_and_predicts_alone(train, evaluate, tmp_path):
    theirs = train(saver(tmp_path)).model
    mine = evaluate(saver(tmp_path)).model
    assert mine.evaluate(X, Y, verbose=0) == theirs.evaluate(X, Y, verbose=0)
    np.testing.assert_array_equal(mine.predict(X, verbose=0), theirs.predict(X, verbose=0))


@pytest.mark.parametrize("on_epoch", [False, True])
@pytest.mark.parametrize("stands", ["before", "behind"])
def test_averages_of_weights_are_evaluated_as_in_training(on_epoch, stands, train, evaluate, tmp_path):
    """With swap_on_epoch, before the Checkpoint, what is saved are the averages already."""

    def callbacks() -> list[Any]:
        both = [k.SwapEMAWeights(swap_on_epoch=on_epoch), saver(tmp_path)]
        return both if stands == "before" else both[::-1]

    def optimizer() -> Any:
        return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)

    trained = train(*callbacks(), optimizer=optimizer())
    found = evaluate(*callbacks(), optimizer=optimizer())
    np.testing.assert_allclose(found.history["val_loss"], trained.history["val_loss"], rtol=1e-6)
    for mine, theirs in zip(found.model.get_weights(), trained.model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_each_checkpoint_is_a_line_with_the_digits_of_keras(train, evaluate, tmp_path, capsys):
    trained = train(saver(tmp_path), epochs=1)
    evaluate(saver(tmp_path), epochs=1, verbose=2)
    loss, mae = trained.history["val_loss"][0], trained.history["val_mae"][0]
    assert capsys.readouterr().out == f"epoch 1, step 3: val_loss: {loss:.4f} - val_mae: {mae:.4f}\n"


# -- which checkpoints, and until when


class Between(k.Callback):
    """Does something between two checkpoints: after one is evaluated, before the next is looked for."""

    def __init__(self, do: Any, after: int = 1) -> None:
        super().__init__()
        self.do, self.after = do, after

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch + 1 == self.after:
            self.do()


def step(number: int) -> str:
    return f"step-{number:010d}"


@pytest.fixture
def elsewhere(train, tmp_path):
    """The folder of a whole training, of whose files a test gives some to the evaluator."""
    train(saver(tmp_path / "elsewhere"))
    (tmp_path / "run").mkdir()
    return tmp_path / "elsewhere"


def give(elsewhere: Path, *names: str) -> None:
    for name in names:
        (elsewhere / name).rename(elsewhere.parent / "run" / name)


@pytest.fixture
def when_it_waits(monkeypatch):
    """Returns a function that has something done once the evaluator has looked and found no more, nor an end."""
    handler = logging.Handler()

    def when_it_waits(do: Callable[[], None]) -> None:
        monkeypatch.setattr(handler, "emit", lambda record: do())
        monkeypatch.setattr(evaluator, "SAY_AFTER_S", 0.0)
        evaluator.logger.addHandler(handler)

    yield when_it_waits
    evaluator.logger.removeHandler(handler)


def test_it_waits_for_checkpoints_and_for_the_end(elsewhere, evaluate, when_it_waits, tmp_path):
    give(elsewhere, step(3))
    when_it_waits(lambda: give(elsewhere, step(6), step(9)))
    last_comes = Between(lambda: give(elsewhere, step(12), "done.json"), after=3)
    assert evaluate(last_comes, saver(tmp_path / "run")).epoch == [0, 1, 2, 3]


def test_an_end_from_before_does_not_count_once_training_goes_on(
    elsewhere, evaluate, when_it_waits, tmp_path, monkeypatch
):
    monkeypatch.setenv("TFDIST_START_TIMEOUT_S", "60")
    shutil.copy(elsewhere / "done.json", tmp_path / "run")
    note = tmp_path / "run" / "done.json"
    give(elsewhere, step(3))

    def end_anew() -> None:
        give(elsewhere, step(6))
        note.write_text(note.read_text().replace("12", "6"))

    when_it_waits(end_anew)
    assert evaluate(saver(tmp_path / "run")).epoch == [0, 1]


def test_under_one_launcher_only_an_end_in_this_run_counts(elsewhere, evaluate, when_it_waits, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("s")
    give(elsewhere, step(3), "done.json")
    monkeypatch.setenv("TFDIST_RUN_DIR", str(tmp_path))

    def end() -> None:
        give(elsewhere, step(6))
        checkpoints.begin(str(tmp_path / "run"))
        checkpoints.end(str(tmp_path / "run"), step=6)

    when_it_waits(end)
    assert evaluate(saver(tmp_path / "run")).epoch == [0, 1]


def test_one_that_is_started_again_alone_believes_the_end_of_the_others(elsewhere, evaluate, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("s")
    give(elsewhere, step(3))
    monkeypatch.setenv("TFDIST_RUN_DIR", str(tmp_path))
    checkpoints.begin(str(tmp_path / "run"))
    checkpoints.end(str(tmp_path / "run"), step=3)
    monkeypatch.setenv("TFDIST_ATTEMPT", "1")
    assert evaluate(saver(tmp_path / "run")).epoch == [0]


def test_a_checkpoint_that_is_removed_before_its_turn_is_named(elsewhere, evaluate, tmp_path, caplog):
    give(elsewhere, step(3), step(6), step(9), step(12), "done.json")
    prune = Between(lambda: checkpoints.prune(str(tmp_path / "run"), 1, step=12))
    assert evaluate(prune, saver(tmp_path / "run", keep=1)).epoch == [0, 3]
    assert "2 epochs from 2 to 3 are not evaluated: there is no checkpoint of them in" in caplog.text
    assert "is broken" not in caplog.text


def test_epochs_that_are_never_saved_are_not_missed(train, evaluate, tmp_path, caplog):
    train(saver(tmp_path, every_epochs=2), epochs=5)
    assert evaluate(saver(tmp_path, every_epochs=2), epochs=5).epoch == [1, 3, 4]
    assert not caplog.records


def test_a_broken_checkpoint_is_passed_over_with_a_warning(elsewhere, evaluate, tmp_path, caplog):
    give(elsewhere, step(3), step(6), "done.json")
    (tmp_path / "run" / step(3) / "model.weights.h5").write_bytes(b"")
    assert evaluate(saver(tmp_path / "run")).epoch == [1]
    assert "step-0000000003 is broken (model.weights.h5 holds 0 of" in caplog.text


def test_what_is_still_being_written_is_waited_for_and_not_cleaned_up(elsewhere, evaluate, when_it_waits, tmp_path):
    give(elsewhere, step(3), step(6))
    manifest = tmp_path / "run" / step(6) / "manifest.json"
    manifest.rename(tmp_path / "manifest.json")
    beside = tmp_path / "run" / ".step-0000000009.tfdist-new"
    beside.mkdir()

    def write_to_its_end() -> None:
        (tmp_path / "manifest.json").rename(manifest)
        give(elsewhere, "done.json")

    when_it_waits(write_to_its_end)
    assert evaluate(saver(tmp_path / "run")).epoch == [0, 1]
    assert beside.exists()


def test_a_training_that_saved_nothing_leaves_an_empty_history(train, evaluate, tmp_path):
    train(saver(tmp_path), epochs=0)
    assert evaluate(saver(tmp_path), epochs=0).epoch == []


def test_without_a_checkpoint_or_an_end_in_time_it_says_what_it_waited_for(elsewhere, evaluate, tmp_path):
    give(elsewhere, step(3))
    with pytest.raises(WaitError, match=r"no checkpoint has come to .*run for 0\.1 s, after epoch 1, .*evaluator_time"):
        evaluate(saver(tmp_path / "run", evaluator_timeout_s=0.1))


def test_it_says_after_a_while_what_it_waits_for(elsewhere, evaluate, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(evaluator, "SAY_AFTER_S", 0.0)
    with pytest.raises(WaitError):
        evaluate(saver(tmp_path / "run", evaluator_timeout_s=1.5))
    assert f"waits for checkpoints in {tmp_path / 'run'}, for 1.5 s at most each; so far none" in caplog.text


def test_checkpoints_of_another_model_are_an_error(train, evaluate, tmp_path):
    train(saver(tmp_path), epochs=1)
    with pytest.raises(LoadError, match="was saved from another model"):
        evaluate(saver(tmp_path), units=9)


def test_a_remote_folder_works_as_a_local_one(train, evaluate):
    trained = train(saver("ram://evaluated"))
    assert evaluate(saver("ram://evaluated")).history == without_training(trained)


# -- callbacks


class Hooks(k.Callback):
    """Notes which hooks are called, with what."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []
        for name in dir(k.Callback):
            if name.startswith("on_"):
                setattr(self, name, lambda *args, name=name, **kwargs: self.called.append((name, *args, kwargs)))


def test_callbacks_hear_of_epochs_and_tests_and_of_no_training(train, evaluate, tmp_path):
    trained = without_training(train(saver(tmp_path), epochs=2, validation_batch_size=8))
    hooks = Hooks()
    evaluate(hooks, saver(tmp_path), epochs=2, validation_batch_size=8)
    names = [call[0] for call in hooks.called]
    test = ["on_test_begin", *["on_test_batch_begin", "on_test_batch_end"] * 2, "on_test_end"]
    assert names == ["on_train_begin", *["on_epoch_begin", *test, "on_epoch_end"] * 2, "on_train_end"]
    ends = [call[1:3] for call in hooks.called if call[0] == "on_epoch_end"]
    assert ends == [(epoch, {name: values[epoch] for name, values in trained.items()}) for epoch in range(2)]


def test_those_that_steer_or_save_do_nothing(train, evaluate, tmp_path):
    train(saver(tmp_path / "run"))
    own = Hooks()
    given = [
        k.EarlyStopping("val_loss", patience=0, baseline=0.0),
        k.LearningRateScheduler(lambda epoch: 1 / 0),
        k.ModelCheckpoint(tmp_path / "m.keras"),
        k.RemoteMonitor("http://127.0.0.1:1"),
        tfdist.callbacks.ChiefOnly(own),
        tfdist.callbacks.CheckSame(1),
        Between(lambda: setattr(given[-1].model, "stop_training", True)),
    ]
    assert evaluate(*given, saver(tmp_path / "run")).epoch == [0, 1, 2, 3]
    assert not (tmp_path / "m.keras").exists()
    assert not own.called


def test_logs_are_written_beside_the_chiefs(train, evaluate, tmp_path):
    def logs() -> list[Any]:
        return [k.CSVLogger(tmp_path / "log.csv"), k.TensorBoard(tmp_path / "board", write_steps_per_second=True)]

    trained = train(*logs(), saver(tmp_path / "run"), epochs=2)
    theirs = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    given = logs()
    evaluate(*given, saver(tmp_path / "run"), epochs=2)
    assert {path: path.read_bytes() for path in theirs} == theirs
    head, *rows = (tmp_path / "log.evaluator.csv").read_text().splitlines()
    assert head == "epoch,val_loss,val_mae"
    assert [float(row.split(",")[1]) for row in rows] == trained.history["val_loss"]
    assert list((tmp_path / "board" / "evaluator" / "validation").glob("events*"))
    assert given[0].filename == str(tmp_path / "log.csv"), "the user's own stay as they are"
    assert given[1].log_dir == str(tmp_path / "board")


# -- what it does not do


def test_without_a_checkpoint_callback_it_says_what_to_add(evaluate):
    with pytest.raises(UnsupportedError, match=r"add callbacks=\[tfdist.callbacks.Checkpoint\("):
        evaluate(Hooks())


def test_without_validation_data_it_says_what_to_add(evaluate, tmp_path):
    with pytest.raises(UnsupportedError, match=r"add validation_data=\(x, y\), or start without --evaluator"):
        evaluate(saver(tmp_path), validation_data=None)


def test_a_model_of_another_scope_is_refused_since_it_would_be_trained(beside):
    with role(tfdist.resolve({"TF_CONFIG": TF_CONFIG})):
        plain = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        plain.compile("sgd", "mse")
        with pytest.raises(StrategyError, match="so the evaluator would train its own copy"):
            fit(plain)


def test_a_loop_of_batches_is_refused_since_it_would_train(beside):
    with role(tfdist.resolve({"TF_CONFIG": TF_CONFIG})), pytest.raises(UnsupportedError, match="trains nothing"):
        make(beside).train_on_batch(X, Y)


def test_saving_is_left_to_the_chief(beside, tmp_path):
    with role(tfdist.resolve({"TF_CONFIG": TF_CONFIG})):
        model = make(beside)
        tfdist.save(model, tmp_path / "m.keras")
        model.save(tmp_path / "n.keras")
        model.save_weights(tmp_path / "o.weights.h5")
    assert not list(tmp_path.iterdir())
