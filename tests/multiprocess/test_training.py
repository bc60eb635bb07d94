"""What a script does around `fit` on two tasks: data, callbacks, saving, refusals, and its own loop.

One launch runs every function of `training_task`; each test looks at what one of them returned on both tasks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launching import run

TASK = Path(__file__).with_name("training_task.py")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory):
    """Returns a function: name of a check -> what it returned on worker 0 and worker 1."""
    out = tmp_path_factory.mktemp("training")
    ended = run("--workers", 2, TASK, out, deadline_s=180)
    assert ended.code == 0, str(ended)
    results = [json.loads((out / f"{index}.json").read_text()) for index in range(2)]
    assert results[0].keys() == results[1].keys()
    return lambda name: (results[0][name], results[1][name])


def equal(both, name):
    first, second = both(name)
    assert first == second
    return first


def test_worker_0_is_the_chief_of_a_true_multi_worker_mirrored_strategy(both):
    first, second = both("one_chief")
    assert first == [True, 2, "CollectiveAllReduceStrategy"]
    assert second == [False, 2, "CollectiveAllReduceStrategy"]


def test_all_reduce_takes_numbers_arrays_and_lists(both):
    assert equal(both, "all_reduce") == [3, 0.5, [2, 2, 2], [[2.0, 2.0], [[1]]]]


def test_a_script_without_a_seed_draws_the_same_numbers_on_every_task(both):
    assert equal(both, "unseeded_script_has_one_seed") is True


def test_shuffled_rows_are_each_seen_once_and_in_another_order_in_each_fit(both):
    first, second = both("shuffled_rows_are_each_seen_once")
    for one, other in zip(first, second, strict=True):
        assert sorted(one + other) == list(range(37))
    assert first[0] != first[1]


def test_dropout_masks_differ_between_tasks_and_steps_and_come_again_with_the_seed(both):
    first, second = both("dropout_masks")
    assert first[0] == first[1]
    assert second[0] == second[1]
    masks = [*first[0], *second[0]]
    assert len(masks) == 4
    assert all(10 < len(mask) < 54 for mask in masks)
    assert len({tuple(mask) for mask in masks}) == 4


REFUSED = {
    "second_strategy": "StrategyError.*has a strategy already",
    "first_batches_that_differ": "DataError: worker 1 read another first batch than worker 0.*seed",
    "a_sharded_dataset": "DataError: worker 1 read another first batch.*don't shard",
    "other_epochs": "MismatchError: fit: epochs is 1 on worker 0 and 2 on worker 1",
    "other_number_of_rows": "MismatchError: fit: number of rows is 40 on worker 0 and 39 on worker 1",
    "other_optimizer": "MismatchError: fit: optimizer is 'SGD' on worker 0 and 'Adam' on worker 1",
    "other_trainable_layers": "MismatchError: fit: number of trainable variables is 4 on worker 0 and 2 on worker 1",
    "other_batches_for_train_on_batch": "DataError: worker 1 read another batch than worker 0",
    "datasets_that_end_at_other_steps": "DataError: the data of worker 0 ended before step 3, that of worker 1 goes on",
    "dataset_without_batches": r"DataError: .*single rows.*add \.batch\(global_batch_size\)",
    "other_rows_of_arrays": "MismatchError: fit: the first and last rows are not the same on worker 0 and worker 1",
    "learning_rate_changed_on_the_chief_alone": r"MismatchError: after epoch 1: .*rate \(0.01 on worker 1, not 0.5\)",
    "updates_past_the_optimizer": "MismatchError: after epoch 1: worker 1 holds.*kernel.*before optimizer.apply",
    "a_variable_that_keras_does_not_know": "MismatchError: after epoch 1: worker 1 holds.*worker 0 of seen",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_script_can_not_mean_is_refused_on_every_task_with_the_way_out(name, both):
    for result in both(name):
        assert isinstance(result, dict), f"nothing was raised, but {result} returned"
        assert re.search(f"tfdist.errors.{REFUSED[name]}", result["error"], re.DOTALL), result["error"]


def test_a_part_of_a_batch_without_one_entry_per_row_is_named(both):
    assert "one entry per row" in equal(both, "part_of_a_batch_that_is_not_per_row")["error"]


def test_predicted_strings_come_whole_and_in_order(both):
    assert [float(text) for text in equal(both, "predicted_strings")] == list(range(9))


def test_plain_model_save_on_every_task_writes_one_whole_file(both):
    assert equal(both, "naive_save_by_all_tasks") == [None, ["naive.keras"]]


def test_own_rows_that_end_earlier_on_one_task_do_not_end_the_epoch(both):
    assert equal(both, "own_datasets_that_end_at_other_steps") == [6, True]


def test_input_of_no_known_kind_is_keras_own_error(both):
    assert "Unrecognized data type" in equal(both, "unknown_kind_of_input")["error"]


def test_callbacks_run_on_every_task_with_the_logs_of_the_whole_batch(both):
    result = equal(both, "callbacks_run_on_every_task_with_global_logs")
    steps = ["batch 0", "batch 1", "batch 2", "test batch 0"]
    assert result["calls"] == [
        "train begin",
        "epoch 0",
        *steps,
        "end of epoch 0 ['loss', 'val_loss']",
        "epoch 1",
        *steps,
        "end of epoch 1 ['loss', 'val_loss']",
        "train end",
        "predict batch 0 of 4 rows",
        "predict batch 1 of 3 rows",
    ]
    assert result["same numbers"] is True
    assert result["count"] == 12


def test_stock_callbacks_that_write_run_on_the_chief_alone(both):
    result = equal(both, "callbacks_that_write_run_on_the_chief")
    assert result["files"] == [
        "1.weights.h5",
        "2.weights.h5",
        "3.weights.h5",
        "backup/latest.weights.h5",
        "backup/training_metadata.json",
        "log.csv",
        "model.keras",
    ]
    assert result["rows of the log"] == 4
    assert result["bad zip member"] is None


def test_callbacks_that_decide_run_on_every_task(both):
    result = equal(both, "callbacks_that_write_run_on_the_chief")
    assert result["lambda epochs"] == [0, 1, 2]
    assert result["rate is the same"] is True
    assert result["rate"] == pytest.approx(0.001 / 8)


def test_backup_and_restore_resumes_every_task_from_the_chiefs_files(both):
    crashed, resumed = equal(both, "backup_restores_all_tasks_from_the_chief")
    # Epochs of the fit that crashed and of the fit after it; 40 rows in batches of 32 are 2 steps an epoch.
    assert crashed == [[0, 1, 2, 0], 6, True]
    assert resumed == [[2, 3, 0], 10, True]


def test_weights_loaded_on_the_chief_alone_reach_every_task(both):
    assert equal(both, "weights_loaded_on_the_chief_alone") == {"same before": False, "same after": True}


def test_save_by_all_tasks_leaves_whole_files_that_plain_keras_loads(both):
    assert equal(both, "save_by_all_tasks") == {
        "returned": ["model.keras", "model.weights.h5", "exported"],
        "entries": ["exported", "model.keras", "model.weights.h5"],
        "loads equal": True,
        "serves equal": True,
        "steps are kept": 2,
    }


def test_save_by_the_chief_alone_does_not_wait(both):
    assert equal(both, "save_by_the_chief_alone") is True


def test_a_loop_of_the_users_own_works_under_the_same_strategy(both):
    assert equal(both, "own_loop") == {"falls": True, "same": True}
