from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedhur_app.data.interactions import from_raw
from fedhur_app.data.partition import Clients
from fedhur_app.data.profile import Profile, profile
from fedhur_app.data.synthetic import generate
from fedhur_app.reporting.data_picture import MAP_CLIENTS, draw_data

START = {"png": b"\x89PNG", "pdf": b"%PDF"}


def shared(clients: int, names: tuple[str, ...] = ()) -> Profile:
    data = generate(max(clients, 40), 50, 8, seed=2)
    labels = (np.arange(len(data)) % 5 == 0).astype(np.int8) * 2
    return profile(data, labels, Clients(np.arange(data.n_users) % clients, names))


@pytest.mark.parametrize("kind", ["png", "pdf"])
def test_the_suffix_decides_the_form(kind: str, tmp_path: Path) -> None:
    draw_data(shared(5, ("a", "b", "c", "d", "unknown")), tmp_path / f"new folder/picture.{kind}")
    assert (tmp_path / f"new folder/picture.{kind}").read_bytes().startswith(START[kind])


def test_axes_say_what_they_show(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    draw_data(shared(MAP_CLIENTS + 5), path)
    text = path.read_text()
    for words in (
        "client sizes",
        "training interactions",
        "clients, largest first",
        "item, most popular first",
        "share of interactions (%)",
        "Jaccard index",
        f"{MAP_CLIENTS} clients drawn at random",
        "interactions of a user",
        "synthetic: 105 users, 50 items",
    ):
        assert f"<!-- {words}" in text


@pytest.mark.filterwarnings("error")
def test_odd_data_are_drawn_without_a_warning(tmp_path: Path) -> None:
    data = replace(from_raw("odd", [1, 1, 2, 3], [1, 2, 1, 1]), user_ids=np.array(["1", "2", "3", "4"]))
    for labels, owner in (([0, 2, 2, 2], [0, 0, 0, 1]), ([2, 2, 2, 2], [0, 0, 0, 0])):
        path = tmp_path / "picture.svg"
        draw_data(profile(data, np.array(labels, dtype=np.int8), Clients(np.array(owner))), path)
        assert "1 users without any are not shown" in path.read_text()
