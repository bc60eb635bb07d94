"""Which callbacks run where: a rule for each of Keras' own, the same one in the documentation, and for a user's."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import keras
import pytest

import tfdist
from tfdist.trainer import callbacks
from tfdist.trainer.callbacks import IN_THE_EVALUATOR, ON_EVERY_TASK, ON_THE_CHIEF
from tfdist.trainer.passes import Watched

DOCS = (Path(__file__).parents[3] / "docs" / "callbacks.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `(\w+)` \| (the chief|every task) \|", DOCS, re.MULTILINE))
k = keras.callbacks


class Own(k.Callback):
    pass


class OwnOfSteps(k.Callback):
    def on_batch_end(self, batch, logs=None):
        pass


class Subclass(k.CSVLogger):
    def on_train_batch_end(self, batch, logs=None):
        pass


def stock() -> set[str]:
    """The callbacks that this Keras has."""
    every = {name: kind for name, kind in vars(k).items() if inspect.isclass(kind) and issubclass(kind, k.Callback)}
    return {name for name in every if name not in ("Callback", "CallbackList")}


def test_each_of_keras_callbacks_has_its_place():
    assert set(ON_THE_CHIEF).isdisjoint(ON_EVERY_TASK)
    assert stock() <= {*ON_THE_CHIEF, *ON_EVERY_TASK}


def test_no_place_is_for_a_callback_that_keras_does_not_have():
    assert {*ON_THE_CHIEF, *ON_EVERY_TASK} - stock() <= {"OrbaxCheckpoint"}  # Keras 3.12 has none


def test_the_documentation_says_the_same():
    code = {**dict.fromkeys(ON_THE_CHIEF, "the chief"), **dict.fromkeys(ON_EVERY_TASK, "every task")}
    assert code == ROWS


def test_the_documentation_says_which_run_in_the_evaluator():
    assert tuple(re.findall(r"^\| `(\w+)` \| Runs[,;.]", DOCS, re.MULTILINE)) == IN_THE_EVALUATOR


def test_the_documentation_names_all_of_ours():
    for name in tfdist.callbacks.__all__:
        assert f"| `{name}(" in DOCS


def test_the_chief_runs_all_in_order_and_the_others_what_decides():
    every = [k.EarlyStopping(), Subclass("log"), [Own(), k.ModelCheckpoint("m.keras")]]
    assert callbacks.for_this_task(every, is_chief=True) == [*every[:2], *every[2]]
    assert callbacks.for_this_task(every, is_chief=False) == [every[0], every[2][0]]


@pytest.mark.parametrize("none", [None, [], ()])
def test_no_callbacks_are_none(none):
    assert callbacks.for_this_task(none, is_chief=False) == []


def test_a_callback_list_is_filtered_and_the_users_own_is_not_touched():
    own = Own()
    given = k.CallbackList([own, k.CSVLogger("log")], add_history=True)
    assert callbacks.for_this_task(given, is_chief=True) == [given]
    (mine,) = callbacks.for_this_task(given, is_chief=False)
    assert [type(c) for c in mine.callbacks] == [Own, k.History]
    assert len(given.callbacks) == 3


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ([k.EarlyStopping(), k.CSVLogger("log"), Own()], []),
        ([k.EarlyStopping(restore_best_weights=True)], ["EarlyStopping(restore_best_weights=True)"]),
        (
            k.CallbackList([k.ReduceLROnPlateau(), k.LearningRateScheduler(lambda epoch: 0.1)]),
            ["ReduceLROnPlateau", "LearningRateScheduler"],
        ),
        ([k.SwapEMAWeights()], ["SwapEMAWeights"]),
    ],
)
def test_callbacks_that_change_the_model_are_named(given, names):
    assert callbacks.needed_on_every_task(given) == names


@pytest.mark.parametrize(
    ("given", "may"),
    [
        (None, False),
        ([Own(), k.ModelCheckpoint("m.keras", save_freq=1), k.TerminateOnNaN()], False),
        ([tfdist.callbacks.Checkpoint("run")], False),
        ([k.LambdaCallback(on_epoch_end=print)], False),
        ([tfdist.callbacks.ChiefOnly(Own())], False),
        ([OwnOfSteps()], True),
        ([Subclass("log")], True),
        ([k.LambdaCallback(on_train_batch_begin=print)], True),
        ([tfdist.callbacks.ChiefOnly(OwnOfSteps())], True),
        (k.CallbackList([OwnOfSteps()]), True),
    ],
)
def test_only_code_of_the_users_between_steps_costs_a_look_at_the_optimizer(given, may):
    assert callbacks.may_act_between_steps(given) is may


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], Watched.NEVER),
        ([k.EarlyStopping(), k.LearningRateScheduler(lambda epoch: 0.1), Own()], Watched.NEVER),
        ([k.ProgbarLogger()], Watched.SOMETIMES),
        ([k.ProgbarLogger(), OwnOfSteps()], Watched.ALWAYS),
        ([k.TerminateOnNaN()], Watched.ALWAYS),
    ],
)
def test_logs_of_single_batches_are_formed_where_a_callback_gets_them(given, expected):
    assert callbacks.watched(k.CallbackList(given), "train") is expected
