"""Keras' callbacks, and a user's, do on several tasks what they do in one plain Keras process, or are named.

Three runs of `callback_task` give the numbers: one process without tfdist, two tasks, three tasks.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import run, run_command

TASK = Path(__file__).with_name("callback_task.py")

SAME_ON_EVERY_TASK = (
    "csv_logger",
    "model_checkpoint_of_one_name",
    "model_checkpoint_with_names",
    "model_checkpoint_every_few_batches",
    "model_checkpoint_on_the_chief_alone",
    "backup_and_restore",
    "tensorboard",
    "every_hook",
    "learning_rates",
    "early_stopping",
    "terminate_on_nan",
    "swap_ema_weights",
    "calls_inside_callbacks",
    "metrics_read_in_a_callback",
    "a_callback_list",
    "params_and_model",
    "training_stopped_by_one_task",
    "evaluation_and_prediction_stopped_by_one_task",
)
# What the other tasks give, where the chief alone does something.
ONLY_ON_THE_CHIEF: dict[str, Any] = {
    "model_checkpoint_without_its_number": {"files": ["x.keras"], "said": 0},
    "remote_monitor": [],
    "progress_bar": [],
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What one process without tfdist gives, by name."""
    out = tmp_path_factory.mktemp("plain")
    done = run_command([sys.executable, TASK, out, "plain"], out, 300)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "0.json").read_text())


@pytest.fixture(scope="module", params=[2, 3])
def tasks(request, tmp_path_factory):
    """What each of N tasks gives, by name."""
    out = tmp_path_factory.mktemp("tasks")
    ended = run("--workers", request.param, TASK, out, "tasks", deadline_s=500)
    assert ended.code == 0, str(ended)
    return [json.loads((out / f"{index}.json").read_text()) for index in range(request.param)]


def close(one: Any, other: Any) -> bool:
    """Equal, and floats up to rounding: losses of up to 4, and rates of learning that do not magnify it much."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-5)
    return bool(one == other)


@pytest.mark.parametrize("name", [*SAME_ON_EVERY_TASK, *ONLY_ON_THE_CHIEF])
def test_it_does_what_it_does_in_one_process(name, plain, tasks):
    assert not (isinstance(plain[name], dict) and "error" in plain[name]), plain[name]
    assert close(tasks[0][name], plain[name]), f"plain Keras: {plain[name]}\nthe chief: {tasks[0][name]}"
    for other in tasks[1:]:
        assert other[name] == ONLY_ON_THE_CHIEF.get(name, tasks[0][name])


def test_the_reference_runs_show_what_they_are_for(plain):
    """Or equality would say little: a checkpoint that always saves, a stop that never comes."""
    assert len(plain["model_checkpoint_with_names"][0]) == 3  # of 5 epochs
    assert plain["early_stopping"][:3] == [[0, 1, 2, 3, 4, 5, 6], 4, 6]
    assert plain["terminate_on_nan"] == 3
    assert plain["backup_and_restore"][0] == [0, 1]
    assert plain["backup_and_restore"][4] == ["latest.weights.h5", "training_metadata.json"]
    assert plain["backup_and_restore"][5] == [1, 2]
    assert plain["backup_and_restore"][9] == []
    assert plain["learning_rates"][0] == pytest.approx([0.2, 0.2, 0.1, 0.05, 0.05, 0.025])
    assert plain["tensorboard"]["profiled"] is True
    assert plain["training_stopped_by_one_task"]["on_train_batch_end"] == [3, [0]]


def test_every_number_is_the_same_on_all_tasks_to_the_last_bit(tasks):
    assert all(task["every_hook"]["same bits"] is True for task in tasks)


def test_subclasses_of_what_writes_run_on_the_chief_and_the_users_own_everywhere(tasks):
    chief, *others = [task["who_runs_subclasses_and_own_callbacks"] for task in tasks]
    assert chief == ["subclass of CSVLogger", "own", "own in ChiefOnly"]
    assert others == [["own"]] * len(others)


def test_the_chief_alone_may_read_the_whole_state_as_orbax_checkpoint_does(tasks):
    chief, *others = [task["state_tree_read_by_the_chief_alone"] for task in tasks]
    groups = ["metrics_variables", "non_trainable_variables", "optimizer_variables", "trainable_variables"]
    assert chief == [groups, 40 // len(tasks) // 5 * 5]  # its own rows: of each of 5 batches 8 // n
    assert others == [[]] * len(others)


ALONE = {
    "learning_rate_set_by_one_task_after_a_step": (
        r"after step 3 of epoch 1: .*learning_rate \(0.5 on LAST, not 0.01\)",
        3,
    ),
    "learning_rate_set_by_one_task_in_a_lambda": (
        r"after step 2 of epoch 1: .*learning_rate \(0.5 on LAST, not 0.01\)",
        2,
    ),
    "learning_rate_set_by_one_task_before_an_epoch": ("at the beginning of epoch 2: LAST holds .*learning_rate", 5),
    "learning_rates_drawn_at_random": ("at the beginning of epoch 1: worker 1 .*hold.*learning_rate", 0),
    "learning_rate_scheduler_on_the_chief_alone": (
        r"fit: callbacks that change the model is \['LearningRateScheduler'\] on worker 0 and \[\] on worker 1",
        0,
    ),
    "weights_set_by_one_task": ("after epoch 1: LAST holds other values than worker 0 of .*/bias", 5),
}


def assert_told(told: Any, words: str, steps: int, size: int) -> None:
    message, iterations = told
    assert re.search(words.replace("LAST", f"worker {size - 1}"), message), message
    assert iterations == steps


@pytest.mark.parametrize("name", ALONE)
def test_what_one_task_alone_changes_is_told_on_every_task(name, tasks):
    for task in tasks:
        assert_told(task[name], *ALONE[name], len(tasks))


def test_what_the_chief_alone_holds_before_the_first_step_wins(tasks):
    rates = [task["learning_rate_set_by_one_task_before_training"] for task in tasks]
    assert rates == [pytest.approx(0.01)] * len(tasks)


def test_check_same_finds_the_step_at_which_tasks_drift_apart(tasks):
    for task in tasks:
        found = task["weights_set_by_one_task_are_found_at_the_step"]
        for which in ("False", "True"):
            words = (
                r"after step 3 of epoch 2: LAST holds other values than worker 0 of \S+/bias \(\S+ on LAST, not \S+\)"
            )
            assert_told(found[which], words, 8, len(tasks))
        assert_told(found["executions of 2"], "after step 5 of epoch 2: LAST holds", 10, len(tasks))


def test_check_same_says_nothing_of_what_is_the_same(tasks):
    assert [task["variables_that_are_the_same_are_not_found"] for task in tasks] == [None] * len(tasks)


def test_the_function_check_same_names_variable_and_task(tasks):
    words = f"MismatchError: after making the model: worker {len(tasks) - 1} holds .* of .*/bias"
    for task in tasks:
        assert re.search(words, task["check_same_names_what_differs"]["error"])
