"""An evaluator beside real tasks: what training got, from each checkpoint, and an end in every case."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from by_hand import addresses
from launching import is_alive, run, write

TASK = Path(__file__).with_name("evaluator_task.py")


def run_case(case, out, *flags):
    return run(*flags, "--evaluator", TASK, env={"CASE": case, "OUT": str(out)}, deadline_s=150)


def result(out, task):
    return json.loads((out / f"{task}.json").read_text())


def assert_same(found, expected):
    assert found.keys() == {"val_loss", "val_mae"}
    for name, values in found.items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-5)


# -- beside two workers: a run whose chief is killed, and one that goes on


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    out = tmp_path_factory.mktemp("two_workers")
    return out, run_case("killed_chief", out, "--workers", 2)


@pytest.fixture(scope="module")
def resumed(killed):
    out, _ = killed
    return out, run_case("two_fits", out, "--workers", 2)


def test_it_is_stopped_where_the_chief_is_killed(killed):
    out, ended = killed
    assert ended.code == 137, ended
    assert "failed: worker 0 was first" in ended.words, ended
    assert ended.said_by("evaluator 0")[0].startswith("epoch 1, step 5: val_loss: "), ended
    assert not is_alive(int((out / "two are evaluated").read_text()))
    assert not (out / "first" / "done.json").exists()


def test_beside_a_run_that_goes_on_it_evaluates_what_is_there_and_what_comes(resumed):
    out, ended = resumed
    assert ended.code == 0, ended
    epochs, found = result(out, "evaluator-0")[0]
    trained_epochs, trained = result(out, "worker-0")[0]
    assert epochs == [0, 1, 2, 3], ended
    assert trained_epochs == [2, 3]
    assert_same({name: values[2:] for name, values in found.items()}, trained)


def test_a_second_training_that_is_stopped_early_ends_it_as_well(resumed):
    out, ended = resumed
    epochs, found = result(out, "evaluator-0")[1]
    trained_epochs, trained = result(out, "worker-1")[1]
    assert epochs == trained_epochs == [0, 1, 2], ended
    assert_same(found, trained)


def test_afterwards_it_evaluates_alone_and_writes_nothing(resumed):
    out, ended = resumed
    assert result(out, "evaluator-0")[2] == pytest.approx(result(out, "worker-0")[2], rel=1e-5), ended
    assert (out / "model.keras").exists()
    assert not [line for line in ended.err.splitlines() if "[evaluator 0]" in line and "Error" in line], ended


# -- beside parameter servers


def test_the_run_waits_for_it_when_chief_and_workers_are_done(tmp_path):
    ended = run_case("parameter_servers", tmp_path, "--workers", 1, "--ps", 1)
    assert ended.code == 0, ended
    epochs, found = result(tmp_path, "evaluator-0")[0]
    trained_epochs, trained = result(tmp_path, "chief-0")[0]
    assert epochs == trained_epochs == [0, 1, 2], ended
    assert_same(found, trained)


# -- what goes wrong


def test_its_failure_is_that_of_the_run(tmp_path):
    script = write(
        tmp_path,
        """
        import threading
        import tfdist

        if tfdist.resolve().is_evaluator:
            raise ValueError("nothing to evaluate")
        threading.Event().wait()
        """,
    )
    ended = run("--workers", 2, "--evaluator", script)
    assert ended.code == 1, ended
    assert "failed: evaluator 0 was first" in ended.words, ended
    assert "ValueError: nothing to evaluate" in ended.words, ended


# -- on other platforms: TF_CONFIG alone


def start_both(by_hand, out, **env):
    script = shutil.copy(TASK, out)
    cluster = {"worker": addresses(1)}
    env = {"OUT": str(out), "TFDIST_START_TIMEOUT_S": "100", **env}
    return [
        by_hand.start_with(Path(script), {"cluster": cluster, "task": {"type": job, "index": 0}}, name=job, env=env)
        for job in ("evaluator", "worker")
    ]


def test_a_tf_config_that_names_the_evaluator_does_the_same(by_hand, tmp_path):
    evaluator, worker = start_both(by_hand, tmp_path, CASE="to_the_end")
    assert (worker.wait(60), evaluator.wait(60)) == (0, 0), f"{worker}\n{evaluator}"
    assert result(tmp_path, "evaluator-0")[0][0] == [0, 1]
    assert_same(result(tmp_path, "evaluator-0")[0][1], result(tmp_path, "worker-0")[0][1])


def test_without_a_launcher_a_killed_chief_ends_it_in_a_stated_time(by_hand, tmp_path):
    evaluator, worker = start_both(by_hand, tmp_path, CASE="killed_chief", EVALUATOR_TIMEOUT_S="10")
    assert worker.wait(90) == -9, worker
    assert evaluator.wait(60) == 75, evaluator
    assert "no checkpoint has come to" in evaluator.err, evaluator
    assert "for 10 s, after epoch" in evaluator.err, evaluator
    assert "the evaluator waits for checkpoints in" in evaluator.err, evaluator
