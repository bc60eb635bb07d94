"""What training needs to go on -> a folder of numbered checkpoints, and back.

    run/
      step-0000000040/
        manifest.json         what is in it (below); written last
        model.weights.h5      weights and optimizer, as Keras writes them: `model.load_weights` reads it without us
        random.npz            states of the layers' random generators, which Keras' file leaves out
      step-0000000050/
        ...
      done.json               training has ended: written at its end, gone when it goes on

The manifest holds the format's version, the position (`step` in all, `epoch` and `batch` to go on with), the size and
SHA-256 of each file, name, shape and dtype of each variable and one SHA-256 of all their values, seeds, versions, the
number of tasks and the global batch size. Readers ignore entries they don't know, so that later versions can add more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import files, process, saving
from tfdist.errors import LoadError, SaveError

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST, WEIGHTS, RANDOM, DONE = "manifest.json", "model.weights.h5", "random.npz", "done.json"
_NAME = re.compile(r"step-(\d+)$")
_fits: Counter[str] = Counter()  # trainings begun by this process, by folder


class BrokenError(Exception):
    """A checkpoint of which files are missing or are not as they were written; never seen outside."""


@dataclass(frozen=True)
class Position:
    """Where training stands between two batches.

    Attributes:
        step: Batches trained in all.
        epoch: The epoch to go on with, counted from 0.
        batch: The batch of that epoch to go on with; 0 is a whole epoch's start.
    """

    step: int
    epoch: int
    batch: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: where it is, and its manifest."""

    path: str
    manifest: dict[str, Any]

    @property
    def position(self) -> Position:
        return Position(self.manifest["step"], self.manifest["epoch"], self.manifest["batch"])


def state(model: Any) -> dict[str, list[Any]]:
    """Returns the variables that training goes on from, by group; optimizers of a model's own by attribute name."""
    weights = {id(variable) for variable in model.weights}
    groups = {
        "weights": list(model.weights),
        "random": [variable for variable in model.variables if id(variable) not in weights],
    }
    for name, optimizer in _optimizers(model).items():
        groups[name] = list(optimizer.variables)
    return groups


def _optimizers(model: Any) -> dict[str, Any]:
    first = getattr(model, "optimizer", None)
    found = {} if first is None else {"optimizer": first}
    for name, value in sorted(vars(model).items()):
        if isinstance(value, keras.optimizers.Optimizer) and all(value is not other for other in found.values()):
            found[name.lstrip("_")] = value
    return found


def write(
    folder: str,
    model: Any,
    position: Position,
    *,
    tasks: int = 1,
    global_batch_size: int | None = None,
    seeds: dict[str, int | None] | None = None,
) -> str:
    """Returns the path of a new checkpoint in `folder`; what is written under that path is whole.

    Raises:
        SaveError: It could not be written; older checkpoints are untouched.
    """
    path = f"{folder.rstrip('/')}/step-{position.step:010d}"
    groups = state(model)
    manifest = {
        "format": FORMAT,
        "step": position.step,
        "epoch": position.epoch,
        "batch": position.batch,
        "saved_at": _now(),
        "tasks": tasks,
        "global_batch_size": global_batch_size,
        "seeds": seeds or {},
        "versions": {
            "tfdist": version("tfdist"),
            "tensorflow": tf.version.VERSION,
            "keras": keras.version(),
            "python": platform.python_version(),
        },
        "optimizers": {name: type(optimizer).__name__ for name, optimizer in _optimizers(model).items()},
        "variables": {name: [_describe(v) for v in variables] for name, variables in groups.items()},
        "sha256": saving.digest(saving.values_of(v for variables in groups.values() for v in variables)),
    }

    def write_files(target: str) -> None:
        new = Path(target)
        new.mkdir()
        model.save_weights(new / WEIGHTS)
        np.savez(new / RANDOM, *saving.values_of(groups["random"]))
        manifest["files"] = {name: _file(new / name) for name in (WEIGHTS, RANDOM)}
        (new / MANIFEST).write_text(_text(manifest), encoding="utf-8")

    try:
        size = saving.size_of(v for variables in groups.values() for v in variables)
        files.write(path, write_files, last=MANIFEST, size=size)
    except SaveError:
        raise
    except Exception as error:
        raise SaveError(
            f"the checkpoint {path} could not be written ({type(error).__name__}: {error}); older ones are untouched"
        ) from error
    return path


