"""Lists and exports on a device: brute force over the tables in its state."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from client_app.state import ClientState
from fedhur_app.cli import app
from fedhur_app.data.errors import DataError
from fedhur_app.data.shards import load_shard, save_shard
from fedhur_app.evaluation.ranking import NonFiniteScoresError, best_items
from fedhur_app.recommending import open_model
from fedhur_app.seeding import torch_generator
from tests.devices import ITEMS, federation, start


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a finished federation by strategy; node 0 has users u00 to u04."""
    made = {}

    def of(strategy="fedavg", options=""):
        if (strategy, options) not in made:
            folder = tmp_path_factory.mktemp("trained")
            start(folder / "run", federation(folder, 2), strategy, f"rounds=2 min_rounds=2 {options}")
            made[strategy, options] = folder
        return made[strategy, options]

    return of


def tables(folder):
    (newest,) = (folder / "device-0").rglob("round-00002.npz")
    state = ClientState.load(newest)
    best = state.numbers["tested_round"]
    return state.arrays["model"] if state.numbers["trained_round"] <= best else state.arrays["best"]


def rows_of(folder, user):
    lines = (folder / "rows-0.csv").read_text().split()[1:]
    return {ITEMS.index(line.split(",")[1]) for line in lines if line.split(",")[0] == user}


def brute(scores, seen):
    """Best first; equal scores in the order of the fixed permutation of the catalogue."""
    order = torch.randperm(16, generator=torch_generator(0, "ranking ties")).tolist()
    place = {item: rank for rank, item in enumerate(order)}
    rounded = scores.astype(np.float32)
    return sorted((item for item in range(16) if item not in seen), key=lambda item: (-rounded[item], place[item]))


def told(answer):
    return [ITEMS.index(each.item) for each in answer.items]


def test_a_trained_user_gets_the_best_unseen_items_of_its_own_vector(trained):
    folder = trained()
    model = open_model(folder / "device-0")
    values = {name: table.double().numpy() for name, table in tables(folder).items()}
    for number, user in enumerate(["u00", "u01", "u02", "u03", "u04"]):
        answer = model.recommend(user, folder / "rows-0.csv", top=5)
        seen = rows_of(folder, user)
        scores = values["items"] @ values["users"][number]
        assert told(answer) == brute(scores, seen)[:5]
        assert (answer.known, answer.seen) == ("trained", len(seen))
        assert [each.score for each in answer.items] == pytest.approx([scores[item] for item in told(answer)])
        assert [each.title for each in answer.items] == [f"Title of {each.item}" for each in answer.items]
        assert [each.rank for each in answer.items] == [1, 2, 3, 4, 5]


def test_a_new_user_is_folded_in_by_the_normal_equations(trained, tmp_path):
    folder = trained()
    path = tmp_path / "now.csv"
    path.write_text((folder / "rows-0.csv").read_text() + f"zoe,{ITEMS[3]}\nzoe,{ITEMS[8]}\nzoe,not in the catalogue\n")
    answer = open_model(folder / "device-0").recommend("zoe", path, top=16)
    items = tables(folder)["items"].double().numpy()
    scaled = items * np.sqrt(16) / np.linalg.norm(items)
    own = scaled[[3, 8]]
    vector = np.linalg.solve(0.1 * scaled.T @ scaled + own.T @ own + 15.0 * np.eye(4), own.sum(0))
    assert answer.known == "folded in"
    assert answer.seen == 2
    scores = scaled @ vector
    assert [each.score for each in answer.items] == pytest.approx(scores[told(answer)], rel=1e-4)
    assert told(answer) == sorted(set(range(16)) - {3, 8}, key=lambda item: -scores[item])


def test_what_a_user_has_by_now_is_left_out_too(trained, tmp_path):
    folder = trained()
    before = open_model(folder / "device-0").recommend("u00", folder / "rows-0.csv", top=3)
    path = tmp_path / "now.csv"
    path.write_text((folder / "rows-0.csv").read_text() + f"u00,{before.items[0].item}\n")
    after = open_model(folder / "device-0").recommend("u00", path, top=2)
    assert [each.item for each in after.items] == [each.item for each in before.items[1:]]


