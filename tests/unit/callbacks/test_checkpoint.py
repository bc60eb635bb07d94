"""`tfdist.callbacks.Checkpoint` on one task: training that goes on where it was, or says why it can't."""

from __future__ import annotations

import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import LoadError, SaveError

random = np.random.default_rng(0)
X = random.normal(size=(50, 6)).astype("float32")
Y = (X[:, :1] * X[:, 1:2]).astype("float32")
EPOCHS = 4


class Crash(keras.callbacks.Callback):
    def __init__(self, epoch: int, batch: int = 1) -> None:
        super().__init__()
        self.at = [epoch, batch]
        self.epoch = -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if [self.epoch, batch] == self.at:
            raise KeyError("crash")


def dropout_model() -> keras.Model:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dropout(0.3)(keras.layers.Dense(8, activation="relu")(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.GaussianNoise(0.1)(hidden)))


def batch_norm_model() -> keras.Model:
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((6,)), *layers])


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [keras.layers.Dense(8), keras.layers.Dropout(0.2), keras.layers.Dense(1)]

    def call(self, x: Any, training: bool = False) -> Any:
        for part in self.parts:
            x = part(x, training=training) if isinstance(part, keras.layers.Dropout) else part(x)
        return x


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "sgd with momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "a schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, 16)),
    "moving averages": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=None),
    "accumulation": lambda: keras.optimizers.SGD(0.01, gradient_accumulation_steps=3),
    "loss scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
}


@pytest.fixture
def make(strategy):
    """Returns a function that makes the model anew, with the numbers that a new process would draw."""

    def make(
        build: Callable[[], keras.Model] = dropout_model, optimizer: str = "adam", *, eagerly: bool = True
    ) -> keras.Model:
        keras.utils.set_random_seed(11)
        with strategy.scope():
            model = build()
            # Eager steps of such a model take less time than tracing one.
            model.compile(OPTIMIZERS[optimizer](), "mse", metrics=["mae"], run_eagerly=eagerly)
        return model

    return make


def fit(model: keras.Model, *callbacks: Any, epochs: int = EPOCHS, **kwargs: Any) -> keras.callbacks.History:
    return model.fit(X, Y, batch_size=16, epochs=epochs, verbose=0, callbacks=list(callbacks), **kwargs)


def crash(model: keras.Model, folder: Path, *, epoch: int = 2, **kwargs: Any) -> None:
    with pytest.raises(KeyError):
        fit(model, tfdist.callbacks.Checkpoint(folder, **kwargs), Crash(epoch))


def names(folder: Path) -> list[str]:
    """What is in a folder, but for the note that training has ended."""
    return sorted(p.name for p in folder.iterdir() if p.name != "done.json")


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((sorted(folder.glob("step-*"))[-1] / "manifest.json").read_text())


def values(model: keras.Model) -> list[np.ndarray]:
    return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]


def assert_same(first: keras.Model, second: keras.Model) -> None:
    for a, b in zip(values(first), values(second), strict=True):
        np.testing.assert_array_equal(a, b)


# -- going on


@pytest.mark.parametrize("build", [dropout_model, batch_norm_model, Subclassed])
def test_a_run_with_a_crash_ends_as_the_run_without_one_bit_by_bit(build, make, tmp_path):
    whole = make(build, eagerly=False)
    expected = fit(whole)
    crash(make(build, eagerly=False), tmp_path / "run")
    resumed = make(build, eagerly=False)
    history = fit(resumed, tfdist.callbacks.Checkpoint(tmp_path / "run"))
    assert_same(whole, resumed)
    assert history.epoch == [2, 3]
    assert history.history["loss"] == expected.history["loss"][2:]
    assert history.history["mae"] == expected.history["mae"][2:]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_state_of_an_optimizer_is_kept_bit_by_bit(optimizer, make, tmp_path):
    whole = make(optimizer=optimizer)
    fit(whole)
    crash(make(optimizer=optimizer), tmp_path)
    resumed = make(optimizer=optimizer)
    fit(resumed, tfdist.callbacks.Checkpoint(tmp_path))
    assert_same(whole, resumed)


