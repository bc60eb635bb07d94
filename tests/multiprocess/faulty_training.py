"""A training of a small model with a fault in it, and what must be true when it is over."""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
import time
from pathlib import Path

from launching import Ended, finish, is_alive, wait_for, write

# The longest time from a fault to the end of everything.
LIMIT_S = 10.0

SCRIPT = """
import os, pathlib, signal, sys, time
import tfdist

here = pathlib.Path(__file__).parent
me = tfdist.resolve().training_index

def mark(name, text=""):
    # Whole, or not there.
    part = here / f"{me}-{name}.part"
    part.write_text(text)
    part.rename(here / name)

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)

def fault():
    mark("fault", repr(time.monotonic()))

#before
strategy = tfdist.create_strategy(#arguments)
import keras
import numpy as np
import tensorflow as tf

def row(i):
    #row
    return np.float32(i % 7)

class Faults(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 4:
            mark(f"pid-{me}", str(os.getpid()))
        if batch == 8 or batch > 8 and #every_step:
            self.fault()

    def fault(self):
        #step
        pass

rows = tf.data.Dataset.range(10**9).map(lambda i: tf.reshape(tf.numpy_function(row, [i], tf.float32), [1]))
data = tf.data.Dataset.zip(rows, rows).batch(4)
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile("adam", "mse")
model.fit(data, steps_per_epoch=#steps, epochs=1, verbose=0, callbacks=[Faults()])
#after
"""


def training(
    folder: Path,
    *,
    before: str = "",
    arguments: str = "",
    row: str = "",
    step: str = "",
    every_step: bool = False,
    steps: int = 10**6,
    after: str = "",
) -> Path:
    """Writes a script that trains, by default for ever.

    Args:
        folder: Where it is written, and where it leaves marks: `pid-0`, ... when a task is amid its steps, and `fault`.
        before: Lines before `create_strategy`.
        arguments: Arguments of `create_strategy`.
        row: Lines run for each row `i` of the data.
        step: Lines run in a callback after step 9.
        every_step: Whether they run after each later step too.
        steps: The length of the training.
        after: Lines after `fit`.
    """
    source = SCRIPT
    for name, value in {"before": before, "row": row, "step": step, "after": after}.items():
        source = re.sub(rf"^( *)#{name}$", lambda m, v=value: textwrap.indent(v, m[1]), source, flags=re.MULTILINE)
    return write(
        folder,
        source.replace("#arguments", arguments).replace("#steps", str(steps)).replace("#every_step", str(every_step)),
    )


def pids_amid_steps(folder: Path, count: int, launcher: subprocess.Popen[str] | None = None) -> list[int]:
    """Waits until every task is amid its steps; returns their processes."""
    files = [folder / f"pid-{index}" for index in range(count)]

    def are_there() -> bool:
        if launcher is not None and launcher.poll() is not None:
            raise AssertionError(f"the run ended before it trained: {finish(launcher)}")
        return all(file.exists() for file in files)

    wait_for(are_there, f"{count} tasks to train", 40)
    return [int(file.read_text()) for file in files]


def seconds_since_fault(folder: Path) -> float:
    """The time since a task called `fault()`; tasks and tests read the same clock."""
    return time.monotonic() - float((folder / "fault").read_text())


def assert_nothing_left(folder: Path, ended: Ended) -> None:
    """No process, no listening port, no private folder of a run whose TMPDIR is `folder`/tmp."""
    alive = [pid for pid in _pids_of(folder) if is_alive(pid)]
    assert not alive, f"{alive} still run\n{ended}"
    addresses = re.findall(r"\w+ \d+ at 127\.0\.0\.1:(\d+)", ended.words)
    assert addresses, ended
    listening = ports_listened_on()
    assert not [port for port in addresses if int(port) in listening], ended
    # (TensorFlow leaves files of autograph there.)
    assert not list((folder / "tmp").glob("tfdist*")), ended


def _pids_of(folder: Path) -> list[int]:
    """Every process that has the folder's script on its command line."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if str(folder / "script.py").encode() in command:
            found.append(int(pid))
    return found


def ports_listened_on() -> set[int]:
    """All TCP ports that anybody listens on."""
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports
