"""Two records of a training: what parts them, told apart from rounding. No processes here; arrays alone."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.testing import divergence, verifying

NAMES = ["dense/kernel", "dense/bias", "dense_1/kernel"]
SIZES = [6, 3, 4]


def record(weights=None, loss=(1.0, 0.5, 0.25), *, data=1, moved=None):
    """Three steps of a training of three variables; `moved` is (step, first value, last value, by how much)."""
    random = np.random.default_rng(0)
    values = np.cumsum(random.normal(size=(4, sum(SIZES))), axis=0) if weights is None else weights
    if moved:
        step, first, last, by = moved
        values[step:, first:last] += by
    none = {"values": np.zeros((4, 0)), "names": [], "sizes": [], "eps": []}
    weights = {"values": values, "names": NAMES, "sizes": SIZES, "eps": [2.0**-23] * 3}
    return {
        "data": data,
        "steps": [
            {"epoch": i // 2, "batch": i % 2, "logs": {"loss": np.asarray(value)}} for i, value in enumerate(loss)
        ],
        "groups": {"weights": weights, "optimizer": {**none, "values": np.zeros((3, 0))}, "state": none},
        "epochs": {"loss": np.asarray(loss)},
        "evaluate": {},
        "predictions": [np.ones(3)],
    }


def found(got, *, control=None, tolerance=1e-5):
    controls = [record() if control is None else control]
    return divergence.compare(got, record(), controls, tolerance=tolerance)


def test_equal_records_are_right():
    assert found(record()).wrong == ()


@pytest.mark.parametrize(
    ("moved", "first", "off"),
    [
        ((1, 0, 1, 0.1), "step 1 (epoch 1, batch 1)", "dense/kernel changes wrongly"),
        ((2, 7, 8, 1e-3), "step 2 (epoch 1, batch 2)", "dense/bias changes wrongly"),
        ((3, 9, 13, 1.0), "step 3 (epoch 2, batch 1)", "dense_1/kernel changes wrongly"),
        # The first in the order of the layers, with the others behind it.
        ((2, 6, 13, 1.0), "step 2 (epoch 1, batch 2)", "dense/bias changes wrongly, by .*1 more of 3 (dense_1/kernel)"),
    ],
)
def test_the_first_step_and_variable_are_named(moved, first, off):
    result = found(record(moved=moved))
    assert result.first == first
    head, _, tail = off.partition(", by .*")
    assert head in result.off[0]
    assert tail in result.off[0]
    assert [row.what for row in result.wrong] == ["change of the weights"]


def test_what_the_control_does_as_well_is_rounding():
    control = record(moved=(2, 7, 8, 5e-4))
    assert found(record(moved=(2, 7, 8, 1e-3)), control=control).wrong == ()
    assert found(record(moved=(2, 7, 8, 1e-2)), control=control).wrong  # more than ten times as much


def test_rounding_of_a_step_counts_for_the_steps_after_it_and_not_before():
    control = record(moved=(2, 0, 1, 1e-3))
    assert found(record(moved=(3, 0, 1, 5e-3)), control=control).wrong == ()
    assert found(record(moved=(1, 0, 1, 5e-3)), control=control).wrong


def test_a_multiple_of_the_right_change_is_said():
    weights = record()["groups"]["weights"]["values"]
    weights[1:] += weights[1] - weights[0]  # the first step is done twice
    result = found(record(weights))
    assert "dense/kernel changes by 2 times what it should" in result.off[0]


def test_a_change_that_a_small_learning_rate_hides_is_found():
    """Weights near 1 that move by 1e-6: half of a move is far below 1e-5 of the weight."""
    steps = np.cumsum(np.full((4, sum(SIZES)), 1e-6), axis=0)
    halved = np.cumsum(np.full((4, sum(SIZES)), 0.5e-6), axis=0)
    result = divergence.compare(record(1 + halved), record(1 + steps), [record(1 + steps)], tolerance=1e-5)
    # float32 holds 1 + 1e-6 to 6 %: a difference of 50 % is told from that.
    assert result.first == "before the first step"
    halved[0] = steps[0]
    result = divergence.compare(record(1 + halved), record(1 + steps), [record(1 + steps)], tolerance=1e-5)
    assert result.first == "step 1 (epoch 1, batch 1)"


def test_a_variable_whose_gradient_is_rounding_alone_is_called_noise():
    random = np.random.default_rng(1)
    noisy = [record() for _ in range(3)]
    for other in noisy:
        bias = other["groups"]["weights"]["values"][:, 6:9]
        bias[:] = bias[0]
        bias[1:] += random.normal(size=(3, 3)) * 1e-9
    got, reference, control = noisy
    result = divergence.compare(got, reference, [control], tolerance=1e-5)
    assert result.wrong == ()
    assert result.noise == ("dense/bias",)


def test_metrics_of_a_second_model_in_a_process_are_the_same_metrics():
    """Keras counts their names on: auc, auc_1 and then auc_2, auc_3."""

    def renamed(names, values=(0.1, 0.2)):
        made = record()
        logs = dict(zip(names, map(np.asarray, values), strict=True))
        steps = [{**step, "logs": logs} for step in made["steps"]]
        return {**made, "steps": steps, "epochs": logs, "evaluate": logs}

    reference = renamed(["auc", "auc_1"])
    result = divergence.compare(reference, reference, [renamed(["auc_2", "auc_3"])], tolerance=1e-5)
    assert {row.what: row.rounding for row in result.rows}["auc_1, after each batch"] == 0.0
    result = divergence.compare(renamed(["auc_10", "auc_9"]), reference, [reference], tolerance=1e-5)
    assert result.off[0] == "auc is off by 100.0%"  # auc_9 comes first, and is 0.2


def test_a_wrong_log_alone_names_no_variable():
    result = found(record(loss=(1.0, 0.5, 0.26)))
    assert result.first == "step 3 (epoch 2, batch 1)"
    assert result.off[0] == "loss is off by 4.0%"
    assert not any("changes" in words for words in result.off)


def test_a_nan_on_one_side_is_wrong_and_on_both_is_not():
    weights = record()["groups"]["weights"]["values"]
    weights[2:, 0] = np.nan
    assert found(record(weights)).first == "step 2 (epoch 1, batch 2)"
    both = divergence.compare(record(weights), record(weights.copy()), [], tolerance=1e-5)
    assert both.wrong == ()


def test_another_number_of_steps_is_said():
    short = record()
    del short["steps"][2:]
    for group in short["groups"].values():
        group["values"] = group["values"][:-1]
    result = found(short)
    assert result.first == "step 3 (epoch 2, batch 1)"
    assert result.off == ("2 steps instead of 3: this one was not made",)


def test_tasks_that_hold_other_values_are_named():
    row = divergence.same_bits([record(), record(), record(moved=(2, 9, 10, 1e-15))])
    assert row.verdict == "wrong"
    assert row.where == "dense_1/kernel of task 2, step 2 (epoch 1, batch 2)"
    assert divergence.same_bits([record(), record()]).verdict == "right"


def test_other_data_is_all_that_is_said_of():
    reference = {"": record(), "rounded": record()}
    result = verifying.judge([{"data": 2}, {"data": 3}], reference)
    assert [row.what for row in result.wrong] == ["data"]
    assert result.first == "before the first step"


def test_a_report_is_true_where_all_is_right_and_raises_otherwise():
    right = verifying.Report("build", "3 steps", {2: found(record())})
    wrong = verifying.Report("build", "3 steps", {2: found(record()), 3: found(record(moved=(2, 7, 8, 1e-3)))}, ("hm",))
    assert right
    assert not wrong
    right.check()
    with pytest.raises(AssertionError, match=r"(?s)right on 2 workers.*WRONG from step 2 .*dense/bias.*note: hm"):
        wrong.check()
    assert wrong.as_dict()["workers"]["3"]["first"] == "step 2 (epoch 1, batch 2)"