@pytest.mark.parametrize(
    ("rows", "user", "message"),
    [
        ("u00,film-01\n", "nobody", "nothing is known about user 'nobody': neither"),
        ("x,elsewhere\n", "x", "none of its items is in the catalogue of the federation"),
    ],
)
def test_when_nothing_is_known_that_is_said(rows, user, message, trained, tmp_path):
    path = tmp_path / "now.csv"
    path.write_text(f"user_id,item_id\n{rows}")
    with pytest.raises(DataError, match=message):
        open_model(trained() / "device-0").recommend(user, path)


def test_a_user_who_has_everything_gets_an_empty_list(trained, tmp_path):
    path = tmp_path / "now.csv"
    path.write_text("user_id,item_id\n" + "".join(f"all,{item}\n" for item in ITEMS))
    answer = open_model(trained() / "device-0").recommend("all", path)
    assert (answer.items, answer.seen) == ((), 16)


@pytest.mark.parametrize("strategy", ["gfcf-local", "fedcia_gfcf", "lightgcn-fedavg", "fedrap"])
def test_models_of_other_kinds_rank_their_users_and_new_ones(strategy, trained, tmp_path):
    folder = trained(strategy, "gfcf.singular_vectors=2" if "gfcf" in strategy else "")
    path = tmp_path / "now.csv"
    like = "".join(f"new,{ITEMS[item]}\n" for item in sorted(rows_of(folder, "u01")))
    path.write_text((folder / "rows-0.csv").read_text() + like)
    model = open_model(folder / "device-0")
    old, new = (model.recommend(user, path, top=20) for user in ("u01", "new"))
    assert (old.known, new.known) == ("trained", "folded in")
    for answer in (old, new):
        assert set(told(answer)) == set(range(16)) - rows_of(folder, "u01")
        scores = [each.score for each in answer.items]
        assert scores == sorted(scores, reverse=True)


def test_a_network_cannot_fold_in_and_says_so(trained, tmp_path):
    folder = trained("fedncf")
    path = tmp_path / "now.csv"
    path.write_text((folder / "rows-0.csv").read_text() + f"zoe,{ITEMS[3]}\n")
    model = open_model(folder / "device-0")
    assert len(model.recommend("u02", path).items) == 8
    with pytest.raises(DataError, match="knows only the users that it was trained on"):
        model.recommend("zoe", path)


def test_a_shard_names_users_by_number(tmp_path):
    folder = tmp_path
    grid = federation(folder, 2)
    start(folder / "first", grid, overrides="rounds=1 min_rounds=1")
    for number, context in enumerate(grid.contexts.values()):
        (rows,) = (folder / f"device-{number}").glob("rows-*/shard.npz")
        save_shard(folder / f"shard-{number}.npz", replace(load_shard(rows), client=number))
        context.node_config["data-path"] = str(folder / f"shard-{number}.npz")
        context.state, context.live = type(context.state)(), None
    start(folder / "run", grid, overrides="rounds=2 min_rounds=2")
    model = open_model(folder / "device-0")
    answer = model.recommend("3", folder / "shard-0.npz", top=4)
    assert answer.known == "trained"
    assert not set(told(answer)) & rows_of(folder, "u03")
    with pytest.raises(DataError, match="trained on a prepared shard; give that"):
        model.recommend("3", folder / "rows-0.csv")


@pytest.mark.parametrize(
    ("where", "message"), [("nowhere", "no such folder"), ("empty", "no model:"), ("damaged", r"\(\d damaged\)")]
)
def test_a_folder_without_a_model_is_named(where, message, trained, tmp_path):
    folder = tmp_path / where
    if where == "empty":
        folder.mkdir()
    if where == "damaged":
        shutil.copytree(trained() / "device-0", folder)
        for path in folder.rglob("round-*.npz"):
            path.write_bytes(b"x")
    with pytest.raises(DataError, match=message):
        open_model(folder)


def test_lost_rows_are_matched_again_from_the_same_file_only(trained, tmp_path):
    source = trained()
    shutil.copytree(source / "device-0", tmp_path / "device")
    for path in (tmp_path / "device").glob("rows-*"):
        shutil.rmtree(path)
    model = open_model(tmp_path / "device")
    expected = open_model(source / "device-0").recommend("u01", source / "rows-0.csv")
    assert model.recommend("u01", source / "rows-0.csv") == expected
    path = tmp_path / "now.csv"
    path.write_text((source / "rows-0.csv").read_text() + f"u00,{ITEMS[0]}\n")
    with pytest.raises(DataError, match="has changed since"):
        model.recommend("u01", path)


