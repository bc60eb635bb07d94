"""One of two tasks that add up arrays: `all_reduce_worker.py tfdist|tensorflow|gloo INDEX ADDRESS ADDRESS`.

An order is "BYTES CALLS"; the answer is the median of so many calls. `all_reduce.py` runs it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import teams

WARM_CALLS = 2


def main(way: str, index: int, addresses: list[str]) -> None:
    teams.end_with_parent()
    caller = {"tfdist": tfdist_caller, "tensorflow": tensorflow_caller, "gloo": gloo_caller}[way](index, addresses)

    def prepare(order: str) -> Callable[[], float]:
        size, calls = map(int, order.split())
        count = size // 4
        total = caller(np.full(count, index + 1, np.float32))()
        if total.shape != (count,) or not np.all(total == 3):
            raise SystemExit(f"{way}: 1 + 2 is {total}")
        # Opposite in sign, for the sum to stay finite where it takes the place of the array.
        call = caller(np.full(count, 1 - 2 * index, np.float32))

        def measure() -> float:
            times = []
            for _ in range(WARM_CALLS + calls):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            return statistics.median(times[WARM_CALLS:])

        return measure

    teams.serve(prepare)


# Each returns a function of an array that returns a call, which adds up that array


def tfdist_caller(index: int, addresses: list[str]) -> Callable[[np.ndarray], Callable[[], Any]]:
    from tfdist.cluster import Task
    from tfdist.collectives import meet

    tasks = [Task("worker", i) for i in range(len(addresses))]
    group = meet(addresses, tasks, index, secret=None, start_timeout_s=60, step_timeout_s=60)

    def caller(array: np.ndarray) -> Callable[[], np.ndarray]:
        return lambda: group.all_reduce([array], tag="benchmark")[0]

    return caller


def tensorflow_caller(index: int, addresses: list[str]) -> Callable[[np.ndarray], Callable[[], Any]]:
    """As a loop of one's own under MultiWorkerMirroredStrategy does it, with whatever TensorFlow chooses on CPUs."""
    cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    os.environ["TF_CONFIG"] = json.dumps(cluster)
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def caller(array: np.ndarray) -> Callable[[], Any]:
        tensor = tf.constant(array)

        def add_up(mine: tf.Tensor) -> Any:
            return tf.distribute.get_replica_context().all_reduce("SUM", [tf.identity(mine)])[0]

        @tf.function
        def step(mine: tf.Tensor) -> Any:
            return strategy.run(add_up, args=(mine,))

        return lambda: step(tensor).numpy()

    return caller


def gloo_caller(index: int, addresses: list[str]) -> Callable[[np.ndarray], Callable[[], Any]]:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"tcp://{addresses[0]}", rank=index, world_size=len(addresses))

    def caller(array: np.ndarray) -> Callable[[], Any]:
        tensor = torch.from_numpy(array)

        def call() -> Any:
            distributed.all_reduce(tensor)
            return tensor.numpy()

        return call

    return caller


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