def test_keras_own_fit_goes_on_as_well(tmp_path):
    """A model that is none of a strategy's: the callback is an ordinary one."""

    def plain() -> keras.Model:
        keras.utils.set_random_seed(11)
        model = dropout_model()
        model.compile("adam", "mse", run_eagerly=True)
        return model

    whole = plain()
    fit(whole, shuffle=False)
    with pytest.raises(KeyError):
        fit(plain(), tfdist.callbacks.Checkpoint(tmp_path), Crash(2), shuffle=False)
    resumed = plain()
    assert fit(resumed, tfdist.callbacks.Checkpoint(tmp_path), shuffle=False).epoch == [2, 3]
    assert_same(whole, resumed)
    assert fit(resumed, epochs=1).epoch == [0]


def test_epochs_counts_all_epochs_also_in_the_next_fit(make, tmp_path):
    model = make()
    callback = tfdist.callbacks.Checkpoint(tmp_path)
    assert fit(model, callback, epochs=2).epoch == [0, 1]
    assert fit(model, callback, epochs=2).epoch == []
    assert fit(model, callback, epochs=3).epoch == [2]
    assert fit(model, epochs=1).epoch == [0]


def test_the_step_counts_all_batches_over_runs(make, tmp_path):
    crash(make(), tmp_path)
    assert names(tmp_path) == ["step-0000000004", "step-0000000008"]
    fit(make(), tfdist.callbacks.Checkpoint(tmp_path, keep=None))
    assert names(tmp_path) == [f"step-{step:010d}" for step in (4, 8, 12, 16)]


def test_steps_are_counted_when_several_run_at_once(strategy, tmp_path):
    with strategy.scope():
        model = dropout_model()
        model.compile("sgd", "mse", steps_per_execution=3)
    fit(model, tfdist.callbacks.Checkpoint(tmp_path), epochs=1)
    assert names(tmp_path) == ["step-0000000004"]


# -- the note that training has ended, which the evaluator waits for


def test_it_is_there_when_training_has_ended_and_gone_while_it_goes_on(make, tmp_path):
    note = tmp_path / "done.json"
    crash(make(), tmp_path)
    assert not note.exists()
    fit(make(), tfdist.callbacks.Checkpoint(tmp_path), epochs=3)
    assert json.loads(note.read_text())["step"] == 12
    crash(make(), tmp_path, epoch=3)
    assert not note.exists()
    model = make()
    stop = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", True))
    fit(model, stop, tfdist.callbacks.Checkpoint(tmp_path), epochs=9)
    assert json.loads(note.read_text())["step"] == 16


def test_a_note_that_can_not_be_written_does_not_undo_the_training(make, tmp_path, caplog):
    stand_in_its_way = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: (tmp_path / "done.json").mkdir())
    fit(make(), tfdist.callbacks.Checkpoint(tmp_path), stand_in_its_way, epochs=1)
    assert "done.json could not be written" in caplog.text


# -- which are kept


@pytest.mark.parametrize(
    ("keep", "every", "steps"),
    [(3, 1, [12, 16, 20]), (1, 1, [20]), (None, 1, [4, 8, 12, 16, 20]), (3, 2, [8, 16, 20]), (2, 9, [20])],
)
def test_keep_and_every_epochs(keep, every, steps, make, tmp_path):
    fit(make(), tfdist.callbacks.Checkpoint(tmp_path, keep=keep, every_epochs=every), epochs=5)
    assert names(tmp_path) == [f"step-{step:010d}" for step in steps]


def test_the_epoch_at_which_training_is_stopped_is_saved(make, tmp_path):
    stop = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", epoch == 1))
    model = make()
    fit(model, stop, tfdist.callbacks.Checkpoint(tmp_path, every_epochs=3))
    assert names(tmp_path) == ["step-0000000008"]


def test_it_is_saved_also_where_a_later_callback_stops_training(make, tmp_path):
    stop = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", epoch == 1))
    model = make()
    fit(model, tfdist.callbacks.Checkpoint(tmp_path, every_epochs=3), stop)
    assert names(tmp_path) == ["step-0000000008"]
    assert (manifest(tmp_path)["epoch"], manifest(tmp_path)["step"]) == (2, 8)


def test_weights_that_are_not_numbers_do_not_take_the_place_of_good_ones(make, tmp_path, caplog):
    def spoil(epoch: int, logs: Any) -> None:
        if epoch == 2:
            model.weights[0].assign(np.full(model.weights[0].shape, np.nan))

    model = make()
    fit(model, keras.callbacks.LambdaCallback(on_epoch_begin=spoil), tfdist.callbacks.Checkpoint(tmp_path, keep=1))
    assert names(tmp_path) == ["step-0000000008"]
    assert "kernel is not a number after epoch 3: that is not saved" in caplog.text
    assert fit(make(), tfdist.callbacks.Checkpoint(tmp_path)).epoch == [2, 3]