def _describe(variable: Any) -> list[Any]:
    return [variable.path, list(variable.shape), str(variable.dtype)]


def _text(manifest: dict[str, Any]) -> str:
    """JSON that people read: an entry, or a variable, a line."""

    def lines(entries: list[str], indent: str) -> str:
        return ",".join(f"\n{indent}{entry}" for entry in entries)

    entries = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in manifest.items() if key != "variables"]
    groups = [
        f"{json.dumps(name)}: [{lines([json.dumps(variable) for variable in variables], '   ')}]"
        for name, variables in manifest["variables"].items()
    ]
    return "{" + lines([*entries, f'"variables": {{{lines(groups, "  ")}}}'], " ") + "\n}\n"


def _file(path: Path) -> dict[str, Any]:
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            sha.update(block)
    return {"bytes": path.stat().st_size, "sha256": sha.hexdigest()}


def begin(folder: str) -> None:
    """Notes that training begins in this folder, or goes on."""
    count_fit(folder)
    path = f"{folder.rstrip('/')}/{DONE}"
    if tf.io.gfile.exists(path):
        tf.io.gfile.remove(path)


def end(folder: str, *, step: int) -> None:
    """Notes that training has ended, by itself or by a callback, after so many steps in all."""
    path = f"{folder.rstrip('/')}/{DONE}"
    run, attempt = this_run()
    noted = {"step": step, "ended_at": _now(), "run": run, "attempt": attempt, "fit": _fits[folder]}
    text = json.dumps(noted) + "\n"
    try:
        files.write(path, lambda target: Path(target).write_text(text, encoding="utf-8"))
    except (OSError, tf.errors.OpError) as error:
        # What was trained is safe, and most have no evaluator.
        logger.warning("%s could not be written (%s): an evaluator will wait in vain for more checkpoints", path, error)


def ended(folder: str) -> dict[str, Any] | None:
    """Returns what `end` has noted, or None while training goes on, or has not begun."""
    try:
        with tf.io.gfile.GFile(f"{folder.rstrip('/')}/{DONE}") as file:
            noted = json.loads(file.read())
    except (tf.errors.NotFoundError, ValueError):
        return None
    return noted if isinstance(noted, dict) else None


def count_fit(folder: str) -> int:
    """Returns the number of the `fit` that begins among those of this process with this folder, from 1 on.

    The chief and the evaluator run the same script, and so come to the same number.
    """
    _fits[folder] += 1
    return _fits[folder]


def this_run() -> tuple[str | None, int]:
    """Returns a name that all tasks of this run share and no other run has, and which of its attempts this is.

    The name is None without a launcher of all tasks: those of several hosts have a folder each, and no secret.
    """
    info = process.LaunchInfo.read(os.environ)
    has_name = info.run_dir is not None and info.secret is not None
    return os.path.basename(str(info.run_dir)) if has_name else None, info.attempt


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def prune(folder: str, keep: int | None, *, step: int) -> None:
    """Removes all but the newest `keep` checkpoints up to `step`, the one that was just written.

    A later one is broken and was passed over: did it count, it would take the place of a whole one.
    """
    for path in [] if keep is None else _listed(folder, step)[keep:]:
        files.remove(path, first=MANIFEST)


def newest(folder: str) -> Checkpoint | None:
    """Returns the newest whole checkpoint, or None where training has saved none.

    Broken ones are passed over with a warning.

    Raises:
        LoadError: There are checkpoints, and not one of them is whole; or a newer tfdist has written them.
    """
    files.tidy(folder)
    broken = []
    for path in _listed(folder):
        if not is_whole(path):
            logger.warning("%s has no %s: its writing was broken off; it is passed over", path, MANIFEST)
            continue
        try:
            return at(path)
        except BrokenError as error:
            broken.append(f"{path}: {error}")
            logger.warning("%s is broken (%s); looking for an older one", path, error)
    if broken:
        raise LoadError(
            f"{folder} holds no whole checkpoint ({'; '.join(broken)}); remove it to start anew, or name another folder"
        )
    return None


def whole(folder: str) -> list[str]:
    """Returns the paths of the checkpoints in a folder that others may be writing to, oldest first."""
    return [path for path in reversed(_listed(folder)) if is_whole(path)]


def is_whole(path: str) -> bool:
    """Whether a checkpoint was written to its end, and is not being removed."""
    return bool(tf.io.gfile.exists(f"{path}/{MANIFEST}"))


