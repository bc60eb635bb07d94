"""Runs parity cases in this process and writes what came out: `parity/task.py OUT KIND [CASE ...]`.

KIND is "plain" (Keras without tfdist), or what create_strategy takes: "default", "synchronous", "ring".
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def main(out: Path, kind: str, names: list[str]) -> None:
    import numpy as np
    import tensorflow as tf

    strategy = None
    index, size = 0, 1
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    if kind != "plain":
        import tfdist

        arguments = {"default": {}, "synchronous": {"kind": "synchronous"}, "ring": {"communication": "ring"}}[kind]
        strategy = tfdist.create_strategy(**arguments)
        config = tfdist.resolve()
        if config is not None:
            index, size = config.training_index, config.cluster.num_training_tasks
    import keras

    from parity import CASES, Run

    for name, case in CASES.items():
        if names and name not in names:
            continue
        keras.utils.set_random_seed(case.seed)
        start = time.monotonic()
        try:
            result = case.run(Run(strategy, index, size, seed=case.seed))
        except Exception:
            text = traceback.format_exc()
            print(f"{name}: failed\n{text}", flush=True)
            np.savez(out / f"{name}-{index}.npz", error=np.array(text))
            if size > 1 and "tfdist.errors" in text:
                break  # the tasks no longer go on together
        else:
            print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
            np.savez(out / f"{name}-{index}.npz", **result)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