def test_a_broken_one_of_later_does_not_count_as_kept(make, tmp_path):
    """As a remote one whose writing was broken off, in a run with more steps per epoch."""
    (tmp_path / "step-0000000100").mkdir()
    fit(make(), tfdist.callbacks.Checkpoint(tmp_path, keep=1), epochs=2)
    assert names(tmp_path) == ["step-0000000008", "step-0000000100"]


def test_a_fit_with_nothing_left_to_train_says_so(make, tmp_path, caplog):
    fit(make(), tfdist.callbacks.Checkpoint(tmp_path), epochs=2)
    assert not caplog.records
    assert fit(make(), tfdist.callbacks.Checkpoint(tmp_path), epochs=2).epoch == []
    assert re.search(r"all 2 epochs are done, so nothing is left to train: .*step-0000000008 was saved", caplog.text)


def test_an_empty_name_of_a_folder_is_refused():
    with pytest.raises(ValueError, match="folder is empty"):
        tfdist.callbacks.Checkpoint("")


@pytest.mark.parametrize("arguments", [{"keep": 0}, {"keep": 1.5}, {"every_epochs": 0}, {"every_epochs": True}])
def test_numbers_that_make_no_sense_are_refused(arguments, tmp_path):
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} must be a whole number from 1 on"):
        tfdist.callbacks.Checkpoint(tmp_path, **arguments)


# -- the layout, which later versions read


def test_the_manifest_says_what_is_in_the_checkpoint(make, tmp_path):
    fit(make(), tfdist.callbacks.Checkpoint(tmp_path), epochs=2)
    found = manifest(tmp_path)
    assert {key: found[key] for key in ("format", "step", "epoch", "batch", "tasks")} == {
        "format": 1,
        "step": 8,
        "epoch": 2,
        "batch": 0,
        "tasks": 1,
    }
    assert found["seeds"] == {"script": 11, "fit": 0}
    assert found["versions"].keys() == {"tfdist", "tensorflow", "keras", "python"}
    assert found["optimizers"] == {"optimizer": "Adam"}
    assert {name: len(entries) for name, entries in found["variables"].items()} == {
        "weights": 4,
        "random": 2,
        "optimizer": 10,
    }
    assert found["variables"]["weights"][0][1:] == [[6, 8], "float32"]
    folder = tmp_path / "step-0000000008"
    assert names(folder) == sorted([*found["files"], "manifest.json"])
    assert all((folder / name).stat().st_size == file["bytes"] for name, file in found["files"].items())


def test_plain_keras_loads_the_weights_of_a_checkpoint(make, tmp_path):
    model = make()
    fit(model, tfdist.callbacks.Checkpoint(tmp_path), epochs=1)
    plain = dropout_model()
    plain.load_weights(tmp_path / "step-0000000004" / "model.weights.h5")
    np.testing.assert_array_equal(plain.predict(X, verbose=0), model.predict(X, verbose=0))


def test_nothing_in_a_checkpoint_is_a_pickle(make, tmp_path):
    fit(make(), tfdist.callbacks.Checkpoint(tmp_path), epochs=1)
    with np.load(tmp_path / "step-0000000004" / "random.npz", allow_pickle=False) as arrays:
        assert all(arrays[name].dtype.kind in "iu" for name in arrays.files)


def test_a_remote_folder_works_as_a_local_one(make):
    """`ram://` is a file system of TensorFlow's like `gs://`, in memory."""
    whole = make()
    fit(whole)
    with pytest.raises(KeyError):
        fit(make(), tfdist.callbacks.Checkpoint("ram://run", keep=1), Crash(2))
    resumed = make()
    fit(resumed, tfdist.callbacks.Checkpoint("ram://run", keep=1))
    assert_same(whole, resumed)
    assert tf.io.gfile.exists("ram://run/step-0000000016/manifest.json")
    assert not tf.io.gfile.exists("ram://run/step-0000000012/manifest.json")


# -- what is broken


