"""`tfdist.save`: whole files or none, by suffix, on the chief; `tfdist.load` and `load_weights` on one task."""

from __future__ import annotations

import json
import shutil
import zipfile
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import process
from tfdist.errors import LoadError, SaveError, StrategyError

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


def test_a_keras_file_after_an_h5_file_still_holds_the_optimizer(model, tmp_path):
    for name in ("m.h5", "m.keras"):
        tfdist.save(model, tmp_path / name)
    assert isinstance(keras.models.load_model(tmp_path / "m.keras").optimizer, keras.optimizers.Adam)


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


def test_a_folder_that_is_no_saved_model_is_never_replaced_by_one(model, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(SaveError, match=r"run is a folder that holds something else \(checkpoints\).*run/exported'"):
        tfdist.save(model, tmp_path / "run")
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(SaveError, match="notes is a file, and a SavedModel is a folder"):
        tfdist.save(model, tmp_path / "notes")
    assert (tmp_path / "run" / "checkpoints").is_dir()
    assert (tmp_path / "notes").read_text() == "mine"


def test_an_empty_folder_takes_a_saved_model(model, tmp_path):
    (tmp_path / "new").mkdir()
    tfdist.save(model, tmp_path / "new")
    assert (tmp_path / "new" / "saved_model.pb").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "deep/.."])
def test_a_path_that_names_no_file_is_refused(name, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SaveError, match="names no file"):
        tfdist.save(model, name)


@pytest.mark.parametrize("name", ["m.keras", "m"])
def test_a_link_stays_and_what_it_points_to_is_written(name, model, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / name).symlink_to(tmp_path / "disk" / name)
    for _ in range(2):
        tfdist.save(model, tmp_path / name)
    assert (tmp_path / name).is_symlink()
    assert [p.name for p in (tmp_path / "disk").iterdir()] == [name]


@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5", "m.h5", "m"])
def test_a_disk_without_room_is_an_error_before_anything_is_written(name, model, tmp_path, monkeypatch):
    """HDF5 ends the process with a segmentation fault where a disk is full while it writes."""
    tfdist.save(model, tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=100, used=89, free=11))
    with pytest.raises(SaveError, match="has 11 bytes of free space, and 12 are to be written"):
        tfdist.save(model, tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before


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


# -- loading


@pytest.fixture
def strategy():
    before = process.current()
    yield tfdist.create_strategy()
    process.set_current(before)


def states(of: keras.Model) -> list[np.ndarray]:
    return [np.asarray(v) for v in (*of.weights, *of.optimizer.variables)]


def assert_same(first: keras.Model, second: keras.Model) -> None:
    for a, b in zip(states(first), states(second), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("where", ["{}/m.keras", "file://{}/m.keras", "ram://load/m.keras"])
def test_load_gives_the_model_with_its_optimizer_in_the_strategys_scope(where, model, strategy, tmp_path):
    path = where.format(tmp_path)
    tfdist.save(model, path)
    loaded = tfdist.load(path)
    assert_same(loaded, model)
    with strategy.scope():
        assert strategy.extended.variable_created_in_scope(loaded.weights[0].value)
    loaded.fit(X, X[:, :1], verbose=0)
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) + 1


def test_load_takes_files_of_plain_keras(model, strategy, tmp_path):
    theirs = keras.models.clone_model(model)
    theirs.set_weights(model.get_weights())
    for name in ("m.keras", "m.h5"):
        theirs.save(tmp_path / name)
        loaded = tfdist.load(tmp_path / name, compile=False)
        np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))


def test_load_uses_the_strategy_that_it_is_given(model, strategy, tmp_path):
    tfdist.save(model, tmp_path / "m.keras")
    other = tf.distribute.OneDeviceStrategy("/CPU:0")
    loaded = tfdist.load(tmp_path / "m.keras", strategy=other)
    assert other.extended.variable_created_in_scope(loaded.weights[0].value)


