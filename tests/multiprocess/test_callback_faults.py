"""Faults in callbacks of real trainings: the run ends at once and names the task and the reason; files stay whole."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from faulty_training import LIMIT_S, assert_nothing_left, seconds_since_fault
from launching import run, run_command, write

KILLS = 8

SCRIPT = """
import pathlib, sys, time
import tfdist

here = pathlib.Path(__file__).parent
strategy = tfdist.create_strategy()
import keras
import numpy as np

x = np.ones((16, 2), "float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

def fault():
    (here / "fault").write_text(repr(time.monotonic()))

class Faulty(keras.callbacks.Callback):
    def #hook(self, *args, **kwargs):
        if tfdist.resolve().training_index == #task:
            fault()
            #do

callbacks = [Faulty()]
model.fit(x, x[:, :1], validation_data=(x, x[:, :1]), batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
model.predict(x, batch_size=4, verbose=0, callbacks=callbacks)
"""


@pytest.fixture
def folder(tmp_path):
    """Holds the script and, as TMPDIR of the run, `tmp`."""
    (tmp_path / "tmp").mkdir()
    return tmp_path


def run_with(folder, *, hook, task, do):
    script = write(folder, SCRIPT.replace("#hook", hook).replace("#task", str(task)).replace("#do", do))
    ended = run("--workers", 2, script, env={"TMPDIR": str(folder / "tmp")}, deadline_s=60)
    assert seconds_since_fault(folder) < LIMIT_S, ended
    assert_nothing_left(folder, ended)
    return ended


@pytest.mark.parametrize("hook", ["on_train_begin", "on_test_batch_end", "on_epoch_end", "on_predict_begin"])
def test_an_exception_in_a_callback_of_one_task_ends_the_run_and_is_told_once(hook, folder):
    ended = run_with(folder, hook=hook, task=1, do=f"raise ValueError('not in {hook}')")
    assert ended.code == 1, ended
    assert "failed: worker 1 was first" in ended.words, ended
    assert f"ValueError: not in {hook}" in ended.words, ended
    assert "PeerLostError" not in ended.err, ended


def test_a_callback_that_leaves_with_a_code_of_its_own_gives_it_to_the_run(folder):
    ended = run_with(folder, hook="on_epoch_end", task=1, do="sys.exit(7)")
    assert ended.code == 7, ended
    assert "failed: worker 1 was first" in ended.words, ended


@pytest.mark.parametrize(
    ("hook", "call", "name"),
    [
        ("on_train_batch_end", "evaluate(x, x[:, :1], verbose=0)", "evaluate"),
        ("on_epoch_end", "predict(x, verbose=0)", "predict"),
        ("on_epoch_end", "get_metrics_result()", "get_metrics_result"),
    ],
)
def test_what_a_callback_calls_on_the_chief_alone_is_named_at_once(hook, call, name, folder):
    ended = run_with(folder, hook=hook, task=0, do=f"self.model.{call}")
    assert ended.code == 1, ended
    assert re.search(rf"MismatchError: .*worker 0 called .*{name}", ended.words), ended
    assert "Call fit, evaluate, predict" in ended.words, ended
    assert "not on the chief alone, also in callbacks" in ended.words, ended


@pytest.mark.parametrize("kind", ["m.keras", "m.weights.h5"])
def test_a_kill_amid_model_checkpoint_leaves_the_old_file_or_the_new_one(kind, amid_a_save):
    assert amid_a_save[kind] >= KILLS / 4


@pytest.fixture(scope="module")
def amid_a_save(tmp_path_factory):
    """Returns how many of the kills met a save, by kind of file; the script fails where a file was not whole."""
    out = tmp_path_factory.mktemp("killed")
    done = run_command([sys.executable, Path(__file__).with_name("killed_training.py"), out, KILLS], out, 400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
