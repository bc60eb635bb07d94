"""What tasks compute on: one GPU each, dealt out by the launcher; GPUs that are not there are faked by their names."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from launching import environment, run, write

# Names that TensorFlow lists as physical devices; all that it makes of them is its own.
FAKE = """
import sys
import tensorflow as tf
context = sys.modules["tensorflow.python.eager.context"]
context.pywrap_tfe.TF_ListPhysicalDevices = lambda: [
    b"/physical_device:CPU:0", b"/physical_device:GPU:0", b"/physical_device:GPU:1"
]
"""


@pytest.mark.parametrize("visible", ["3,GPU-8932f937,MIG-41b3d2b1", ""])
def test_a_host_runs_a_worker_for_each_gpu_unless_told_otherwise(tmp_path, visible):
    script = write(tmp_path, "import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'])\n")
    ended = run(script, env={"CUDA_VISIBLE_DEVICES": visible})
    assert ended.code == 0, ended
    names = visible.split(",")
    assert [ended.said_by(f"worker {i}") for i in range(len(names) + 1)] == [*([name] for name in names), []]


def by_hand(script, env):
    """Runs a script as its user would, without the launcher."""
    return subprocess.run(
        [sys.executable, script.name],
        cwd=script.parent,
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_task_that_sees_several_gpus_is_refused_with_the_command_before_it_waits_for_others(tmp_path):
    script = write(tmp_path, FAKE + "import tfdist\ntfdist.create_strategy()\n", "train.py")
    config = {"cluster": {"worker": ["127.0.0.1:2", "127.0.0.1:3"]}, "task": {"type": "worker", "index": 0}}
    ended = by_hand(script, {"TF_CONFIG": json.dumps(config)})
    assert ended.returncode == 1
    assert "StrategyError: this task sees 2 GPUs (GPU:0, GPU:1), and a task drives one" in ended.stderr
    assert ": python -m tfdist.run train.py." in ended.stderr


def test_a_task_alone_that_sees_several_gpus_uses_the_first_and_names_the_command_once(tmp_path):
    script = write(
        tmp_path,
        FAKE
        + """
import tfdist
for _ in range(2):
    strategy = tfdist.create_strategy()
print(strategy.num_replicas_in_sync, [tf.config.experimental.get_memory_growth(gpu)
    for gpu in tf.config.list_physical_devices("GPU")])
""",
        "train.py",
    )
    ended = by_hand(script, {})
    assert ended.stdout == "1 [True, True]\n", ended.stderr
    assert ended.stderr.count("on one of the 2 GPUs that it sees; to use all: python -m tfdist.run train.py") == 1


def test_a_task_with_several_logical_cpus_is_one_replica_and_learns_the_same(tmp_path):
    script = write(
        tmp_path,
        """
        import keras
        import numpy as np
        import tensorflow as tf
        import tfdist

        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        strategy = tfdist.create_strategy()
        x = np.array([[1.0], [3.0]], "float32")
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, "linear", False, "zeros")])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, 2 * x, batch_size=2, epochs=1, shuffle=False, verbose=0)
        (kernel,) = model.get_weights()
        print(len(tf.config.list_logical_devices("CPU")), strategy.num_replicas_in_sync, kernel.item())
        """,
    )
    ended = run("--workers", 2, script, deadline_s=90)
    assert ended.code == 0, ended
    # One step down the mean of (kx - 2x)^2 from k = 0, where its gradient is -4 * (1 + 9) / 2.
    for task in ("worker 0", "worker 1"):
        cpus, replicas, kernel = ended.said_by(task)[-1].split()
        assert (cpus, replicas) == ("4", "2")  # two in each task
        assert float(kernel) == pytest.approx(2.0, rel=1e-6)
