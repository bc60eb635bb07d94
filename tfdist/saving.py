"""A model in every task -> one file, written by the chief alone, whole or not at all.

    tfdist.save(model, "run/model.keras")            # the whole model
    tfdist.save(model, "run/model.weights.h5")       # weights (and optimizer state) only
    tfdist.save(model, "run/exported")               # a SavedModel folder, for serving

All tasks may call it, or the chief alone; the others return at once. Nothing in a Keras model is spread over tasks, so
no task has to wait. A task that reads the file afterwards calls `tfdist.barrier("saved")` first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist import process
from tfdist.errors import SaveError

SUFFIXES = (".weights.h5", ".keras", ".h5")


def save(model: Any, path: str | os.PathLike[str], *, overwrite: bool = True) -> str:
    """Returns `path`, where the chief has written the model; on every other task it only returns.

    What stood at `path` stays whole until the new file is complete, and survives a failure or a kill in between.

    Args:
        model: A Keras model.
        path: Ends with `.keras` (architecture, weights, optimizer), `.weights.h5` (weights and optimizer), `.h5`
            (Keras' old format), or with no suffix for a SavedModel folder. May be remote where TensorFlow can write,
            e.g. `gs://bucket/model.keras`.
        overwrite: Whether a file that is already there may be replaced.

    Raises:
        SaveError: The suffix is unknown, the file exists and `overwrite` is false, or it could not be written.

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
    try:
        if "://" in path and not path.startswith("file://"):
            _write_remote(path, write)
        else:
            _write_local(Path(path.removeprefix("file://")), write)
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
    if name.endswith(".weights.h5"):
        return lambda target: model.save_weights(target, overwrite=True)
    if name.endswith((".keras", ".h5")):
        return lambda target: model.save(target, overwrite=True)
    if "." in name.lstrip("."):
        raise SaveError(
            f"{path}: unknown suffix; use .keras (model), .weights.h5 (weights), .h5 (old format), or none for a "
            "SavedModel folder"
        )
    return lambda target: model.export(target, verbose=False)


def _suffix(name: str) -> str:
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")


def _write_local(path: Path, write: Callable[[str], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # One fixed name per target: what a kill leaves behind, the next save takes over. Keras looks at the suffix.
    beside = path.parent / f".{path.name}.tfdist-new{_suffix(path.name)}"
    _remove(beside)
    try:
        write(str(beside))
        if beside.is_dir():
            _swap_folder(beside, path)
        else:
            with open(beside, "rb") as file:
                os.fsync(file.fileno())
            os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            _remove(beside)
        raise


def _swap_folder(new: Path, path: Path) -> None:
    """Puts a complete folder in the place of an old one; the old one comes back if that fails."""
    old = path.parent / f".{path.name}.tfdist-old"
    if path.exists():
        _remove(old)
        os.rename(path, old)
    try:
        os.rename(new, path)
    except OSError:
        if old.exists() and not path.exists():
            os.rename(old, path)
        raise
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_remote(path: str, write: Callable[[str], None]) -> None:
    """Writes here, then copies: h5 and zip need a seekable file, and object stores replace a file as a whole."""
    with tempfile.TemporaryDirectory(prefix="tfdist-save-") as folder:
        local = os.path.join(folder, path.rstrip("/").rsplit("/", 1)[-1])
        write(local)
        tf.io.gfile.makedirs(path.rstrip("/").rsplit("/", 1)[0])
        if os.path.isdir(local):
            for parent, _, names in os.walk(local):
                target = os.path.join(path, os.path.relpath(parent, local)) if parent != local else path
                tf.io.gfile.makedirs(target)
                for name in names:
                    _copy(os.path.join(parent, name), f"{target}/{name}")
        else:
            _copy(local, path)


def _copy(local: str, remote: str) -> None:
    tf.io.gfile.copy(local, remote, overwrite=True)
    written, expected = tf.io.gfile.stat(remote).length, os.path.getsize(local)
    if written != expected:
        raise SaveError(f"{remote} holds {written:,} of {expected:,} bytes; save again")
