"""FeCoSR as a whole: G by hand, no pull, a huge pull, odd markets, joining, not waiting, resuming."""

from collections import Counter

import numpy as np
import pytest
import torch
from flwr.app import Error, Message

from client_app.algorithms import fecosr as client_half
from fedhur_app.config import ConfigError, load_settings
from fedhur_app.consensus.basis import distance
from fedhur_app.protocol import Content
from fedhur_app.runtime import LocalGrid, run_local
from server_app.stages import QuorumError, RunError
from server_app.strategies.base import Fleet
from server_app.strategies.fecosr import Server
from tests.running import history, killed_and_resumed, numbers, result, run

# The simplest form; later overrides win.
PLAIN = "fecosr.regulariser=mse fecosr.strength=1 fecosr.schedule=constant fecosr.weighting=uniform"
STILL = f"{PLAIN} rounds=4 min_rounds=4"


def server(options: str = "", sizes: tuple[int, ...] = (30, 10, 20), attributes: torch.Tensor | None = None) -> Server:
    settings = load_settings("synthetic", "fecosr", overrides=f"model.dim=2 {PLAIN} {options}")
    markets = range(len(sizes))
    fleet = Fleet(
        nodes={k: k + 100 for k in markets},
        n_items=3,
        valid_users=dict.fromkeys(markets, 1),
        interactions=dict(zip(markets, sizes, strict=True)),
        attributes=attributes,
    )
    return Server(settings, fleet)


def answer(items: list[int], rows: list[list[float]], loss: float = 1.0, examples: int = 1) -> Content:
    difference = {"items": torch.tensor(items, dtype=torch.int32), "rows": torch.tensor(rows)}
    fields = {"loss_sum": loss * examples, "examples": examples, "round": 1}
    return Content(fields, {"difference": difference})


ANSWERS = {0: answer([0, 1], [[4.0, 0.0], [1.0, 1.0]]), 1: answer([0], [[0.0, 2.0]]), 2: answer([1], [[4.0, 7.0]])}


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ("", [[2.0, 1.0], [2.5, 4.0], [0.0, 0.0]]),
        # Sizes 30, 10, 20: item 0 by 3 : 1, item 1 by 3 : 2.
        ("fecosr.weighting=examples", [[3.0, 0.5], [2.2, 3.4], [0.0, 0.0]]),
        ("fecosr.weighting=median", [[2.0, 1.0], [2.5, 4.0], [0.0, 0.0]]),
        ("fecosr.server_lr=0.5", [[1.0, 0.5], [1.25, 2.0], [0.0, 0.0]]),
    ],
)
def test_the_step_of_g_by_hand(options, step):
    strategy = server(options)
    strategy.common = strategy.raw = torch.tensor([[1.0, 1.0], [0.0, 0.0], [5.0, 6.0]])
    strategy.aggregate_regularized(1, ANSWERS)
    assert torch.allclose(strategy.common - torch.tensor([[1.0, 1.0], [0.0, 0.0], [5.0, 6.0]]), torch.tensor(step))
    assert strategy.version == 1


def test_markets_whose_loss_did_not_fall_are_left_out():
    strategy = server("fecosr.selective=true")
    strategy.common = strategy.raw = torch.zeros(3, 2)
    strategy.aggregate_regularized(1, {0: answer([0], [[1.0, 1.0]], 0.7), 1: answer([0], [[3.0, 3.0]], 0.7)})
    assert strategy.common[0].tolist() == [2.0, 2.0]
    report = strategy.aggregate_regularized(
        2, {0: answer([0], [[1.0, 1.0]], 0.6, examples=5), 1: answer([0], [[9.0, 9.0]], 0.7, examples=5)}
    )
    assert strategy.common[0].tolist() == [3.0, 3.0]
    assert report["consensus"]["left_out"] == [1]


def test_lambda_of_a_market():
    assert server("fecosr.strength=2").strength(5, 1) == 2
    assert server("fecosr.strength=2 fecosr.schedule=decay fecosr.decay=0.5").strength(3, 1) == 0.5
    by_size = server("fecosr.strength=2 fecosr.schedule=size")  # mean size 20
    assert [by_size.strength(1, k) for k in range(3)] == [2 * 20 / 30, 2 * 20 / 10, 2.0]
    joining = server("'fecosr.join={market: 1, round: 3, boost: 8}' fecosr.strength=2")
    assert [joining.strength(t, 1) for t in (3, 4, 5, 6, 7)] == [16, 8, 4, 2, 2]
    assert joining.strength(3, 0) == 2


