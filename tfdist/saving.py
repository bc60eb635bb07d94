"""A model in every task -> one file, written by the chief alone, whole or not at all; and back into every task.

    tfdist.save(model, "run/model.keras")            # the whole model
    tfdist.save(model, "run/model.weights.h5")       # weights (and optimizer state) only
    tfdist.save(model, "run/exported")               # a SavedModel folder, for serving

    model = tfdist.load("run/model.keras")           # in the strategy's scope, on every task
    tfdist.load_weights(model, "run/model.weights.h5")

`save` may be called by all tasks or by the chief alone; the others return at once. Nothing in a Keras model is spread
over tasks, so no task has to wait. A task that reads the file afterwards calls `tfdist.barrier("saved")` first. `load`
and `load_weights` are called by all tasks, which leave them with the same values, or with an error on each.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import keras
import numpy as np
import tensorflow as tf

from tfdist import files, process
from tfdist.errors import LoadError, SaveError, StrategyError
from tfdist.internals import keras as internals
from tfdist.internals.tensorflow import local_component

logger = logging.getLogger(__name__)


def save(model: Any, path: str | os.PathLike[str], *, overwrite: bool = True) -> str:
    """Returns `path`, where the chief has written the model; on every other task it only returns.

    What stood at `path` stays whole until the new file is complete, and survives a failure or a kill in between. (A
    SavedModel folder is swapped at once on Linux. Elsewhere a kill between two renames leaves the old one beside, as
    `.name.tfdist-old`, and the next save puts it back.)

    Args:
        model: A Keras model.
        path: Ends with `.keras` (architecture, weights, optimizer), `.weights.h5` (weights and optimizer), `.h5`
            (Keras' old format, from which the optimizer's state does not come back), or with no suffix for a SavedModel
            folder, which replaces an older one and nothing else. May be remote where TensorFlow can write, e.g.
            `gs://bucket/model.keras`. Of a symbolic link the target is written.
        overwrite: Whether a file that is already there may be replaced.

    Raises:
        SaveError: The suffix is unknown, the file exists and `overwrite` is false, the folder holds something else than
            a SavedModel, or it could not be written.

    Example:
        >>> tfdist.save(model, "model.keras")
        'model.keras'
    """
    path = os.fspath(path)
    write = _writer(model, path)
    if not process.is_chief():
        return path
    if not overwrite and tf.io.gfile.exists(path):
        raise SaveError(f"{path} exists; pass overwrite=True to replace it, or another path")
    if not _is_file(path):
        _require_replaceable(path)
    try:
        files.write(path, write, size=size_of(getattr(model, "weights", ())))
    except SaveError:
        raise
    except Exception as error:
        raise SaveError(
            f"{path} could not be written ({type(error).__name__}: {error}); what was there is untouched"
        ) from error
    return path


def _writer(model: Any, path: str) -> Callable[[str], None]:
    """Returns the function that writes this kind of file."""
    name = path.rstrip("/").rsplit("/", 1)[-1]
    if name in ("", ".", ".."):
        raise SaveError(f"{path!r} names no file; give one, such as 'model.keras'")
    if name.endswith(".weights.h5"):
        return lambda target: model.save_weights(target, overwrite=True)
    if _is_file(path):

        def save_model(target: str) -> None:
            with internals.keeping_optimizer(model):
                model.save(target, overwrite=True)

        return save_model
    if "." in name.lstrip("."):
        raise SaveError(
            f"{path}: unknown suffix; use .keras (model), .weights.h5 (weights), .h5 (old format), or none for a "
            "SavedModel folder"
        )
    return lambda target: model.export(target, verbose=False)


def _is_file(path: str) -> bool:
    return path.rstrip("/").endswith((".keras", ".h5"))


def _require_replaceable(path: str) -> None:
    """Raises SaveError where a SavedModel would replace what is none: a folder goes whole, with all that is in it."""
    if tf.io.gfile.isdir(path):
        names = [name.rstrip("/") for name in tf.io.gfile.listdir(path)]
        if names and "saved_model.pb" not in names:
            inside = os.path.join(path, "exported")
            raise SaveError(
                f"{path} is a folder that holds something else ({_some(sorted(names))}), and a SavedModel would "
                f"replace all of it; name a new folder, such as {inside!r}, or add .keras for a file"
            )
    elif tf.io.gfile.exists(path):
        raise SaveError(f"{path} is a file, and a SavedModel is a folder; remove it, or name another")


def load(
    path: str | os.PathLike[str],
    *,
    strategy: Any = None,
    custom_objects: Mapping[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
) -> Any:
    """Returns the model in a file, made in the strategy's scope, with the same values on every task.

    Every task calls it. The file may come from anybody: `tfdist.save`, `model.save`, another machine.

    Args:
        path: A `.keras` or `.h5` file that every task can read, local or remote.
        strategy: Whose scope the model is made in; by default the one that `tfdist.create_strategy` returned.
        custom_objects: Names in the file -> classes and functions, as for `keras.models.load_model`.
        compile: Whether the model comes compiled, with its optimizer's state, if it was saved so.
        safe_mode: Whether the file is kept from running code of its own (Lambda layers).

    Raises:
        LoadError: The file is missing, broken or another one on some tasks, or what they loaded differs; the message
            names the tasks.
        StrategyError: The tasks have not met yet.

    Example:
        model = tfdist.load("run/model.keras")
        model.fit(x, y, epochs=2)
    """
    path = os.fspath(path)
    name = path.rstrip("/").rsplit("/", 1)[-1]
    if name.endswith(".weights.h5"):
        raise LoadError(f"{path} holds weights and no model; make the model and use tfdist.load_weights(model, path)")
    if not name.endswith((".keras", ".h5")):
        raise LoadError(
            f"{path}: unknown suffix; tfdist.load reads .keras and .h5 files (a SavedModel folder is no Keras model "
            "any more: tf.saved_model.load(path) serves it)"
        )
    strategy = strategy or _strategy()
    objects = None if custom_objects is None else dict(custom_objects)
    with (
        _same_file(path, holds_model=True) as here,
        contextlib.nullcontext() if strategy is None else strategy.scope(),
    ):
        try:
            model = keras.models.load_model(here, custom_objects=objects, compile=compile, safe_mode=safe_mode)
        except ValueError as error:
            # Compiled with "mse", say: the file then names a function that Keras does not find by that name.
            if not (compile and name.endswith(".h5") and "Could not deserialize" in str(error)):
                raise
            raise LoadError(
                f"{path}: Keras can not compile the model as this .h5 file says ({error}); load it with compile=False, "
                "and compile it yourself, or save it as .keras"
            ) from error
    _require_same(model, path)
    if name.endswith(".h5") and getattr(model, "optimizer", None) is not None and process.is_chief():
        # legacy_h5_format.load_model_from_hdf5 builds the optimizer for none of the layers' variables.
        logger.warning("%s: Keras reads no optimizer's state from .h5 files, so it starts anew; save as .keras", path)
    return model


def load_weights(model: Any, path: str | os.PathLike[str], *, skip_mismatch: bool = False) -> None:
    """Puts the weights in a file, and the optimizer's state where there is one, into the model on every task.

    Every task calls it. A compiled model's optimizer is built first, or Keras would leave its state out.

    Args:
        model: A built model, as the one that was saved.
        path: A `.weights.h5`, `.keras` or `.h5` file that every task can read, local or remote.
        skip_mismatch: Whether layers of another shape than in the file keep their weights.

    Raises:
        LoadError: The file is missing, broken or another one on some tasks, or what they loaded differs; the message
            names the tasks.

    Example:
        tfdist.load_weights(model, "run/model.weights.h5")
    """
    path = os.fspath(path)
    _strategy()
    with _same_file(path) as here:
        build_optimizer(model)
        model.load_weights(here, skip_mismatch=skip_mismatch)
    _require_same(model, path)


def build_optimizer(model: Any) -> None:
    """Makes the optimizer's variables, in the scope of the model's strategy, if they are not made yet."""
    optimizer, strategy = getattr(model, "optimizer", None), internals.strategy_of(model)
    if optimizer is None or optimizer.built or not model.built:
        return
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        optimizer.build(model.trainable_variables)


def values_of(variables: Iterable[Any]) -> list[np.ndarray]:
    """Returns this task's own values of Keras variables."""
    return [np.asarray(local_component(internals.native(variable)).numpy()) for variable in variables]


def size_of(variables: Iterable[Any]) -> int:
    """Returns the bytes that the values of Keras variables take."""
    return sum(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables)


def digest(arrays: Iterable[np.ndarray]) -> str:
    """Returns the SHA-256 of the arrays' bytes, in hexadecimal."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    return sha.hexdigest()


def _strategy() -> Any:
    """Returns the strategy that the script is in the scope of, or else the one it has made.

    Raises:
        StrategyError: The cluster has several tasks, and they have not met.
    """
    if tf.distribute.has_strategy():
        return tf.distribute.get_strategy()
    current = process.current()
    if current is None:
        from tfdist import tf_config

        config = tf_config.resolve()
        if config is not None and config.cluster.num_training_tasks > 1:
            raise StrategyError(
                f"{config.task} is one of {config.cluster.num_training_tasks} tasks, which load a model together: call "
                "tfdist.create_strategy() first"
            )
        return None
    return current.strategy


# -- the same on every task


@contextlib.contextmanager
def _same_file(path: str, *, holds_model: bool = False) -> Any:
    """Gives a local path to read, on every task; or raises on every task, before any has made a variable."""
    with contextlib.ExitStack() as stack:
        identity, here = {"sha256": ""}, Path()
        try:
            if not tf.io.gfile.exists(path):
                raise LoadError("there is no such file")
            here = stack.enter_context(files.reading(path))
            identity["sha256"] = _identity(here, holds_model)
        except Exception as error:
            identity["error"] = str(error) or type(error).__name__
        _require_good(path, identity)
        yield here


def _identity(path: Path, holds_model: bool) -> str:
    """Returns a hash that differs for other contents; reads all of the file, so a broken one is found here."""
    if path.is_dir():
        raise LoadError("it is a folder")
    return _identity_of_keras(path) if path.name.endswith(".keras") else _identity_of_h5(path, holds_model)


def _identity_of_h5(path: Path, holds_model: bool) -> str:
    try:
        with h5py.File(path, "r") as file:
            if holds_model and "model_config" not in file.attrs:
                raise LoadError(
                    "it holds no model; for weights make the model and use tfdist.load_weights(model, path)"
                )
    except LoadError:
        raise
    except OSError as error:
        raise LoadError(f"it is no whole HDF5 file ({error})") from error
    sha = hashlib.sha256()
    with open(path, "rb") as data:
        while block := data.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def _identity_of_keras(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
            # Without the date of saving, which metadata.json holds.
            members = sorted((m.filename, m.CRC, m.file_size) for m in archive.infolist())
            members = [member for member in members if member[0] != "metadata.json"]
    except (zipfile.BadZipFile, EOFError) as error:
        raise LoadError(f"it is no whole .keras file ({error})") from error
    if broken is not None:
        raise LoadError(f"it is broken: {broken} in it does not have its checksum")
    if "config.json" not in [name for name, *_ in members]:
        raise LoadError("it is a zip file, and no .keras file: there is no config.json in it")
    return hashlib.sha256(json.dumps(members).encode()).hexdigest()


def _require_good(path: str, identity: dict[str, str]) -> None:
    tasks, every = _of_every_task(identity, "file")
    wrong = [f"{task}: {theirs['error']}" for task, theirs in zip(tasks, every, strict=True) if "error" in theirs]
    if len(tasks) == 1 and wrong:
        raise LoadError(f"{path} can not be loaded: {identity['error']}")
    if wrong:
        good = len(tasks) - len(wrong)
        raise LoadError(
            f"{path} can not be loaded on {_some(wrong)}"
            + (f"; {good} other task{'s' * (good > 1)} can. All tasks read the file: put it where all of them see it")
            * (good > 0)
        )
    other = [str(task) for task, theirs in zip(tasks, every, strict=True) if theirs != every[0]]
    if other:
        raise LoadError(
            f"{path} is another file on {_some(other)} than on {tasks[0]}; all tasks must read the same one"
        )


def _require_same(model: Any, path: str) -> None:
    """Raises on every task where tasks hold other values after loading."""
    if len(_tasks()) == 1:
        return
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    arrays = values_of(variables)
    summary = [[v.path, digest([a])] for v, a in zip(variables, arrays, strict=True)]
    tasks, every = _of_every_task(summary, "values")
    # Names of layers depend on how many others a task has made, so they are only for the message.
    digests = [[value for _, value in theirs] for theirs in every]
    others = [str(task) for task, theirs in zip(tasks, digests, strict=True) if theirs != digests[0]]
    for task, theirs in zip(tasks, every, strict=True):
        if str(task) not in others:
            continue
        name = next((a[0] for a, b in zip(theirs, every[0], strict=False) if a[1] != b[1]), "the number of variables")
        raise LoadError(
            f"after {path} was loaded, {_some(others)} held other values than {tasks[0]} (on {task} {name} differs); "
            "loading must do the same on every task: look at custom objects, and at layers that draw random numbers"
        )


def _tasks() -> tuple[Any, ...]:
    current = process.current()
    return ("this task",) if current is None or current.group is None else tuple(current.group.tasks)


def _of_every_task(value: Any, what: str) -> tuple[tuple[Any, ...], list[Any]]:
    current = process.current()
    if current is None or current.group is None:
        return _tasks(), [json.loads(json.dumps(value))]
    texts = current.group.all_gather_bytes(json.dumps(value).encode(), tag=f"tfdist.load {what}")
    return _tasks(), [json.loads(text) for text in texts]


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
