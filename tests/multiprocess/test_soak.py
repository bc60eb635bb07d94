"""Long runs: memory that does not grow, and starts and kills that leave nothing. `pytest -m soak`."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
from launching import is_alive, pids_in, run, started, wait_for, write
from losing_workers import Losing, assert_exact

pytestmark = pytest.mark.soak

TRAINING = """
    import json, os, sys
    from pathlib import Path
    import keras, numpy as np, tfdist

    strategy = tfdist.create_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(800, 8)).astype("float32")
    out, resident = Path(sys.argv[1]), []

    class Sample(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)

    held_out = (x[:80], x[:80, :1])
    model.fit(x, x[:, :1], batch_size=8, epochs=50, verbose=0, validation_data=held_out, callbacks=[Sample()])
    (out / f"{tfdist.resolve().task.index}.json").write_text(json.dumps(resident))
"""

STAYING = """
    import os, sys, time
    from pathlib import Path
    import tfdist

    tfdist.create_strategy()
    Path(sys.argv[1], f"{os.getpid()}.pid").touch()
    time.sleep(120)
"""


def test_memory_does_not_grow_over_5000_steps(tmp_path):
    ended = run("--workers", 2, write(tmp_path, TRAINING), tmp_path, deadline_s=300)
    assert ended.code == 0, str(ended)
    for index in range(2):
        resident = json.loads((tmp_path / f"{index}.json").read_text())
        # The first epochs still fill caches and arenas; 4,000 steps after them may add what 2 KiB a step would.
        assert resident[-1] - resident[9] < 8, f"task {index}, MiB after each 100 steps: {resident}"


def test_twenty_starts_and_kills_leave_no_process_and_no_port(tmp_path):
    """Each time another task, or the launcher itself, is killed; a leftover would hold a port or a core."""
    choose = random.Random(0)
    script = write(tmp_path, STAYING)
    for number in range(20):
        folder = Path(tmp_path, str(number))
        folder.mkdir()
        with started("--workers", 2, script, folder) as launcher:
            pids = pids_in(folder, 2)
            victim = choose.choice([*pids, launcher.pid])
            os.kill(victim, signal.SIGKILL)
            launcher.communicate(timeout=20)
        wait_for(lambda pids=pids: not any(map(is_alive, pids)), f"the tasks of start {number} to be gone", 5)


@pytest.mark.parametrize("kind", ["own", "fed"])
def test_ten_times_a_worker_dies_and_comes_back_and_every_row_counts_once(kind, tmp_path):
    with Losing(tmp_path) as cluster:
        if kind == "fed":
            cluster.stop("own")
        cluster.wait_for_words(f"{kind} epoch")
        for _ in range(10):
            cluster.cycle(kind)
        cluster.stop("own")
        cluster.stop("fed")
        assert set(cluster.codes().values()) == {0}, str(cluster)
        assert_exact(cluster, kind, losses=10)
