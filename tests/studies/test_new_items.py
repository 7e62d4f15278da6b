from types import SimpleNamespace

import numpy as np
import pytest

from client_app.app import app as client_app
from client_app.state import get_place
from fedhur_app.config import ConfigError
from fedhur_app.data.shards import UserItems, load_shard, shard_path
from fedhur_app.files import write_json, write_text
from fedhur_app.studies import new_items as study
from fedhur_app.studies.workers import new_items as worker
from tests.running import SMALL, history, result

APPEAR = 3


def words(output, *options, strategy="fedhur"):
    changes = f"{SMALL} rounds=4 hierarchy.branching=[3,3] server.threads=1"
    return [
        *("--dataset", "synthetic", "--strategy", strategy, "--seed", "2", "--output", str(output)),
        *(word for change in changes.split() for word in ("--set", change)),
        *("--after", "0.5", "--share", "0.2", *options),
    ]


def read(folder):
    """(round, part, items, metric) -> value of curves.csv."""
    lines = [line.split(",") for line in (folder / "curves.csv").read_text().splitlines()[1:]]
    return {(int(r), part, items, metric): float(value) for r, part, items, _, metric, value in lines}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with items that appear, what its clients saw, and its control."""
    root = tmp_path_factory.mktemp("new-items") / "runs" / "id"
    seen = []

    def watching(message, context):
        if message.metadata.message_type == "train.items":
            shard = load_shard(shard_path(get_place(context)["data"], context.node_config["partition-id"]))
            seen.append((int(message.content["fields"]["round"]), shard))
        return client_app(message, context)

    worker.main(words(root / "fedhur" / "seed-2"), watching)
    worker.main(words(root / "fedhur-control" / "seed-2", "--control"))
    return root, seen


def test_clients_hold_no_training_row_of_new_items_before_they_appear_and_all_of_them_after(runs):
    root, seen = runs
    new = np.loadtxt(root / "fedhur" / "seed-2" / "new-items.csv", dtype=int, skiprows=1)
    assert len(new) == 16
    assert sorted({round_ for round_, _ in seen}) == [1, 2, 3, 4]
    last = {shard.client: shard for round_, shard in seen if round_ == 4}
    rows = 0
    for round_, shard in seen:
        whole, here = last[shard.client], np.isin(shard.train.items, new)
        if round_ < APPEAR:
            assert not here.any()
            kept = ~np.isin(whole.train.items, new)
            assert np.array_equal(shard.train.items, whole.train.items[kept])
            users = whole.train.pairs()[0][kept]
            assert np.array_equal(shard.train.pairs()[0], users)
        else:
            rows += here.sum()
            assert np.array_equal(shard.train.items, whole.train.items)
        for part in ("valid", "test"):
            assert np.array_equal(getattr(shard, part).items, getattr(whole, part).items)
    assert rows > 0


def test_what_is_measured_of_all_items_is_what_the_run_itself_reports(runs):
    root, _ = runs
    control, own = (root / arm / "seed-2" for arm in ("fedhur-control", "fedhur"))
    for folder, first in ((control, 1), (own, APPEAR)):  # before, a run does not know which rows are withheld
        curves = read(folder)
        for line in history(folder)[first - 1 :]:
            assert curves[line["round"], "valid", "all", "ndcg@10"] == pytest.approx(line["validation"]["ndcg@10"])
        best = result(folder)["best_round"]
        assert best >= APPEAR
        assert curves[best, "test", "all", "recall@10"] == pytest.approx(result(folder)["test"]["recall@10"])
    assert read(own)[1, "valid", "all", "ndcg@10"] != read(control)[1, "valid", "all", "ndcg@10"]


def test_the_report_shows_both_arms(runs, tmp_path):
    root, _ = runs
    folders = [SimpleNamespace(folder=root / arm / "seed-2") for arm in ("fedhur", "fedhur-control")]
    text = study.report(folders, tmp_path)
    assert "| fedhur " in text
    assert "| fedhur-control " in text
    assert (tmp_path / "new-items-id.png").stat().st_size > 10_000
    assert (tmp_path / "arrival.csv").read_text().startswith("data,arm,seed,rounds\nid,fedhur,2,")
    assert len((tmp_path / "curves.csv").read_text().splitlines()) == 1 + 2 * 4 * 6


def made(root, arm, values):
    folder = root / "runs" / "id" / arm / "seed-1"
    write_json(folder / "result.json", {"rounds": len(values), "appear": 2, "control": "control" in arm})
    lines = [f"{round_},valid,new,5,recall@10,{value}" for round_, value in enumerate(values, 1)]
    lines += ["3,test,new,5,recall@10,0.25", "3,test,all,9,ndcg@10,0.5"]
    write_text(folder / "curves.csv", "\n".join(["round,part,items,users,metric,value", *lines]) + "\n")
    return SimpleNamespace(folder=folder)


def test_rounds_are_counted_until_the_recall_is_that_of_the_control(tmp_path):
    runs = [made(tmp_path, "a", [0.0, 0.1, 0.3, 0.39]), made(tmp_path, "a-control", [0.2, 0.4, 0.4, 0.4])]
    text = study.report(runs, tmp_path)
    assert (tmp_path / "arrival.csv").read_text() == "data,arm,seed,rounds\nid,a,1,3\n"
    row = next(line for line in text.splitlines() if line.startswith("| a "))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["a", "1", "0.000", "0.100", "0.300", "0.390", "3", "0.5000", "0.2500"]


def test_rounds_until():
    control = np.array([0.5, 0.5, 0.0, 0.5])
    assert study.rounds_until(np.array([0.5, 0.5, 0.5, 0.5]), control, 2) == 1
    assert study.rounds_until(np.array([0.5, 0.1, 0.1, 0.48]), control, 2) == 3
    assert study.rounds_until(np.array([0.5, 0.1, 0.1, 0.47]), control, 2) is None


def test_rows_of_some_items():
    rows = UserItems(np.array([0, 2, 2, 5]), np.array([1, 3, 0, 1, 2]))
    kept = worker.only(rows, np.array([False, True, True, False]))
    assert kept.indptr.tolist() == [0, 1, 1, 3]
    assert kept.items.tolist() == [1, 1, 2]


def test_new_items_are_a_seeded_share():
    chosen = worker.choose_items(200, 0.1, 1)
    assert len(chosen) == 20
    assert np.array_equal(chosen, np.unique(chosen))
    assert np.array_equal(chosen, worker.choose_items(200, 0.1, 1))
    assert not np.array_equal(chosen, worker.choose_items(200, 0.1, 2))


@pytest.mark.parametrize(("after", "rounds", "expected"), [(0.5, 4, 3), (0.33, 15, 6), (0.33, 2, 2), (0.99, 5, 5)])
def test_round_of_appearance(after, rounds, expected):
    assert worker.round_of_appearance(after, rounds) == expected


@pytest.mark.parametrize(("options", "said"), [(["--after", "1"], "--after 1"), (["--share", "1.5"], "--share 1.5")])
def test_impossible_options_are_refused_and_noted(tmp_path, options, said):
    with pytest.raises(ConfigError, match=said):
        worker.main(words(tmp_path / "run", *options))
    assert result(tmp_path / "run")["status"] == "failed"
    assert said in result(tmp_path / "run")["reason"]
