"""A chief, two workers and a ps, started by hand, that train while a worker dies and comes back.

The labels are the numbers of the rows, and a metric counts rows and adds up labels: a row that is lost or counted twice
shows in every epoch.
"""

from __future__ import annotations

import re
from pathlib import Path

from without_launcher import Cluster

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


class Losing(Cluster):
    """The cluster, whose worker 1 can be killed and started anew.

    Args:
        folder: For logs.
        hold: Whether the first epoch on the workers' own data stops within it, until `go_on`.
    """

    def __init__(self, folder: Path, *, hold: bool = False) -> None:
        super().__init__(folder, SCRIPT, folder, workers=WORKERS, ps=1)
        if hold:
            (folder / "hold").touch()

    def go_on(self) -> None:
        (self.folder / "hold").unlink()

    def stop(self, kind: str) -> None:
        """Lets a fit end after its epoch."""
        (self.folder / f"stop {kind}").touch()

    def cycle(self, kind: str) -> None:
        """Kills the worker while a fit runs, and brings it back."""
        self.kill("worker 1")
        self.wait_for_words(f"{kind} epoch", 2)
        self.bring_back("worker 1")
        self.wait_for_words(f"{kind} epoch", 2)

    def epochs(self, kind: str) -> list[tuple[float, int]]:
        """Returns (what the metric showed, iterations so far) of each epoch."""
        found = re.findall(rf"^{kind} epoch \d+ ([\d.]+) (\d+)$", self.log("chief 0"), re.MULTILINE)
        return [(float(shown), int(iterations)) for shown, iterations in found]

    def evaluated(self) -> list[float]:
        return [float(shown) for shown in re.findall(r"evaluate \w+ ([\d.]+)", self.log("chief 0"))]


def assert_exact(cluster: Losing, kind: str, losses: int) -> None:
    """All epochs hold each row once, and only steps that were in flight when a worker died were made twice."""
    epochs = cluster.epochs(kind)
    wrong = [shown for shown, _ in epochs if abs(shown - EXACT) > 1e-2]
    assert not wrong, f"{wrong} instead of {EXACT}\n{cluster}"
    expected, iterations = STEPS * len(epochs), epochs[-1][1]
    assert expected <= iterations <= expected + losses * IN_FLIGHT, f"{iterations} of {expected}\n{cluster}"