@pytest.fixture(scope="module")
def two_epochs(strategy, tmp_path_factory):
    """A folder with the checkpoints of two epochs."""
    folder = tmp_path_factory.mktemp("two_epochs")
    keras.utils.set_random_seed(11)
    with strategy.scope():
        model = dropout_model()
        model.compile(OPTIMIZERS["adam"](), "mse", metrics=["mae"], run_eagerly=True)
    fit(model, tfdist.callbacks.Checkpoint(folder), epochs=2)
    return folder


@pytest.fixture
def folder(two_epochs, tmp_path):
    return Path(shutil.copytree(two_epochs, tmp_path / "run"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def change_manifest(**changes: Any) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        entries = json.loads(path.read_text())
        for name, value in changes.items():
            if value is None:
                del entries[name]
            else:
                entries[name] = value
        path.write_text(json.dumps(entries))

    return change


BROKEN: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "weights cut off": ("model.weights.h5", cut, "model.weights.h5 holds .* of .* bytes"),
    "weights changed": ("model.weights.h5", flip, "model.weights.h5 does not have its checksum"),
    "weights missing": ("model.weights.h5", Path.unlink, "model.weights.h5 is missing"),
    "seeds changed": ("random.npz", flip, "random.npz does not have its checksum"),
    "manifest missing": ("manifest.json", Path.unlink, "has no manifest.json"),
    "manifest empty": ("manifest.json", lambda path: path.write_bytes(b""), "is broken"),
    "manifest cut off": ("manifest.json", cut, "is broken"),
    "manifest of another kind": ("manifest.json", lambda path: path.write_text("[]"), "is broken"),
    "no files": ("manifest.json", change_manifest(files=None), "is broken"),
    "no number": ("manifest.json", change_manifest(epoch="2"), "epoch is '2'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_newest_one_is_passed_over_with_a_warning(name, make, folder, caplog):
    file, damage, says = BROKEN[name]
    damage(folder / "step-0000000008" / file)
    with caplog.at_level(logging.WARNING):
        history = fit(make(), tfdist.callbacks.Checkpoint(folder), epochs=2)
    assert history.epoch == [1]
    (record,) = [r for r in caplog.records if r.name.startswith("tfdist")]
    assert "step-0000000008" in record.getMessage()
    assert re.search(says, record.getMessage())
    assert fit(make(), tfdist.callbacks.Checkpoint(folder), epochs=2).epoch == []


def test_where_none_is_whole_training_does_not_start_anew_in_silence(make, folder):
    for path in folder.glob("step-*/model.weights.h5"):
        cut(path)
    with pytest.raises(LoadError, match=r"no whole checkpoint \(.*step-0000000008.*step-0000000004.*remove it"):
        fit(make(), tfdist.callbacks.Checkpoint(folder))


def test_where_writing_never_ended_training_starts_anew_with_a_warning(make, folder, caplog):
    shutil.rmtree(folder / "step-0000000004")
    (folder / "step-0000000008" / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert fit(make(), tfdist.callbacks.Checkpoint(folder), epochs=1).epoch == [0]
    assert "was broken off" in caplog.text


def test_what_a_kill_left_beside_is_cleaned_up(make, folder):
    (folder / "step-0000000008").rename(folder / ".step-0000000008.tfdist-old")
    (folder / ".step-0000000012.tfdist-new").mkdir()
    assert fit(make(), tfdist.callbacks.Checkpoint(folder), epochs=2).epoch == []
    assert names(folder) == ["step-0000000004", "step-0000000008"]


def test_a_format_of_the_future_is_named(make, folder):
    change_manifest(format=2, versions={"tfdist": "7.0"})(folder / "step-0000000008" / "manifest.json")
    with pytest.raises(LoadError, match=r"has format 2 and this tfdist reads up to 1; .* by tfdist 7\.0"):
        fit(make(), tfdist.callbacks.Checkpoint(folder))


def test_entries_of_the_future_are_passed_over(make, folder):
    change_manifest(metrics={"loss": 1.0})(folder / "step-0000000008" / "manifest.json")
    assert fit(make(), tfdist.callbacks.Checkpoint(folder), epochs=3).epoch == [2]


def test_a_file_in_the_place_of_the_folder_is_an_error_that_names_it(make, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(SaveError, match=r"nothing can be written in .*run \(.*exists"):
        fit(make(), tfdist.callbacks.Checkpoint(tmp_path / "run"), Crash(0, 0), epochs=1)


def test_a_folder_that_can_not_be_written_is_an_error_before_the_first_step(make, tmp_path, monkeypatch):
    def deny(**kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", deny)  # root may write anywhere
    with pytest.raises(SaveError, match=r"nothing can be written in .*Permission denied"):
        fit(make(), tfdist.callbacks.Checkpoint(tmp_path), Crash(0, 0), epochs=1)


def test_a_folder_that_vanishes_while_training_is_an_error_that_names_the_checkpoint(make, tmp_path):
    def replace(epoch: int, logs: Any) -> None:
        (tmp_path / "run").rmdir()
        (tmp_path / "run").write_text("")

    lose = keras.callbacks.LambdaCallback(on_epoch_end=replace)
    with pytest.raises(SaveError, match=r"checkpoint .*run/step-0000000004 could not be written.*older ones"):
        fit(make(), lose, tfdist.callbacks.Checkpoint(tmp_path / "run"), epochs=1)


# -- another model


def wider() -> keras.Model:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dropout(0.3)(keras.layers.Dense(9, activation="relu")(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.GaussianNoise(0.1)(hidden)))


def without_noise() -> keras.Model:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dropout(0.3)(keras.layers.Dense(8, activation="relu")(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


OTHERS = {
    "another shape": (
        wider,
        "adam",
        r"in its weights, \S+/kernel float32 \(6, 8\) there and \S+ float32 \(6, 9\) here",
    ),
    "another optimizer": (dropout_model, "sgd with momentum", "its optimizer is Adam there and SGD here"),
    "fewer random layers": (without_noise, "adam", "2 variables of its random there and 1 here"),
    "more layers": (batch_norm_model, "adam", "4 variables of its weights there and 8 here"),
    "averages": (dropout_model, "moving averages", "10 variables of its optimizer there and 14 here"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_model_is_an_error_that_names_the_difference(name, make, folder):
    build, optimizer, says = OTHERS[name]
    with pytest.raises(LoadError, match=f"step-0000000008 was saved from another model: {says}.*use another folder"):
        fit(make(build, optimizer), tfdist.callbacks.Checkpoint(folder))


class Forgetful(keras.layers.Dense):
    def load_own_variables(self, store: Any) -> None:
        pass


def test_values_that_a_layer_does_not_give_back_are_an_error(make, tmp_path):
    def build() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), Forgetful(1)])

    crash(make(build), tmp_path)
    with pytest.raises(LoadError, match="does not give back all values"):
        fit(make(build), tfdist.callbacks.Checkpoint(tmp_path))


class TwoOptimizers(keras.Model):
    """As a GAN has them: compiled with its own optimizers, stepped in its own train_step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(4), keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))

    def compile_two(self, *, build: bool) -> None:
        super().compile(loss="mse", run_eagerly=True)
        self.first_optimizer, self.second_optimizer = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02)
        self(X[:1])
        if build:
            self.first_optimizer.build(self.first.trainable_variables)
            self.second_optimizer.build(self.second.trainable_variables)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        for optimizer, layer in ((self.first_optimizer, self.first), (self.second_optimizer, self.second)):
            optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return {"loss": loss}


def two_optimizers(strategy: Any, *, build: bool = True) -> TwoOptimizers:
    keras.utils.set_random_seed(11)
    with strategy.scope():
        model = TwoOptimizers()
        model.compile_two(build=build)
    return model


def test_optimizers_of_the_models_own_are_kept(strategy, tmp_path):
    whole = two_optimizers(strategy)
    fit(whole)
    crash(two_optimizers(strategy), tmp_path)
    resumed = two_optimizers(strategy)
    fit(resumed, tfdist.callbacks.Checkpoint(tmp_path))
    for name in ("first_optimizer", "second_optimizer"):
        for a, b in zip(getattr(whole, name).variables, getattr(resumed, name).variables, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    np.testing.assert_array_equal(whole.get_weights()[0], resumed.get_weights()[0])


def test_an_optimizer_of_the_models_own_must_be_built_to_go_on(strategy, tmp_path):
    crash(two_optimizers(strategy), tmp_path)
    with pytest.raises(LoadError, match=r"variables of its first_optimizer there and .* here \(build it before fit\)"):
        fit(two_optimizers(strategy, build=False), tfdist.callbacks.Checkpoint(tmp_path))