# --- the list of one user -----------------------------------------------------------------------------------------


def test_a_list_is_the_one_that_the_metrics_measure():
    generator = torch.Generator().manual_seed(3)
    scores = torch.randint(0, 4, (16,), generator=generator).double()
    for k in (1, 5, 16, 40):
        seen = np.array([2, 7, 9])
        assert best_items(scores, seen, k).tolist() == brute(scores.numpy(), {2, 7, 9})[:k]
    with pytest.raises(NonFiniteScoresError):
        best_items(torch.tensor([1.0, float("nan")]), np.array([0]), 1)


# --- export -------------------------------------------------------------------------------------------------------


def test_an_export_is_read_back_by_safetensors(trained, tmp_path):
    folder = trained()
    card = open_model(folder / "device-0").export(tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {"users", "items"}
        for name, table in tables(folder).items():
            assert torch.equal(file.get_tensor(name), table)
        about = file.metadata()
    assert json.loads(about["item_ids"]) == ITEMS
    assert json.loads(about["user_ids"]) == ["u00", "u01", "u02", "u03", "u04"]
    text = card.read_text()
    assert card == tmp_path / "model.md"
    assert "strategy `fedavg`" in text
    assert "- 5 users of this node, 25 training interactions (5 validate, 10 test" in text
    assert "a catalogue of 16 items" in text
    assert "| `train.items` | 2 | `fields`" in text
    assert "ndcg@10" in text
    assert "film-" not in text
    assert "u0" not in text


def test_an_export_without_users_has_nothing_of_them(trained, tmp_path):
    open_model(trained() / "device-0").export(tmp_path / "model.safetensors", items_only=True)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {"items"}
        assert "user_ids" not in file.metadata()
    assert b"u00" not in (tmp_path / "model.safetensors").read_bytes()


def test_the_card_counts_what_left_the_device_as_the_server_does(trained, tmp_path):
    folder = trained()
    lines = [json.loads(line) for line in (folder / "run" / "history.jsonl").read_text().splitlines()]
    reports = [json.loads(next((folder / f"device-{n}").rglob("report.json")).read_text())["sent"] for n in (0, 1)]
    for stage in ("train.items", "train.personalize"):
        counted = sum(sum(report[stage]["bytes"].values()) for report in reports)
        assert counted == sum(sum(line["stages"][stage]["bytes_up"].values()) for line in lines)


def test_a_model_without_parameters_cannot_be_exported(trained, tmp_path):
    folder = trained("gfcf-local", "gfcf.singular_vectors=2")
    with pytest.raises(DataError, match="no parameters to export"):
        open_model(folder / "device-0").export(tmp_path / "model.safetensors")


# --- the commands -------------------------------------------------------------------------------------------------


def test_the_commands(trained, tmp_path):
    folder = trained()
    options = ["--state-dir", str(folder / "device-0"), "--data-path", str(folder / "rows-0.csv")]
    shown = CliRunner().invoke(app, ["recommend", *options, "--user", "u02", "--top", "3"])
    assert shown.exit_code == 0
    assert shown.output.count("Title of film-") == 3
    listed = CliRunner().invoke(app, ["recommend", *options, "--user", "u02", "--top", "3", "--json"])
    answer = open_model(folder / "device-0").recommend("u02", folder / "rows-0.csv", top=3)
    assert json.loads(listed.output) == json.loads(json.dumps(answer.as_dict()))
    run = open_model(folder / "device-0").membership.run
    assert f"model: {answer.model}" in shown.output
    assert answer.model.endswith(f"run {run}")
    named = CliRunner().invoke(app, ["recommend", *options, "--user", "u02", "--run", run[:4]])
    assert named.exit_code == 0
    other = CliRunner().invoke(app, ["recommend", *options, "--user", "u02", "--run", "zz"])
    assert other.exit_code == 2
    assert run in other.output
    unknown = CliRunner().invoke(app, ["recommend", *options, "--user", "nobody"])
    assert unknown.exit_code == 2
    to = tmp_path / "m.safetensors"
    exported = CliRunner().invoke(app, ["export", *options[:2], "--to", str(to)])
    assert exported.exit_code == 0
    assert to.is_file()
    assert (tmp_path / "m.md").is_file()
