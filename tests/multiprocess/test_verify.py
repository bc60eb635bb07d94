"""`verify`: what is right is found right, and each planted fault is found, with a true word on where it is."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import planted
import pytest
from launching import run_command

import tfdist
from tfdist.testing import functions, verifying

# fault -> (model, what the verdict says of it)
FAULTS = {
    "clips_before_the_sum": ("clipped", r"step 1 .*first/kernel changes"),
    "adds_up_where_a_mean_belongs": ("synchronized", r"step 1 .*first/kernel changes by 2 times what it should"),
    "weighs_uneven_shares_alike": ("synchronized", r"step 1 .*first/kernel changes wrongly"),
    "gives_both_tasks_the_same_rows": ("synchronized", r"step 1 .*loss is off by .*first/kernel changes wrongly"),
    "drops_the_last_batch": (
        "synchronized",
        r"step 4 \(epoch 1, batch 4\).*6 steps instead of 8: this one was not made",
    ),
    "normalizes_by_its_own_rows": ("synchronized", r"step 1 .*norm/moving_variance changes wrongly"),
    "logs_the_metric_of_the_chiefs_rows": ("synchronized", r"step 1 .*mae is off by (?!.*changes)"),
    "does_not_sum_one_gradient": ("synchronized", r"step 1 .*first/bias|norm/gamma"),
    "is_wrong_in_step_3_alone": ("synchronized", r"step 3 \(epoch 1, batch 3\).*norm/gamma.*before it nothing"),
    "multiplies_the_learning_rate": ("synchronized", r"step 1 .*changes by 2 times.*learning_rate is 2 times"),
    "starts_from_another_weight": ("synchronized", r"before the first step.*weights at the start: .*first/kernel"),
    "takes_a_sum_for_a_mean": ("summed", r"step 1 .*loss is off"),
    "ignores_sample_weights": ("weighted", r"step 1 .*loss is off.*first/kernel"),
    "sums_in_every_micro_step": ("accumulating", r"step 2 .*first/kernel changes by 2 times"),
    "decays_twice": ("decaying", r"step 1 .*first/kernel changes wrongly"),
    "keeps_no_moving_average": ("averaged", r"step 1 .*optimizer's .*average"),
    "means_over_its_own_valid_values": ("masked", r"step 1 .*loss is off.*words"),
    "mixes_up_predictions": ("synchronized", r"after the last step.*predictions"),
    "lets_tasks_draw_apart": ("synchronized", r"the tasks hold different values"),
}
RIGHT = sorted(
    {model for model, _ in FAULTS.values()}
    | {"with_dropout", "not_built_yet", "of_a_dataset", "of_a_py_dataset", "without_call", "losing_with_coupled_rows"}
)
# model that is other by itself -> what the note says
OTHER = {
    "plain_batch_norm": r"BatchNormalization \(norm\) uses each task's own rows by design.*synchronized=True",
    "coupling_rows": "one process itself gives another result when the rows of a batch come in another order",
    "other_data_each_time": "the data function gives other values each time: seed it",
}


def _job(model):
    return {
        "model": functions.describe(getattr(planted, model)),
        "data": None,
        "epochs": 2,
        "batch_size": planted.BATCH_SIZE,
        "steps": 20,
        "seed": 0,
    }


@pytest.fixture(scope="module")
def judged():
    """Returns a function: model, fault -> what was found; one plain process and one cluster run all of them."""
    references = {}
    with (
        tfdist.testing.local_cluster(workers=1, strategy="plain") as plain,
        tfdist.testing.local_cluster(workers=2, strategy=True) as tasks,
    ):

        def judge(model, fault="", notes=None):
            job = _job(model)
            if model not in references:
                references[model] = verifying.run_reference(plain, job)
            records = tasks.run(planted.record_with, fault, verifying.asked_of_tasks(job, references[model]))
            found = verifying.judge([record[""] for record in records], references[model])
            if notes is not None:
                notes += verifying.hints(references[model], {2: found})
            return found

        yield judge


def _said(found):
    return "; ".join([found.first, *found.off, *(f"{row.what}: {row.where}" for row in found.wrong)])


@pytest.mark.parametrize("model", RIGHT)
def test_what_is_right_is_found_right(model, judged):
    notes = []
    found = judged(model, notes=notes)
    assert not found.wrong, _said(found)
    assert {row.verdict for row in found.rows} == {"right"}
    assert [note for note in notes if "dropout" not in note] == []
    assert bool(notes) == (model == "with_dropout")


def test_every_fault_is_planted():
    assert set(FAULTS) == set(planted.FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_said(fault, judged):
    model, words = FAULTS[fault]
    found = judged(model, fault)
    assert found.wrong, found.rows
    assert re.search(words, _said(found)), _said(found)


@pytest.mark.parametrize("model", OTHER)
def test_what_is_other_by_itself_is_found_and_explained(model, judged):
    notes = []
    assert judged(model, notes=notes).wrong
    assert re.search(OTHER[model], "\n".join(notes)), notes


def test_the_command_prints_the_report_and_ends_with_1_where_a_number_is_wrong(tmp_path):
    model = f"{Path(planted.__file__)}:plain_batch_norm"
    command = [sys.executable, "-m", "tfdist.verify", model, "--json", "--epochs", "1", "--batch-size", "13"]
    ended = run_command(command, tmp_path, 120)
    assert ended.returncode == 1, ended.stderr
    report = json.loads(ended.stdout)
    assert report["right"] is False
    assert report["workers"]["2"]["first"] == "step 1 (epoch 1, batch 1)"
    rows = {row["what"]: row["verdict"] for row in report["workers"]["2"]["rows"]}
    assert rows["data"] == rows["weights at the start"] == rows["same bits on all tasks"] == "right"
    assert rows["change of the weights"] == rows["predictions"] == "wrong"


def test_in_a_test_a_model_and_its_data_are_all_it_takes():
    tfdist.testing.assert_parity(planted.without_data, planted.data(), workers=1)
