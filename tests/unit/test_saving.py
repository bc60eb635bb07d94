"""`tfdist.save`: whole files or none, by suffix, on the chief."""

from __future__ import annotations

import json
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import SaveError

X = np.ones((3, 2), "float32")


@pytest.fixture(scope="module")
def model() -> keras.Model:
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("adam", "mse")
    made.fit(X, X[:, :1], verbose=0)
    return made


@pytest.mark.parametrize("name", ["m.keras", "m.h5", "m.weights.h5", "m", "deep/er/m.keras"])
def test_each_suffix_writes_what_keras_loads(name, model, tmp_path):
    path = tmp_path / name
    assert tfdist.save(model, path) == str(path)
    expected = model.predict(X, verbose=0)
    if name == "m":
        got = tf.saved_model.load(str(path))
        np.testing.assert_allclose(got.serve(X), expected, rtol=1e-6)
        return
    if name == "m.weights.h5":
        clone = keras.models.clone_model(model)
        clone.load_weights(path)
    else:
        clone = keras.models.load_model(path, compile=False)  # .h5 can not name a loss given as a string
    np.testing.assert_allclose(clone.predict(X, verbose=0), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["m.pt", "m.weights", "m.h4", "m.keras.zip"])
def test_an_unknown_suffix_lists_the_known_ones(name, model, tmp_path):
    with pytest.raises(SaveError, match=r"unknown suffix; use \.keras"):
        tfdist.save(model, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5", "m"])
def test_saving_again_replaces_and_leaves_nothing_beside(name, model, tmp_path):
    for _ in range(2):
        tfdist.save(model, tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_overwrite_false_keeps_what_is_there(model, tmp_path):
    path = tmp_path / "m.keras"
    path.write_text("mine")
    with pytest.raises(SaveError, match="exists; pass overwrite=True"):
        tfdist.save(model, path, overwrite=False)
    assert path.read_text() == "mine"


def test_what_a_kill_left_behind_is_taken_over_by_the_next_save(model, tmp_path):
    (tmp_path / ".m.keras.tfdist-new.keras").write_bytes(b"half a file")
    tfdist.save(model, tmp_path / "m.keras")
    assert [p.name for p in tmp_path.iterdir()] == ["m.keras"]


def test_an_error_of_the_file_system_says_path_and_reason(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match=r"file/m\.keras could not be written \(.*untouched"):
        tfdist.save(model, tmp_path / "file" / "m.keras")


def test_a_folder_in_the_place_of_a_file_is_refused_and_stays(model, tmp_path):
    (tmp_path / "m.keras").mkdir()
    (tmp_path / "m.keras" / "precious").write_text("x")
    with pytest.raises(SaveError, match="could not be written"):
        tfdist.save(model, tmp_path / "m.keras")
    assert (tmp_path / "m.keras" / "precious").read_text() == "x"
    assert [p.name for p in tmp_path.iterdir()] == ["m.keras"]


@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5", "exported"])
def test_a_remote_path_holds_the_whole_file(name, model):
    """`ram://` is a file system of TensorFlow's like `gs://`, in memory."""
    path = f"ram://bucket/{name}"
    assert tfdist.save(model, path) == path
    if name == "exported":
        assert tf.io.gfile.exists(f"{path}/saved_model.pb")
        return
    with tf.io.gfile.GFile(path, "rb") as file:
        data = file.read()
    assert data[:2] == (b"PK" if name.endswith(".keras") else b"\x89H")


def test_file_urls_are_local_paths(model, tmp_path):
    tfdist.save(model, f"file://{tmp_path}/m.keras")
    assert zipfile.ZipFile(tmp_path / "m.keras").testzip() is None


def test_another_task_than_the_chief_returns_at_once_and_writes_nothing(model, tmp_path, monkeypatch):
    cluster = {"worker": ["127.0.0.1:5001", "127.0.0.1:5002"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert tfdist.save(model, tmp_path / "m.keras") == str(tmp_path / "m.keras")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SaveError, match="unknown suffix"):  # every task hears of a wrong call
        tfdist.save(model, tmp_path / "m.pt")
