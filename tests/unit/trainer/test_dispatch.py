"""`model.save` and `save_weights` of a model of ours: one file, whole or not at all; all else as Keras does it."""

from __future__ import annotations

import zipfile

import keras
import numpy as np
import pytest

import tfdist
from tfdist import process


@pytest.fixture(scope="module")
def strategy():
    before = process.current()
    yield tfdist.create_strategy()
    process.set_current(before)


class Full(keras.layers.Layer):
    """Fails when its variables are saved, as a full disk would, after the file was opened."""

    is_full = False

    def save_own_variables(self, store):
        if self.is_full:
            raise OSError("No space left on device")
        store["0"] = np.ones(3)

    def load_own_variables(self, store):
        pass


@pytest.fixture
def model(strategy):
    with strategy.scope():
        return keras.Sequential([keras.Input((3,)), Full(), keras.layers.Dense(2)])


@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5"])
def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(name, model, tmp_path):
    save = model.save if name == "m.keras" else model.save_weights
    save(tmp_path / name)
    old = (tmp_path / name).read_bytes()
    model.layers[0].is_full = True
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / name)
    assert (tmp_path / name).read_bytes() == old
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["m.keras", "m.h5", "m.weights.h5"])
def test_a_save_replaces_what_was_there(name, model, tmp_path):
    save = model.save_weights if name.endswith(".weights.h5") else model.save
    (tmp_path / name).write_text("old")
    save(str(tmp_path / name), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).stat().st_size > 1000


def test_a_folder_is_written_as_keras_does_it(model, tmp_path):
    model.save(tmp_path / "m", zipped=False)
    assert (tmp_path / "m").is_dir()
    model.save(tmp_path / "z.keras", zipped=True)
    assert zipfile.is_zipfile(tmp_path / "z.keras")


def test_weights_in_several_files_are_written_as_keras_does_it(model, tmp_path):
    model.save_weights(tmp_path / "m.weights.json", max_shard_size=1)
    assert (tmp_path / "m.weights.json").exists()


def test_an_unknown_suffix_is_keras_own_error(model, tmp_path):
    with pytest.raises(ValueError, match=r"m\.pt"):
        model.save(tmp_path / "m.pt")


def test_a_folder_in_the_place_of_the_file_is_an_error(model, tmp_path):
    (tmp_path / "m.weights.h5").mkdir()
    with pytest.raises(OSError, match="directory"):
        model.save_weights(tmp_path / "m.weights.h5")