def test_load_passes_the_users_own_classes_on(strategy, tmp_path):
    class Mine(keras.layers.Dense):
        pass

    made = keras.Sequential([keras.Input((2,)), Mine(1)])
    tfdist.save(made, tmp_path / "m.keras")
    assert isinstance(tfdist.load(tmp_path / "m.keras", custom_objects={"Mine": Mine}).layers[0], Mine)
    with pytest.raises(TypeError, match="Mine"):
        tfdist.load(tmp_path / "m.keras")


@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5", "m.h5"])
def test_load_weights_gives_a_new_optimizer_its_state(name, model, strategy, tmp_path):
    tfdist.save(model, tmp_path / name)
    with strategy.scope():
        fresh = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        fresh.compile("adam", "mse")
    tfdist.load_weights(fresh, tmp_path / name)
    if name == "m.weights.h5":
        assert_same(fresh, model)
    else:  # Keras takes no more than the weights out of a file of a whole model
        np.testing.assert_array_equal(fresh.get_weights()[0], model.get_weights()[0])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("m.weights.h5", r"holds weights and no model; make the model and use tfdist\.load_weights\(model, path\)"),
        ("exported", r"unknown suffix.*tf\.saved_model\.load"),
        ("m.pt", r"unknown suffix; tfdist\.load reads \.keras and \.h5"),
        ("missing.keras", r"missing\.keras can not be loaded: there is no such file"),
        ("text.keras", r"text\.keras can not be loaded: it is no whole \.keras file"),
        ("cut.keras", r"cut\.keras can not be loaded: it is no whole"),
        ("changed.keras", r"changed\.keras can not be loaded: it is broken: config\.json"),
        ("folder.keras", r"folder\.keras can not be loaded: it is a folder"),
        ("foreign.keras", r"foreign\.keras can not be loaded: it is a zip file, and no \.keras file"),
        ("text.h5", r"text\.h5 can not be loaded: it is no whole HDF5 file"),
        ("cut.h5", r"cut\.h5 can not be loaded: it is no whole HDF5 file"),
        ("weights.h5", r"weights\.h5 can not be loaded: it holds no model; .*tfdist\.load_weights"),
        ("m.h5", r"m\.h5: Keras can not compile.*compile=False"),
    ],
)
def test_load_says_what_is_wrong_with_a_file(name, says, model, strategy, tmp_path):
    tfdist.save(model, tmp_path / "good.keras")
    data = (tmp_path / "good.keras").read_bytes()
    (tmp_path / "text.keras").write_text("text")
    (tmp_path / "cut.keras").write_bytes(data[:-100])
    changed = bytearray(data)
    changed[data.index(b"config.json") + 60] ^= 1
    (tmp_path / "changed.keras").write_bytes(changed)
    (tmp_path / "folder.keras").mkdir()
    zipfile.ZipFile(tmp_path / "foreign.keras", "w").close()
    (tmp_path / "text.h5").write_text("text")
    for saved, name_there in (("m.weights.h5", "weights.h5"), ("m.h5", "m.h5")):
        tfdist.save(model, tmp_path / saved)
        (tmp_path / name_there).write_bytes((tmp_path / saved).read_bytes())
    (tmp_path / "cut.h5").write_bytes((tmp_path / "m.h5").read_bytes()[:-100])
    with pytest.raises(LoadError, match=says):
        tfdist.load(tmp_path / name)


def test_load_before_the_tasks_have_met_says_what_to_call(model, tmp_path, monkeypatch):
    before = process.current()
    process.set_current(None)
    cluster = {"worker": ["127.0.0.1:5001", "127.0.0.1:5002"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}}))
    try:
        with pytest.raises(StrategyError, match=r"worker 1 is one of 2 tasks.*call tfdist\.create_strategy\(\) first"):
            tfdist.load(tmp_path / "m.keras")
    finally:
        process.set_current(before)
