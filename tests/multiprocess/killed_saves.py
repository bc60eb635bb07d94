"""`killed_saves.py OUT KIND [planted]` kills tasks wherever a save has changed the disk, and reads what they leave.

Child 1, 2, 3, ... reads what the one before it left, saves a model whose every number is that of the save, so that a
mixture shows, and kills itself as soon as it sees the 1st, 2nd, 3rd, ... change of names or sizes (by powers of two)
under OUT. It looks after each call in the modules that write, and whenever Python opens, renames or removes something.
Each child is forked after TensorFlow's import and before its start. Prints the number of moments at which one was
killed.

With `planted`, files are written straight to their place: the faulty saving that this program has to notice.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from stat import S_ISDIR
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist import checkpoints, files

CHILD_DEADLINE_S = 60.0
MOST_MOMENTS = 60
WRITERS = (
    "/h5py/",
    "/keras/src/saving/",
    "/tensorflow/python/checkpoint/",
    "/tensorflow/python/eager/execute.py",
    "/tensorflow/python/lib/io/",
    "/tensorflow/python/saved_model/",
    "/tensorflow/python/training/",
    "/tfdist/",
    "/shutil.py",
    "/zipfile",
)


def new_model(number: int = 0) -> keras.Model:
    """A model whose graph holds the number as well as its weights: an export has a file for each."""
    layers = [keras.layers.Dense(300), keras.layers.Dense(30), keras.layers.Rescaling(0.0, offset=float(number))]
    model = keras.Sequential([keras.Input((30,)), *layers])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def set_all(model: keras.Model, number: int) -> None:
    for variable in (*model.weights, *model.optimizer.variables):
        variable.assign(np.full(variable.shape, number, variable.dtype))


def number_of(arrays: Any) -> int:
    """The one number that fills all arrays."""
    numbers = {float(n) for array in arrays for n in np.unique(np.asarray(array))}
    assert len(numbers) == 1, f"a mixture: {sorted(numbers)[:5]}"
    return int(numbers.pop())


def number_left(out: Path, kind: str) -> int:
    """What the last child left, read as a user would; 0 for nothing."""
    path = out / kind
    if kind == "checkpoints":
        found = checkpoints.newest(str(path))
        if found is None:
            return 0
        model = new_model()
        checkpoints.read(found, model)
        assert found.position.step == number_of(model.weights)
    elif not path.exists():
        return 0
    elif kind == "m.keras":
        model = tfdist.load(path)
        assert model.layers[-1].offset == number_of(model.weights)
    elif kind == "m.weights.h5":
        model = new_model()
        tfdist.load_weights(model, path)
    else:
        loaded = tf.saved_model.load(str(path))
        return number_of([*loaded.variables, loaded.serve(np.ones((1, 30), "float32"))])
    return number_of([*model.weights, *model.optimizer.variables])


def save(model: keras.Model, out: Path, kind: str, number: int) -> None:
    if kind == "checkpoints":
        checkpoints.write(str(out / kind), model, checkpoints.Position(number, number))
        checkpoints.prune(str(out / kind), 2, step=number)
    else:
        tfdist.save(model, out / kind)


# -- killing


def look(folder: Path) -> Any:
    """What tells two states of a folder apart."""
    try:
        return [
            (path, state.st_ino, 0 if S_ISDIR(state.st_mode) else state.st_size.bit_length())
            for parent, folders, names in os.walk(folder)
            for path in [os.path.join(parent, name) for name in (*folders, *names)]
            for state in [os.stat(path)]
        ]
    except FileNotFoundError:  # in between
        return None


def die_at_change(folder: Path, moment: int) -> None:
    """Kills this process as soon as the folder is seen to have changed so many times."""
    last, left, looking = look(folder), moment, False
    writes: dict[Any, bool] = {}

    def see() -> None:
        nonlocal last, left, looking
        if looking:
            return
        looking = True
        now = look(folder)
        if now is not None and now != last:
            last, left = now, left - 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
        looking = False

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event not in ("return", "c_return"):
            return
        code = frame.f_code
        if code not in writes:
            writes[code] = any(part in code.co_filename for part in WRITERS)
        if writes[code]:
            see()

    def audit(event: str, arguments: Any) -> None:
        if event.startswith(("open", "os.", "shutil.")) and not looking:
            see()

    sys.addaudithook(audit)
    sys.setprofile(profile)


def child(out: Path, kind: str, tell: Callable[[str, int], None], last: int, moment: int) -> None:
    tell("left", number_left(out, kind))
    files.tidy(str(out))
    files.tidy(str(out / kind))
    number = last + 1
    model = new_model(number)
    set_all(model, number)
    tell("begins", number)
    die_at_change(out, moment)
    save(model, out, kind, number)
    sys.setprofile(None)
    tell("ended", number)


class Children:
    """The processes that save one kind of file, one after the other."""

    def __init__(self, out: Path, kind: str) -> None:
        self.out, self.kind = out, kind
        self.begun = self.done = 0  # numbers of saves

    def run(self, moment: int) -> bool:
        """Returns whether a new child came to this moment of its save, and so died there."""
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child(self.out, self.kind, lambda *told: write_line(write_end, told), self.begun, moment)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write_end)
        deadline = time.monotonic() + CHILD_DEADLINE_S
        with os.fdopen(read_end, "rb", buffering=0) as pipe:
            while True:
                if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    os.kill(pid, signal.SIGKILL)
                    raise TimeoutError(f"{self.kind}, moment {moment}: a child took longer than {CHILD_DEADLINE_S} s")
                line = pipe.readline()
                if not line:
                    break
                what, number = json.loads(line)
                if what == "left":
                    assert number in (self.done, self.begun), f"{self.kind} {number}, not {self.done} or {self.begun}"
                    self.done = number  # what was seen once must stay
                elif what == "begins":
                    self.begun = number
                else:
                    self.done = number
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, -signal.SIGKILL), f"{self.kind}, moment {moment}: a child ended with {status}"
        return status != 0


def write_line(descriptor: int, told: Any) -> None:
    os.write(descriptor, (json.dumps(told) + "\n").encode())


def main(out: Path, kind: str, *, planted: bool) -> None:
    children = Children(out, kind)
    assert not children.run(10**9)  # something to lose
    if planted:
        files.write = lambda path, write, **kwargs: write(path)
    moment = 1
    while children.run(moment):
        moment += 1
        assert moment < MOST_MOMENTS, "a save without end"
    children.run(10**9)  # reads what the last one has left
    beside = [path.name for path in out.rglob(".*")]
    assert not beside, beside
    print(moment - 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], planted=sys.argv[3:] == ["planted"])