def at(path: str) -> Checkpoint:
    """Returns the checkpoint at a path.

    Raises:
        BrokenError: Its files are not as its manifest says.
        LoadError: A newer tfdist has written it.
    """
    try:
        with files.reading(path) as here:
            return Checkpoint(path, _checked(here))
    except LoadError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, tf.errors.OpError, OSError) as error:
        raise BrokenError(str(error)) from error


def _listed(folder: str, last: int | None = None) -> list[str]:
    """Returns the paths of a folder's checkpoints, whole or not, newest first, from step `last` on."""
    if not tf.io.gfile.isdir(folder):
        return []
    names = [name.rstrip("/") for name in tf.io.gfile.listdir(folder)]
    numbered = sorted(((int(m[1]), name) for name in names if (m := _NAME.match(name))), reverse=True)
    numbered = [(step, name) for step, name in numbered if last is None or step <= last]
    return [f"{folder.rstrip('/')}/{name}" for _, name in numbered]


def _checked(here: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint whose files are all as it says."""
    manifest: dict[str, Any] = json.loads((here / MANIFEST).read_text(encoding="utf-8"))
    if int(manifest["format"]) > FORMAT:
        raise LoadError(
            f"{here} has format {manifest['format']} and this tfdist reads up to {FORMAT}; it was written by tfdist "
            f"{manifest.get('versions', {}).get('tfdist', 'of a later version')}: install that"
        )
    for name, expected in manifest["files"].items():
        if not (here / name).exists():
            raise ValueError(f"{name} is missing")
        size = (here / name).stat().st_size
        if size != expected["bytes"]:
            raise ValueError(f"{name} holds {size:,} of {expected['bytes']:,} bytes")
        if _file(here / name) != expected:
            raise ValueError(f"{name} does not have its checksum")
    for name in ("step", "epoch", "batch"):
        if not isinstance(manifest[name], int):
            raise ValueError(f"its {name} is {manifest[name]!r}")
    return manifest


def read(checkpoint: Checkpoint, model: Any) -> None:
    """Puts a checkpoint's values into the model of this task, bit by bit as they were.

    Raises:
        LoadError: It was saved from another model; the message says where they differ.
    """
    groups = state(model)
    difference = _difference(checkpoint.manifest, groups, _optimizers(model))
    if difference:
        raise LoadError(f"{checkpoint.path} was saved from another model: {difference}; use another folder")
    with files.reading(checkpoint.path) as here:
        model.load_weights(here / WEIGHTS)
        with np.load(here / RANDOM, allow_pickle=False) as arrays:
            for number, variable in enumerate(groups["random"]):
                variable.assign(arrays[f"arr_{number}"])
    if (
        saving.digest(saving.values_of(v for variables in groups.values() for v in variables))
        != (checkpoint.manifest["sha256"])
    ):
        raise LoadError(
            f"{checkpoint.path} does not give back all values that were saved; does a layer of your own store its "
            "weights in another way, or is one of its parts not known to Keras?"
        )


def _difference(manifest: dict[str, Any], groups: dict[str, list[Any]], optimizers: dict[str, Any]) -> str:
    """Returns how the model that was saved differs from the one here, or ""."""
    there, here = manifest["optimizers"], {name: type(value).__name__ for name, value in optimizers.items()}
    for name in {**there, **here}:
        if there.get(name) != here.get(name):
            return f"its {name} is {there.get(name, 'none')} there and {here.get(name, 'none')} here"
    for name, variables in groups.items():
        saved, now = manifest["variables"].get(name, []), [_describe(v) for v in variables]
        if len(saved) != len(now):
            unbuilt = " (build it before fit)" if name in optimizers and not optimizers[name].built else ""
            counts = f"{len(saved)} variables of its {name} there and {len(now)} here{unbuilt}"
            first = next((i for i, (a, b) in enumerate(zip(saved, now, strict=False)) if a[1:] != b[1:]), None)
            return counts if first is None else f"{counts}, first {_pair(saved[first], now[first])}"
        for a, b in zip(saved, now, strict=True):
            if a[1:] != b[1:]:
                return f"in its {name}, {_pair(a, b)}"
    return ""


def _pair(there: list[Any], here: list[Any]) -> str:
    def text(entry: list[Any]) -> str:
        return f"{entry[0]} {entry[2]} ({', '.join(map(str, entry[1]))})"

    return f"{text(there)} there and {text(here)} here"
