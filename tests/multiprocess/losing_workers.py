"""A chief, two workers and a ps, started by hand, that train while a worker dies and comes back.

The labels are the numbers of the rows, and a metric counts rows and adds up labels: a row that is lost or counted twice
shows in every epoch.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import portpicker
from launching import environment, wait_for, write

from tfdist import tf_config

ROWS, BATCH_SIZE, WORKERS = 1200, 4, 2
STEPS = ROWS // BATCH_SIZE
IN_FLIGHT = 2 * WORKERS
HOLD_AT = 20
SCRIPT = f"""
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {str(Path(__file__).parent)!r})

    import keras, numpy as np, tensorflow as tf, tfdist
    strategy = tfdist.create_strategy(start_timeout_s=60)
    from counting import TwoCounts

    folder = Path(sys.argv[1])
    x = np.random.default_rng(0).normal(size=({ROWS}, 6)).astype("float32")
    y = np.arange({ROWS}, dtype="float32")[:, None]

    def share(context):
        rows = tf.data.Dataset.from_tensor_slices((x, y))
        return rows.shard(context.num_input_pipelines, context.input_pipeline_id).batch({BATCH_SIZE})

    class Tell(keras.callbacks.Callback):
        def __init__(self, kind):
            super().__init__()
            self.kind = kind

        def on_train_begin(self, logs=None):
            self.before = int(self.model.optimizer.iterations)

        def on_train_batch_end(self, batch, logs=None):
            if self.kind == "own" and batch == {HOLD_AT} and (folder / "hold").exists():
                print("holds", flush=True)
                while (folder / "hold").exists():
                    time.sleep(0.02)

        def on_epoch_end(self, epoch, logs=None):
            iterations = int(self.model.optimizer.iterations) - self.before
            print(self.kind, "epoch", epoch, logs["two_counts"], iterations, flush=True)
            self.model.stop_training = (folder / f"stop {{self.kind}}").exists()

    def model_of():
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16), keras.layers.Dense(1)])
            model.compile("sgd", "mae", metrics=[TwoCounts()], steps_per_execution=1)
        return model

    for kind, arguments in (("own", dict(x=share)), ("fed", dict(x=x, y=y, batch_size={BATCH_SIZE}))):
        model = model_of()
        model.fit(**arguments, epochs=10**6, verbose=0, callbacks=[Tell(kind)])
        for what, data in (("own", dict(x=share)), ("fed", dict(x=x, y=y, batch_size={BATCH_SIZE}))):
            print(kind, "evaluate", what, model.evaluate(**data, verbose=0)[1], flush=True)
"""
# What TwoCounts shows over all rows.
EXACT = ROWS + sum(range(ROWS)) / 1000
DEADLINE_S = 120


class Losing:
    """The cluster, whose worker 1 can be killed and started anew.

    Args:
        folder: For logs.
        hold: Whether the first epoch on the workers' own data stops within it, until `go_on`.
    """

    def __init__(self, folder: Path, *, hold: bool = False) -> None:
        if hold:
            (folder / "hold").touch()
        ports = [portpicker.pick_unused_port() for _ in range(2 + WORKERS)]
        self._folder, self._script = folder, write(folder, SCRIPT)
        self._cluster = tf_config.local_cluster(workers=WORKERS, ps=1, chief=True, ports=ports)
        self._tasks = {str(task): task for task in self._cluster.tasks}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Losing:
        for name in self._tasks:
            self.start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def start(self, name: str) -> None:
        with open(self._folder / f"{name}.log", "ab") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-u", self._script, self._folder],
                env=environment(
                    {"TF_CONFIG": tf_config.build(self._cluster, self._tasks[name]), "TF_CPP_MIN_LOG_LEVEL": "2"}
                ),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self, name: str) -> None:
        self._running[name].kill()
        self._running[name].wait()

    def go_on(self) -> None:
        (self._folder / "hold").unlink()

    def stop(self, kind: str) -> None:
        """Lets a fit end after its epoch."""
        (self._folder / f"stop {kind}").touch()

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def wait_for_words(self, words: str, times: int = 1, begun: int | None = None) -> None:
        """Waits until the chief has said the words so many times more, from now or a place in its log on."""
        begun = len(self.log("chief 0")) if begun is None else begun

        def said() -> bool:
            if self._running["chief 0"].poll() is not None:
                raise AssertionError(f"the chief ended\n{self}")
            return len(re.findall(words, self.log("chief 0")[begun:])) >= times

        wait_for(said, f"{words!r}\n{self}", DEADLINE_S)

    def cycle(self, kind: str) -> None:
        """Kills the worker while a fit runs, and brings it back."""
        self.kill("worker 1")
        self.wait_for_words(f"{kind} epoch", 2)
        self.bring_back()
        self.wait_for_words(f"{kind} epoch", 2)

    def bring_back(self) -> None:
        begun = len(self.log("chief 0"))
        self.start("worker 1")
        self.wait_for_words("worker 1 is back", begun=begun)

    def codes(self) -> dict[str, int]:
        processes = self._running
        wait_for(lambda: all(p.poll() is not None for p in processes.values()), f"all to end\n{self}", DEADLINE_S)
        return {name: process.returncode for name, process in processes.items()}

    def epochs(self, kind: str) -> list[tuple[float, int]]:
        """Returns (what the metric showed, iterations so far) of each epoch."""
        found = re.findall(rf"^{kind} epoch \d+ ([\d.]+) (\d+)$", self.log("chief 0"), re.MULTILINE)
        return [(float(shown), int(iterations)) for shown, iterations in found]

    def evaluated(self) -> list[float]:
        return [float(shown) for shown in re.findall(r"evaluate \w+ ([\d.]+)", self.log("chief 0"))]

    def __str__(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name)[-6000:]}" for name in self._tasks)


def assert_exact(cluster: Losing, kind: str, losses: int) -> None:
    """All epochs hold each row once, and only steps that were in flight when a worker died were made twice."""
    epochs = cluster.epochs(kind)
    wrong = [shown for shown, _ in epochs if abs(shown - EXACT) > 1e-2]
    assert not wrong, f"{wrong} instead of {EXACT}\n{cluster}"
    expected, iterations = STEPS * len(epochs), epochs[-1][1]
    assert expected <= iterations <= expected + losses * IN_FLIGHT, f"{iterations} of {expected}\n{cluster}"
