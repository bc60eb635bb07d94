"""State beside the weights on real tasks: random numbers, moving statistics, what layers were adapted to."""

from __future__ import annotations

import numpy as np
import pytest
import random_training as training

import tfdist


@pytest.fixture(scope="module")
def clusters(tmp_path_factory):
    """What two clusters of two tasks gave, the second started after the first has ended."""
    folder = tmp_path_factory.mktemp("state")
    half, norm = str(folder / "half"), str(folder / "norm.keras")
    results = {}
    with tfdist.testing.local_cluster(workers=2, strategy=True) as cluster:
        results["first"] = cluster.run(training.without_a_stop)
        cluster.run(training.first_half, half)
        results["norm"] = cluster.run(training.plain_batch_norm, norm)
        results["adapted"] = cluster.run(training.adapted_to_other_data)
    with tfdist.testing.local_cluster(workers=2, strategy=True) as cluster:
        results["second"] = cluster.run(training.without_a_stop)
        results["resumed"] = cluster.run(training.second_half, half)
    return results


def same_bits(ones, others):
    return all(np.array_equal(one, other) for one, other in zip(ones, others, strict=True))


def test_two_runs_with_one_seed_draw_the_same_random_numbers(clusters):
    assert same_bits(clusters["first"][0], clusters["second"][0])


def test_training_that_draws_random_numbers_goes_on_after_a_stop_as_without_it(clusters):
    assert same_bits(clusters["first"][0], clusters["resumed"][0])


def test_tasks_hold_the_same_after_drawing_numbers_of_their_own(clusters):
    assert same_bits(*clusters["first"])
    assert same_bits(*clusters["resumed"])


def test_plain_batch_norm_keeps_the_share_weighted_mean_of_the_tasks_statistics(clusters):
    parts = training.X[:13], training.X[13:]  # half the rows each
    mean = 0.25 * np.mean([part.mean(0) for part in parts], axis=0)
    variance = 0.75 + 0.25 * np.mean([part.var(0) for part in parts], axis=0)
    for kept in clusters["norm"]:
        np.testing.assert_allclose(kept["mean"], mean, atol=1e-6)
        np.testing.assert_allclose(kept["variance"], variance, atol=1e-6)


def test_a_saved_model_has_the_moving_statistics_that_every_task_holds(clusters):
    for kept in clusters["norm"]:
        assert same_bits(kept["saved"], [kept["mean"], kept["variance"]])
        assert same_bits(kept["saved"], clusters["norm"][0]["saved"])


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ("lookup", "vocabulary of string_lookup"),
        ("vectorization", "text_vectorization"),
        ("normalization", "mean and variance of normalization"),
        ("discretization", "bins of discretization"),
    ],
)
def test_layers_adapted_to_other_data_on_some_task_are_named(clusters, layer, words):
    for errors in clusters["adapted"]:
        assert words in errors[layer], errors
        assert "worker 1" in errors[layer]
