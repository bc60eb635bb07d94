"""A worker dies in mid-epoch and comes back, or does not: `fit` ends, and every row counts once."""

from __future__ import annotations

import pytest
from losing_workers import EXACT, Losing, assert_exact


def test_every_row_counts_once_though_a_worker_dies_and_comes_back(tmp_path):
    with Losing(tmp_path, hold=True) as cluster:
        # Within one epoch: it reads its share on.
        cluster.wait_for_words("holds", begun=0)
        cluster.kill("worker 1")
        cluster.bring_back("worker 1")
        cluster.go_on()
        cluster.wait_for_words("own epoch", 2)
        cluster.stop("own")
        # For longer than an epoch, and then for good: the chief reads its share.
        cluster.wait_for_words("fed epoch")
        cluster.cycle("fed")
        cluster.kill("worker 1")
        cluster.stop("fed")
        codes = cluster.codes()
        assert (codes["chief 0"], codes["worker 0"], codes["ps 0"]) == (0, 0, 0), str(cluster)
        assert_exact(cluster, "own", losses=1)
        assert_exact(cluster, "fed", losses=2)
        assert cluster.evaluated() == pytest.approx([EXACT] * 4, abs=1e-2), str(cluster)
        assert "worker 1 is lost: this process reads the rest of its share" in cluster.log("chief 0"), str(cluster)
