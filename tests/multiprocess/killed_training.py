"""`killed_training.py OUT KILLS` kills trainings amid a ModelCheckpoint that writes one name again and again.

Each child is forked after TensorFlow's import and before its start. It loads the file that the child before it left, as
plain Keras does, then trains with a checkpoint after every step; this process kills it at a random moment. All weights
are set to the number of the step, so that a mixture shows. Prints {kind: number of kills amid a save}.
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

import tfdist

KINDS = ("m.keras", "m.weights.h5")
CHILD_DEADLINE_S = 60.0


class Tell(keras.callbacks.Callback):
    """Says to the parent that a save begins or has ended; sets all weights before it begins."""

    def __init__(self, write_end: int, what: str, first: int) -> None:
        super().__init__()
        self.write_end, self.what, self.number = write_end, what, first

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.what == "begins":
            self.model.set_weights([np.full_like(w, self.number) for w in self.model.get_weights()])
        os.write(self.write_end, (json.dumps([self.what, self.number]) + "\n").encode())
        self.number += 1


def new_model() -> keras.Model:
    model = keras.Sequential([keras.Input((30,)), keras.layers.Dense(500), keras.layers.Dense(30)])
    model.compile("sgd", "mse", jit_compile=False)
    return model


def child(path: Path, write_end: int, first: int) -> None:
    weights_only = path.suffix == ".h5"
    with tfdist.create_strategy().scope():
        model = new_model()
    if path.exists():
        if weights_only:
            model.load_weights(path)
            loaded = model
        else:
            loaded = keras.models.load_model(path)
        (number,) = np.unique(np.concatenate([w.ravel() for w in loaded.get_weights()]))  # or it is a mixture
        os.write(write_end, (json.dumps(["left", int(number)]) + "\n").encode())
    saves = keras.callbacks.ModelCheckpoint(path, save_freq=1, save_weights_only=weights_only)
    callbacks = [Tell(write_end, "begins", first), saves, Tell(write_end, "ended", first)]
    x = np.zeros((1000, 30), "float32")
    model.fit(x, x, batch_size=1, epochs=100, verbose=0, callbacks=callbacks)


def killed_amid_a_save(path: Path, state: dict[str, int], share: float) -> bool:
    """Kills a new child when this share of its third save has passed; returns whether it was amid it."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child(path, write_end, state["begun"] + 1)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write_end)
    deadline, kill_at, began_at, took = time.monotonic() + CHILD_DEADLINE_S, None, 0.0, 0.0
    first = state["begun"] + 1
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
            if what == "left":
                assert number in (state["done"], state["begun"]), f"{path.name} holds {number}, not one of {state}"
            elif what == "begins":
                state["begun"], began_at = number, time.monotonic()
                if number == first + 2:
                    kill_at = began_at + share * took
            else:
                state["done"], took = number, time.monotonic() - began_at
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, "a child failed"
    return state["begun"] > state["done"]


def main(out: Path, kills: int) -> None:
    chance = random.Random(0)
    amid = {}
    for kind in KINDS:
        state = {"begun": 0, "done": 0}
        amid[kind] = sum(killed_amid_a_save(out / kind, state, chance.random()) for _ in range(kills))
    print(json.dumps(amid))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