def test_an_answer_that_is_late_counts_less():
    strategy = server("fecosr.asynchronous=true fecosr.staleness=1")
    strategy.common = strategy.raw = torch.zeros(3, 2)
    strategy.take(0, answer([0], [[3.0, 3.0]]), staleness=0)
    assert strategy.common[0].tolist() == pytest.approx([1.0, 1.0])  # a third of it: there are three markets
    strategy.take(1, answer([0], [[3.0, 3.0]]), staleness=1)
    assert strategy.common[0].tolist() == pytest.approx([1.5, 1.5])
    weighted = server("fecosr.asynchronous=true fecosr.weighting=examples")
    weighted.common = weighted.raw = torch.zeros(3, 2)
    weighted.take(0, answer([0], [[4.0, 4.0]]), staleness=0)
    assert weighted.common[0].tolist() == pytest.approx([2.0, 2.0])  # 30 of 60 interactions


def test_attributes_draw_items_that_few_markets_sent_to_their_genre():
    genres = torch.tensor([[1.0], [1.0], [1.0]])
    strategy = server("fecosr.attribute_prior=1", attributes=genres)
    strategy.common = strategy.raw = torch.zeros(3, 2)
    strategy.aggregate_regularized(1, {k: answer([0], [[3.0, 3.0]]) for k in range(2)} | {2: answer([1], [[0.0, 0.0]])})
    # Evidence 2 and 1: the genre's vector is (2 * 3 + 1 * 0) / (2 + 1 + ridge 1).
    assert strategy.common[0].tolist() == pytest.approx([1.5 + 2 / 3 * 1.5] * 2)
    assert strategy.common[1].tolist() == pytest.approx([0.75] * 2)
    assert strategy.common[2].tolist() == pytest.approx([1.5] * 2)  # nobody sent it: the genre's vector


@pytest.mark.parametrize("server_lr", [1.0, 0.1])
def test_markets_that_agree_with_g_leave_what_attributes_made_of_it(server_lr):
    """G is drawn to its genres once, not once more in every round."""
    strategy = server(f"fecosr.attribute_prior=1 fecosr.server_lr={server_lr}", attributes=torch.ones(3, 1))
    strategy.common = strategy.raw = torch.zeros(3, 2)
    wanted = torch.tensor([[3.0, 1.0], [0.0, 2.0], [-3.0, 0.0]])
    for round_ in range(1, 200):
        difference = (wanted - strategy.common).tolist()
        strategy.aggregate_regularized(round_, {k: answer([0, 1, 2], difference) for k in range(3)})
    mean = wanted.sum(dim=0) * 3 / (3 * 3 + 1)  # evidence 3 an item, ridge 1
    assert torch.allclose(strategy.common, mean + 3 / 4 * (wanted - mean), atol=1e-5)


def client_tables(grid: LocalGrid) -> list[dict[str, torch.Tensor]]:
    return [context.live.arrays["model"] for context in grid.contexts.values()]


