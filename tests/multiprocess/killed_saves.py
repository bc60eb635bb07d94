"""`killed_saves.py OUT KILLS` kills tasks in the midst of saving and has each next one read what the last one left.

Each child is forked after TensorFlow's import and before its start. It reads what the child before it left, then saves
a model whose every weight is the number of the save, so that a mixture shows; this process kills it at a random moment
of a save. Prints {kind: number of kills in the midst of a save}.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist import checkpoints

KINDS = ("m.keras", "m.weights.h5", "exported", "checkpoints")
CHILD_DEADLINE_S = 60.0


def new_model() -> keras.Model:
    model = keras.Sequential([keras.Input((30,)), keras.layers.Dense(300), keras.layers.Dense(30)])
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
    elif kind == "m.weights.h5":
        model = new_model()
        tfdist.load_weights(model, path)
    else:
        return number_of(tf.saved_model.load(str(path)).variables)
    return number_of([*model.weights, *model.optimizer.variables])


def child(out: Path, kind: str, write_end: int, last: int, saves: int) -> None:
    def tell(what: str, number: int) -> None:
        os.write(write_end, (json.dumps([what, number]) + "\n").encode())

    tell("left", number_left(out, kind))
    model = new_model()
    for number in range(last + 1, last + 1 + saves):
        set_all(model, number)
        tell("begins", number)
        if kind == "checkpoints":
            checkpoints.write(str(out / kind), model, checkpoints.Position(number, number))
            checkpoints.prune(str(out / kind), 2)
        else:
            tfdist.save(model, out / kind)
        tell("ended", number)


class Children:
    """The processes that save one kind of file, one after the other."""

    def __init__(self, out: Path, kind: str) -> None:
        self.out, self.kind = out, kind
        self.begun = self.done = 0  # numbers of saves
        self.took = 0.0

    def run(self, share: float | None) -> bool:
        """Kills a new child when this share of its second save has passed; returns whether it was in its midst.

        Without a share the child saves once and ends.
        """
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child(self.out, self.kind, write_end, self.begun, 1 if share is None else 3)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write_end)
        first, deadline, kill_at = self.begun + 1, time.monotonic() + CHILD_DEADLINE_S, None
        with os.fdopen(read_end, "rb", buffering=0) as pipe:
            while True:
                until = deadline if kill_at is None else kill_at
                if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                    os.kill(pid, signal.SIGKILL)
                    kill_at = deadline
                line = pipe.readline()
                if not line:
                    break
                what, number = json.loads(line)
                now = time.monotonic()
                if what == "left":
                    assert number in (self.done, self.begun), f"{self.kind} {number}, not {self.done} or {self.begun}"
                elif what == "begins":
                    self.begun, began_at = number, now
                    # A process's first save is slower than the rest, so it only tells how long one takes.
                    if number == first + 1 and share is not None:
                        kill_at = now + share * self.took
                else:
                    self.done, self.took = number, now - began_at
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, -signal.SIGKILL), f"{self.kind}: a child ended with {status}"
        return self.begun > self.done


def main(out: Path, kills: int) -> None:
    chance = random.Random(0)
    in_the_midst = {}
    for kind in KINDS:
        children = Children(out, kind)
        in_the_midst[kind] = sum(children.run(chance.random()) for _ in range(kills))
        children.run(None)  # reads, and takes over what was left beside
    checkpoints.newest(str(out / "checkpoints"))
    beside = [path.name for path in out.rglob(".*")]
    assert not beside, beside
    print(json.dumps(in_the_midst))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
