"""Training through parameter servers: exact where one worker trains, exactly counted where two do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import environment

from tfdist.testing import compare

TASK = Path(__file__).with_name("asynchronous_task.py")
DEADLINE_S = 300
ROWS, TOTAL = 200, 199 * 200 / 2
SAME_AS_PLAIN = ["adam", "loss_scale", "several_steps_per_execution", "schedule_clipping_and_average"]
BOTH = [1, 2]
_finished: dict[int, tuple[Path, str]] = {}


@pytest.fixture
def result(request, tmp_path_factory):
    """Returns what a case gave with so many workers; all cases of one number run in one process."""

    def of(case: str, workers: int) -> dict[str, np.ndarray]:
        if workers not in _finished:
            folder = tmp_path_factory.mktemp("asynchronous")
            command = [sys.executable, str(TASK), str(folder), str(workers)]
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment(), check=False
            )
            _finished[workers] = folder, ended.stdout + ended.stderr
        folder, log = _finished[workers]
        file = folder / f"{case}.npz"
        assert file.exists(), log
        found = dict(np.load(file))
        assert "error" not in found, f"{found['error']}\n{log}"
        return found

    return of


def _of(side: str, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.partition(" ")[2]: value for name, value in found.items() if name.startswith(f"{side} ")}


@pytest.mark.parametrize("case", SAME_AS_PLAIN)
def test_one_worker_gives_what_plain_keras_gives(case, result):
    found = result(case, 1)
    ours, plain = _of("ours", found), _of("plain", found)
    if case == "several_steps_per_execution":
        del ours["steps"], plain["steps"]  # one call for each execution
    comparison = compare(ours, plain, tolerance=1e-6)
    assert comparison, str(comparison)
    if case != "schedule_clipping_and_average":  # the ps form the norm and the average by other kernels
        other = [name for name in ours if name.startswith("weight") and not np.array_equal(ours[name], plain[name])]
        assert not other, "weights are the same bits"


@pytest.mark.parametrize("case", SAME_AS_PLAIN)
def test_two_workers_run_every_step_once(case, result):
    found = result(case, 2)
    assert found["ours iterations"] == found["plain iterations"] == 27
    assert found["ours steps"].tolist()[-1] == 8


@pytest.mark.parametrize("case", SAME_AS_PLAIN)
def test_two_workers_evaluate_every_row_once(case, result):
    """Whatever the weights came to be, loss and metrics are those of the predictions."""
    ours = _of("ours", result(case, 2))
    off = ours["predict"] - ours["targets"]
    loss, mae, r2 = ours["evaluate"]
    assert loss == pytest.approx(np.mean(off**2), rel=1e-5)
    assert mae == pytest.approx(np.mean(np.abs(off)), rel=1e-5)
    assert r2 == pytest.approx(1 - np.mean(off**2) / np.var(ours["targets"]), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("workers", BOTH)
def test_shuffled_arrays_give_every_row_once_an_epoch(workers, result):
    found = result("shuffled_arrays_read_every_row_once", workers)
    assert found["two counts"].tolist() == pytest.approx([ROWS + TOTAL / 1000] * 3)
    assert found["iterations"] == 3 * 9


@pytest.mark.parametrize("workers", BOTH)
def test_workers_that_read_for_themselves_give_every_row_once(workers, result):
    found = result("each_worker_reads_its_own_share", workers)
    assert found["two counts"].tolist() == pytest.approx([ROWS + TOTAL / 1000] * 2)
    assert found["evaluate"][1] == pytest.approx(ROWS + TOTAL / 1000)


@pytest.mark.parametrize("workers", BOTH)
def test_shares_may_be_empty_but_not_all(workers, result):
    found = result("shares_that_are_empty", workers)
    assert found["two counts"].tolist() == pytest.approx([ROWS + TOTAL / 1000])
    assert f"none of the datasets of {workers} workers holds a batch" in str(found["none"])


@pytest.mark.parametrize("workers", BOTH)
def test_a_dataset_function_gets_a_context_of_its_own_for_every_worker(workers, result):
    found = result("a_function_of_an_input_context", workers)
    assert found["contexts"].tolist() == [[worker, workers] for worker in range(workers)]
    assert found["iterations"] == 2 * 13


@pytest.mark.parametrize("workers", BOTH)
def test_a_metric_merges_as_it_says(workers, result):
    found = result("a_metric_that_says_how_it_merges", workers)
    assert found["largest"] == found["expected"]


@pytest.mark.parametrize("workers", BOTH)
def test_stop_training_begins_no_further_step_and_counts_those_that_ran(workers, result):
    found = result("stopped_within_an_epoch", workers)
    (rows,) = found["rows"]
    assert 2 * found["iterations"] == rows
    assert found["ended"] == found["iterations"]
    assert 5 <= found["iterations"] <= 5 + 2 * workers


@pytest.mark.parametrize("workers", BOTH)
def test_a_step_of_the_users_own_logs_its_own_numbers_and_metrics_over_all_rows(workers, result):
    found = result("a_train_step_of_its_own", workers)
    assert found["two"].tolist() == [2.0, 2.0]
    assert found["losses"] == pytest.approx([float(found["expected"])] * 2, rel=1e-5)
    assert found["iterations"] == 2 * 4


@pytest.mark.parametrize("workers", BOTH)
def test_training_converges_to_the_known_optimum(workers, result):
    found = result("converges_to_the_least_squares_solution", workers)
    assert found["kernel"].ravel() == pytest.approx(np.arange(1.0, 7.0), abs=1e-3)
    assert found["bias"] == pytest.approx([0.5], abs=1e-3)


@pytest.mark.parametrize("workers", BOTH)
def test_a_saved_model_gives_the_same_in_plain_keras_and_under_the_strategy(workers, result):
    found = result("saved_and_loaded", workers)
    assert found["in plain Keras"] == pytest.approx(found["model"], abs=1e-6)
    assert found["again"] == pytest.approx(found["model"], abs=1e-6)


@pytest.mark.parametrize("workers", BOTH)
def test_fit_goes_on_after_the_last_saved_epoch(workers, result):
    found = result("goes_on_from_a_checkpoint", workers)
    assert found["epochs"].tolist() == [2, 3]
    assert found["iterations"] == 4 * 4
    if workers == 1:
        assert compare(_of("ours", found), _of("plain", found), tolerance=0)


@pytest.mark.parametrize("workers", BOTH)
def test_keras_callbacks_act_and_see_epochs_as_in_one_process(workers, result):
    found = result("keras_callbacks", workers)
    assert found["scheduler"] == pytest.approx([0.05, 0.05, 0, 0])
    losses = found["scheduled losses"]
    assert losses[0] > losses[2] == pytest.approx(losses[3], rel=1e-5), "no step moves anything at a rate of 0"
    assert found["plateau"] == pytest.approx([0.05, 0.025, 0.0125, 0.00625])
    assert found["early epochs"].tolist() == [0, 1]
    assert found["saved files"].tolist() == [f"{epoch}.weights.h5" for epoch in (1, 2, 3, 4)]
    assert found["saved is last"]
    assert found["csv"] == pytest.approx(found["csv expected"])
    # Stopped by its first loss; what was in flight ends.
    assert 1 <= found["nan iterations"] <= 1 + 2 * workers


@pytest.mark.parametrize("workers", BOTH)
def test_python_that_would_run_on_the_coordinator_is_said_once(workers, result):
    found = result("python_in_a_workers_dataset", workers)
    assert len(found["generated"]) == 1
    assert "runs in this process, not on the workers" in found["generated"][0]
    assert not len(found["plain"])


@pytest.mark.parametrize("workers", BOTH)
def test_no_worker_sees_the_slots_of_a_variable_in_the_middle_of_anothers_update(workers, result):
    found = result("slots_of_one_variable", workers)
    assert not found["apart"].any()
    assert (found["first"] == 2 * ROWS / 2).all()


def test_no_lock_waits_for_another(result):
    found = result("slots_of_one_variable", 1)
    assert (found["locks"], found["waits"]) == (2, 0)


def test_no_parameter_server_holds_more_than_the_largest_variable_demands(result):
    found = result("where_variables_are", 1)
    total = found["ps 0"] + found["ps 1"]
    assert max(found["ps 0"], found["ps 1"]) <= total / 2 + 500 * 4 * 6


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("jit_compile", "use jit_compile='auto' or False"),
        ("run_eagerly", "debug without --ps"),
        ("accumulation", "use a larger batch_size"),
        ("metric in tf.cond", "update the metric outside"),
    ],
)
def test_what_can_not_work_is_refused_with_the_way_out(what, words, result):
    assert words in str(result("what_is_refused", 2)[what])


def test_gradients_are_accumulated_where_one_worker_is_alone(result):
    assert str(result("what_is_refused", 1)["accumulation"]) == "nothing"