def test_no_pull_is_independent_training_bit_for_bit(tmp_path):
    alone = run(tmp_path / "alone", "independent", STILL)
    together = run(tmp_path / "together", "fecosr", f"{STILL} fecosr.strength=0")
    for one, two in zip(client_tables(alone), client_tables(together), strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    for part in ("validation", "test"):
        assert result(tmp_path / "alone")[part] == result(tmp_path / "together")[part]


@pytest.mark.parametrize("regulariser", ["mse", "kl", "contrastive", "relation"])
def test_a_stronger_pull_brings_tables_nearer_to_g(regulariser, tmp_path):
    """In terms of the spread between markets' tables, as a share of the tables themselves."""
    spread = []
    for number, strength in enumerate((0, 1e3, 1e6)):
        options = f"{STILL} fecosr.regulariser={regulariser} fecosr.strength={strength} train.epochs=12 train.lr=0.01"
        grid = run(tmp_path / str(number), "fecosr", options)
        tables = torch.stack([model["items"] for model in client_tables(grid)])
        if regulariser == "relation":
            tables = tables @ tables.mT
        if regulariser == "kl":
            tables = tables.softmax(dim=2)
        if regulariser == "contrastive":
            tables = torch.nn.functional.normalize(tables, dim=2)
        spread.append(float((tables - tables.mean(dim=0)).norm() / tables.norm()))
    assert spread[1] < spread[0]
    assert spread[2] < spread[0] / 3


def test_a_huge_pull_drives_the_tables_to_g(tmp_path):
    options = f"{STILL} fecosr.strength=1e9 train.epochs=60 train.lr=0.001 fecosr.update_every=4"
    grid = run(tmp_path, "fecosr", options)
    for context in grid.contexts.values():
        arrays = context.live.arrays
        assert distance(arrays["model"]["items"], arrays["global"]["items"]) < 0.02


def test_markets_of_different_widths_and_models_train_together(tmp_path):
    models = "'fecosr.models=[{dim: 4}, {kind: lightgcn}, {}, {}, {dim: 12}, {kind: mlp}]'"
    options = f"{STILL} fecosr.regulariser=relation fecosr.dim=5 fecosr.strength=100 train.loss=bce {models}"
    options += " user_refit.enabled=false"
    grid = run(tmp_path, "fecosr", options)
    assert [model["items"].shape[1] for model in client_tables(grid)] == [4, 8, 8, 8, 12, 8]
    assert "hidden.0.weight" in client_tables(grid)[5] or len(client_tables(grid)[5]) > 2
    assert all(context.live.arrays["global"]["items"].shape[1] == 5 for context in grid.contexts.values())


def test_other_regularisers_refuse_different_widths():
    with pytest.raises(ConfigError, match=r"compares tables of one width.*5, 8.*choose relation"):
        load_settings("synthetic", "fecosr", overrides=f"{PLAIN} model.dim=8 fecosr.dim=5")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("'fecosr.models=[{dim: 4}]' fecosr.regulariser=relation", "names 1 models, but there are 6 markets"),
        ("'fecosr.join={market: 6, round: 2}'", "names market 6; the markets are 0 to 5"),
        ("'fecosr.join={market: 0, round: 2}' dataset.clients.number=1", "one other must be there"),
        ("fecosr.attribute_prior=1", "needs item attributes"),
    ],
)
def test_settings_that_do_not_fit_the_markets_are_refused(options, message, tmp_path, monkeypatch):
    monkeypatch.setattr("server_app.handshake.load_attributes", lambda folder: None)
    with pytest.raises(RunError, match=message):
        run(tmp_path, "fecosr", f"{STILL} {options}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("fecosr.asynchronous=true fecosr.weighting=median", "one by one"),
        ("fecosr.asynchronous=true fecosr.update_every=2", "set it to 1"),
        ("'fecosr.join={market: 1, round: 40}'", "there are 30 rounds"),
        ("fecosr.adversary=1 fecosr.regulariser=relation", "which fecosr.regulariser relation leaves free"),
        ("model.same_init=false", "set model.same_init=true"),
        ("fecosr.update_every=40", "G would never move"),
        ("'fecosr.join={market: 1, round: 4}' evaluation.selection=pooled", "join needs evaluation.selection=client"),
        ("fecosr.asynchronous=true evaluation.selection=pooled", "asynchronous needs evaluation.selection=client"),
        ("fecosr.asynchronous=true fraction_train=0.5", "fraction_train must be 1"),
        ("fecosr.asynchronous=true server.checkpoint_every=2", "checkpoint_every 1"),
        (
            "'fecosr.models=[{kind: mlp}, {}]' fecosr.regulariser=relation",
            "user_refit needs scores that are dot products",
        ),
        (
            "'fecosr.models=[{kind: mlp}, {}]' fecosr.regulariser=relation user_refit.enabled=false train.loss=mse",
            "model.kind mlp has bpr and bce only",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        load_settings("synthetic", "fecosr", overrides=f"{PLAIN} {options}")


def test_uploads_between_steps_of_g_are_spared(tmp_path):
    run(tmp_path, "fecosr", f"{STILL} fecosr.update_every=2")
    ups = [line["stages"]["train.regularized"]["bytes_up"].get("difference", 0) for line in history(tmp_path)]
    downs = [line["stages"]["train.regularized"]["bytes_down"].get("global", 0) for line in history(tmp_path)]
    assert [up > 0 for up in ups] == [False, True, False, True]
    assert [down > 0 for down in downs] == [True, False, True, False]


def test_compressed_uploads_count_fewer_bytes(tmp_path):
    sizes = []
    for number, options in enumerate(("", "fecosr.top_rows=0.1 fecosr.bits=8")):
        run(tmp_path / str(number), "fecosr", f"{STILL} model.dim=64 {options}")
        sizes.append(history(tmp_path / str(number))[0]["stages"]["train.regularized"]["bytes_up"]["difference"])
    assert sizes[1] < sizes[0] / 12


def explode(monkeypatch: pytest.MonkeyPatch, market: int) -> None:
    """One market's uploads are a million times too large."""
    honest = client_half.Client.upload

    def upload(self):
        arrays = honest(self)
        if self.shard.client == market:
            arrays["difference"]["rows"] = arrays["difference"]["rows"] * 1e6
        return arrays

    monkeypatch.setattr(client_half.Client, "upload", upload)


def test_a_market_with_exploding_updates(tmp_path, monkeypatch):
    """Median and trimmed mean hold, the mean does not."""

    def largest(name: str) -> float:
        grid = run(tmp_path / name, "fecosr", f"{STILL} fecosr.weighting={name} fecosr.trim=0.2")
        return float(grid.contexts[max(grid.contexts)].live.arrays["global"]["items"].abs().max())

    quiet = largest("uniform")
    explode(monkeypatch, market=2)
    (tmp_path / "uniform").rename(tmp_path / "quiet")
    assert largest("uniform") > 1e4 * quiet
    for name in ("median", "trimmed"):
        assert largest(name) < 2 * quiet


def test_a_market_joins_late_and_starts_from_g(tmp_path):
    options = f"{PLAIN} rounds=6 min_rounds=6 'fecosr.join={{market: 3, round: 4}}'"
    seen = {}

    def look(message, client):
        seen.setdefault(message.metadata.group_id, set()).add(client)

    run(tmp_path, "fecosr", options, look)
    for round_ in range(1, 7):
        assert (3 in seen[f"round-{round_}"]) == (round_ >= 4)
    strengths = [line["consensus"]["strength"].get("3") for line in history(tmp_path)]
    assert strengths == [None, None, None, 10.0, 5.0, 2.5]


def test_a_market_that_joins_takes_g_as_its_table(tmp_path, monkeypatch):
    started = {}
    honest = client_half.Client.train

    def train(self):
        if self.round == 3:
            started[self.shard.client] = (self.state.arrays["model"]["items"], self.common)
        return honest(self)

    monkeypatch.setattr(client_half.Client, "train", train)
    run(tmp_path / "warm", "fecosr", f"{STILL} 'fecosr.join={{market: 3, round: 3}}'")
    assert torch.equal(*started[3])
    assert not torch.equal(*started[2])
    run(tmp_path / "cold", "fecosr", f"{STILL} 'fecosr.join={{market: 3, round: 3, warm: false}}'")
    assert not torch.equal(*started[3])


def test_a_market_that_drops_out_gets_the_present_g_when_it_is_back(tmp_path):
    def away(message, client):
        return "drop" if client == 1 and message.metadata.group_id in ("round-2", "round-3") else None

    grid = run(tmp_path, "fecosr", f"{PLAIN} rounds=5 min_rounds=5 fecosr.update_every=2", away)
    lines = history(tmp_path)
    assert [line["stages"]["train.regularized"]["replies"] for line in lines] == [6, 5, 5, 6, 6]
    tables = [context.live.arrays["global"]["items"] for context in grid.contexts.values()]
    assert all(torch.equal(table, tables[0]) for table in tables)


@pytest.mark.parametrize(
    "options",
    [
        "",
        "fecosr.adversary=0.1 fecosr.schedule=adaptive",
        "fecosr.update_every=2 fecosr.selective=true",
        "'fecosr.join={market: 3, round: 3}' fraction_train=0.5",
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(options, tmp_path):
    run(tmp_path / "whole", "fecosr", f"{PLAIN} rounds=5 min_rounds=5 {options}")
    killed_and_resumed(tmp_path / "killed", "fecosr", f"{PLAIN} rounds=5 min_rounds=5 {options}", 4)
    assert history(tmp_path / "killed") == history(tmp_path / "whole")
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")


# --- nobody waits ---------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_market(monkeypatch):
    """Answers of market 0 arrive only when the server has looked four times; counts the calls of each market."""
    calls, looks = Counter(), {}
    push, pull = LocalGrid.push_messages, LocalGrid.pull_messages

    def pushed(self, messages):
        ids = []
        for message in messages:
            market = self.contexts[message.metadata.dst_node_id].node_config["partition-id"]
            (message_id,) = push(self, [message])
            if message.metadata.message_type == "train.regularized":
                calls[market] += 1
                looks[message_id] = 4 if market == 0 else 0
            ids.append(message_id)
        return ids

    def pulled(self, message_ids):
        ready = [i for i in message_ids if looks.get(i, 0) == 0]
        looks.update({i: looks[i] - 1 for i in message_ids if looks.get(i, 0)})
        return pull(self, ready)

    monkeypatch.setattr(LocalGrid, "push_messages", pushed)
    monkeypatch.setattr(LocalGrid, "pull_messages", pulled)
    return calls


def test_fast_markets_do_not_wait_for_a_slow_one(slow_market, tmp_path):
    run(tmp_path, "fecosr", f"{PLAIN} rounds=6 min_rounds=6 fecosr.asynchronous=true")
    fast = [slow_market[market] for market in range(1, 6)]
    assert slow_market[0] < min(fast)
    lines = history(tmp_path)
    assert lines[-1]["consensus"]["version"] >= 6 * 6  # a step an answer, at least six answers a round
    assert result(tmp_path)["status"] == "completed"


def test_an_asynchronous_run_goes_on_without_a_market_that_fails(tmp_path):
    def away(message, client):
        return "raise" if client == 1 and message.metadata.group_id == "round-2" else None

    run(tmp_path, "fecosr", f"{PLAIN} rounds=4 min_rounds=4 fecosr.asynchronous=true", away)
    absences = [line["stages"]["train.regularized"]["absent"] for line in history(tmp_path)]
    assert ["injected fault" in reasons.get("1", "") for reasons in absences].count(True) == 1
    assert absences[-1] == {}
    assert result(tmp_path)["status"] == "completed"


@pytest.mark.parametrize("options", ["rounds=5 min_rounds=5", "rounds=40 min_rounds=1 patience=1 train.lr=1e-9"])
def test_what_an_asynchronous_run_tests_has_been_validated(options, slow_market, tmp_path, monkeypatch):
    """Also where it stops early while a market is still training."""
    tested = {}
    honest = client_half.Client.best_model

    def best_model(self, best_round):
        model = honest(self, best_round)
        tested[self.shard.client] = self.rank("valid", model).sums()
        return model

    monkeypatch.setattr(client_half.Client, "best_model", best_model)
    run(tmp_path, "fecosr", f"{PLAIN} {options} fecosr.asynchronous=true")
    users = sum(sums.users for sums in tested.values())
    pooled = sum(sums.ndcg for sums in tested.values()) / users
    assert result(tmp_path)["validation"]["ndcg@10"] == pytest.approx(pooled)


def test_answers_of_one_market_are_no_quorum(tmp_path):
    def away(message, client):
        return "raise" if client > 0 and message.metadata.message_type == "train.regularized" else None

    with pytest.raises(QuorumError, match="1 of 6 clients answered"):
        run(tmp_path, "fecosr", f"{STILL} fecosr.asynchronous=true", away)


def test_a_market_that_joins_starts_from_g_once(tmp_path, monkeypatch):
    """Its first answer is lost: what it learned stays."""
    tables = {}
    honest = client_half.Client.train

    def train(self):
        before = self.state.arrays["model"]["items"]
        fields = honest(self)
        if self.shard.client == 3:
            tables[self.round] = (before, self.state.arrays["model"]["items"])
        return fields

    answers = LocalGrid._answer

    def lose(self, message, context, fault):
        reply = answers(self, message, context, fault)
        late = message.metadata.message_type == "train.regularized" and message.metadata.group_id == "round-3"
        if late and context.node_config["partition-id"] == 3:
            return Message(Error(2, "lost"), reply_to=message)
        return reply

    monkeypatch.setattr(client_half.Client, "train", train)
    monkeypatch.setattr(LocalGrid, "_answer", lose)
    run(tmp_path, "fecosr", f"{STILL} 'fecosr.join={{market: 3, round: 3}}'")
    assert torch.equal(tables[4][0], tables[3][1])


def test_an_asynchronous_run_can_be_resumed(slow_market, tmp_path):
    killed_and_resumed(tmp_path, "fecosr", f"{PLAIN} rounds=5 min_rounds=5 fecosr.asynchronous=true", 4)
    assert result(tmp_path)["rounds"] == 5
    assert [line["round"] for line in history(tmp_path)] == [1, 2, 3, 4, 5]


# --- markets --------------------------------------------------------------------------------------------------------

MARKETS = (
    "dataset.markets.users=[90,30] dataset.markets.interactions_per_user=[20,6] dataset.markets.items=120 model.dim=8 "
    "rounds=15 min_rounds=15 evaluation.per_user=true evaluation.per_client=true"
)


def market_run(output, strategy, options="", seed=1):
    """Test NDCG of every user, and the market of each."""
    config = {"dataset": "markets-synthetic", "strategy": strategy, "output-dir": str(output), "seed": seed}
    run_local({**config, "overrides": f"{MARKETS} {options}"})
    with np.load(output / "users.npz") as users:
        return users["ndcg"], users["market"]


def test_a_market_that_joins_costs_the_others_nothing(tmp_path):
    """Paired by user over four seeds: the interval of the rich market's change reaches zero or lies above it."""
    changes = []
    for seed in range(1, 5):
        # In the last round nothing that the other market learns comes back any more.
        never, market = market_run(tmp_path / f"never-{seed}", "fecosr", "'fecosr.join={market: 1, round: 15}'", seed)
        joined, _ = market_run(tmp_path / f"joined-{seed}", "fecosr", "'fecosr.join={market: 1, round: 4}'", seed)
        changes.append((joined - never)[market == 0])
    change = np.concatenate(changes)
    assert change.mean() > -2 * change.std(ddof=1) / np.sqrt(len(change))


@pytest.mark.parametrize("strategy", ["independent", "finetune", "joint", "fedavg", "fecosr"])
def test_validation_of_every_market_pools_to_that_of_the_round(strategy, tmp_path):
    _, market = market_run(tmp_path, strategy, "rounds=3 min_rounds=1 evaluation.selection=pooled")
    assert set(market.tolist()) == {0, 1}
    (*_, last) = history(tmp_path)
    counted = {"finetune": ["1"]}.get(strategy, ["0", "1"])  # its last phase is judged by the others
    users = {name: last["markets"][name]["users"] for name in counted}
    for metric in ("ndcg@10", "recall@10", "auc"):
        pooled = sum(last["markets"][name][metric] * users[name] for name in counted) / sum(users.values())
        assert last["validation"][metric] == pytest.approx(pooled, abs=1e-12)


def test_every_market_tests_the_model_of_its_own_best_round(tmp_path, monkeypatch):
    tested = {}
    honest = client_half.Client.best_model

    def best_model(self, best_round):
        model = honest(self, best_round)
        tested[self.shard.client] = (self.state.numbers["best_round"], self.rank("valid", model).sums())
        return model

    monkeypatch.setattr(client_half.Client, "best_model", best_model)
    market_run(tmp_path, "fecosr")
    for market in ("0", "1"):
        curve = [line["markets"][market]["ndcg@10"] for line in history(tmp_path)]
        round_, sums = tested[int(market)]
        assert round_ == 1 + int(np.argmax(curve))
        assert sums.means()["ndcg@10"] == max(curve)
    best = [max(line["markets"][m]["ndcg@10"] for line in history(tmp_path)) for m in ("0", "1")]
    users = [history(tmp_path)[0]["markets"][m]["users"] for m in ("0", "1")]
    assert result(tmp_path)["validation"]["ndcg@10"] == pytest.approx(np.average(best, weights=users))


def test_genres_reach_the_server(tmp_path):
    market_run(tmp_path, "fecosr", "fecosr.attribute_prior=2 rounds=2 min_rounds=1")
    assert result(tmp_path)["status"] == "completed"
