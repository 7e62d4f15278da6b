"""The worker that draws groups and relations: what it chooses and counts, and one small run of it."""

import numpy as np
import polars as pl
import pytest
import torch

from fedhur_app.relations.hierarchy import Hierarchy, Level
from fedhur_app.studies import hierarchy as study
from fedhur_app.studies.workers import pictures
from fedhur_app.studies.workers.relations import Relations
from tests.running import SMALL


def test_two_popular_items_of_different_groups():
    level = Level.from_labels(torch.tensor([0, 0, 1, 1]), torch.zeros(2, dtype=torch.long))
    relations = Relations(1, [0], Hierarchy((level,)), [], list("abcd"), np.array([3, 9, 4, 5]))
    assert pictures.two_items(relations) == (1, 3)


def test_effective_peers_counts_equal_weights():
    alpha = np.array([[[0.25] * 4, [0.5, 0.5, 0, 0], [1, 0, 0, 0], [0.25] * 4]])
    assert pictures.effective_peers(alpha) == pytest.approx((4 + 2 + 1 + 4) / 4)


def test_a_run_leaves_pictures_that_the_report_gathers(tmp_path):
    folder = tmp_path / "runs" / "id" / "default" / "seed-1"
    words = ["--dataset", "synthetic", "--strategy", "fedhur", "--output", str(folder)]
    pictures.main([*words, *(word for change in SMALL.split() for word in ("--set", change))])
    levels = pl.read_csv(folder / "groups.csv")
    assert levels["level"].to_list() == [1, 2]
    assert (levels["effective_peers"] >= 1).all()

    class Run:
        pass

    run = Run()
    run.folder = folder
    text = study.report([run], tmp_path)
    for name in ("tree-id-default-1.png", "bands-id-default-1.png"):
        assert f"({name})" in text
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
