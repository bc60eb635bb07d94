"""Saving, loading and going on, on two tasks of TensorFlow's strategy and on three of ours.

One launch of each runs every function of `saving_task`; each test looks at what one of them returned on all tasks.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment, run

TASK = Path(__file__).with_name("saving_task.py")
PLAIN = Path(__file__).with_name("plain_loading.py")


@pytest.fixture(scope="module", params=[(2, "multi_worker_mirrored"), (3, "synchronous")], ids=lambda p: p[1])
def out(request, tmp_path_factory):
    """Returns the folder that a launch has left its results in."""
    tasks, kind = request.param
    folder = tmp_path_factory.mktemp(kind)
    ended = run("--workers", tasks, TASK, folder, kind, deadline_s=180)
    assert ended.code == 0, str(ended)
    return folder


@pytest.fixture
def every(out):
    """Returns a function: name of a check -> what it returned on each task."""
    results = [json.loads(path.read_text()) for path in sorted(out.glob("[0-9].json"))]
    return lambda name: [result[name] for result in results]


@pytest.fixture(scope="module")
def plain(out):
    """Returns what a fresh process makes of the files."""
    done = subprocess.run(
        [sys.executable, PLAIN, out], env=environment(), capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


ALIKE = {"now": True, "after an epoch": True, "same": True}


@pytest.mark.parametrize("name", ["load", "load_weights", "tensorflows_checkpoint"])
def test_a_model_that_is_loaded_goes_on_as_the_one_that_was_saved(name, every):
    assert all(result == ALIKE for result in every(name)), every(name)


def test_a_file_of_plain_keras_is_trained_on_every_task(every):
    assert all(result is True for result in every("load_what_plain_keras_saved"))


def test_each_task_may_read_a_copy_of_its_own(every):
    assert all(result is True for result in every("load_copies_of_one_file")), every("load_copies_of_one_file")


REFUSED = {
    "load_where_one_task_lacks_the_file": r"LoadError: \S+ can not be loaded on worker 1: there is no such file; "
    r"\d other tasks? can",
    "load_where_one_task_has_a_broken_file": r"LoadError: .* on worker 1: it is no whole \.keras file",
    "load_where_one_task_has_another_file": "LoadError: .* is another file on worker 1 than on worker 0",
    "load_where_a_layer_loads_other_values_on_one_task": "LoadError: after .*odd.keras was loaded, worker 1 held other "
    r"values than worker 0 \(on worker 1 \S+/kernel differs\)",
    "checkpoint_of_another_model": r"LoadError: .*step-0000000012 was saved from another model: in its weights, "
    r"\S+/kernel float32 \(6, 8\) there and \S+ float32 \(6, 9\) here",
    "load_on_the_chief_alone": "MismatchError: .*(tfdist.load file|fit arguments)",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_the_same_on_every_task_is_an_error_on_every_task(name, every):
    for result in every(name):
        assert result is not None, "nothing was raised"
        assert re.search(f"tfdist.errors.{REFUSED[name]}", result["error"], re.DOTALL), result["error"]


def test_a_run_with_a_crash_ends_as_the_run_without_one_bit_by_bit(every):
    for result in every("checkpoints"):
        wanted = {"epochs": [2, 3], "equal": True, "losses": True, "same": True}
        assert {key: result[key] for key in wanted} == wanted


def test_checkpoints_are_written_and_read_by_the_chief_alone(every):
    first, *others = every("checkpoints")
    steps = [f"step-{step:010d}" for step in (3, 6, 9, 12)]
    assert first["before"] == steps[:2]
    assert first["after"] == ["done.json", *steps[1:]]
    assert all(other["before"] is None and other["after"] is None for other in others)


def test_chief_only_runs_a_callback_on_the_chief_which_can_stop_all(every):
    first, *others = every("chief_only")
    assert first == {"calls": ["batch 0", "batch 1", "batch 2", "epoch 0"], "epochs": [0]}
    assert all(other == {"calls": [], "epochs": [0]} for other in others)


@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5", "tf"])
def test_plain_keras_reads_each_kind_of_file_with_the_optimizers_state(name, plain):
    assert plain[name] == [True, True, True]


def test_plain_keras_reads_the_old_format(plain):
    assert plain["m.h5"][:2] == [True, True]  # Keras itself loses the optimizer's state here


def test_tensorflow_serves_the_exported_folder(plain):
    assert plain["exported"] is True


def test_none_of_that_needs_tfdist(plain):
    assert plain["without tfdist"] is True


def test_one_task_goes_on_where_several_were(plain):
    assert plain["one task goes on"] == [[4], 15]
