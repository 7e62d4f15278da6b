"""FedHUR's two halves together against the formulas, written out densely on tiny tables."""

import copy

import numpy as np
import pytest
import torch
from scipy.stats import kstest, laplace

from client_app.algorithms.fedhur import Client, laplace_noise
from client_app.state import ClientState
from fedhur_app.config import load_settings
from fedhur_app.data.shards import Shard
from fedhur_app.protocol import Content, Stage
from fedhur_app.relations.alignment import PersonalFilter
from fedhur_app.relations.filters import block_gram, blocks_of, group_means
from fedhur_app.relations.matching import EnergyScores, standardise
from fedhur_app.relations.matching import features as fedhur_features
from fedhur_app.relations.weights import corrected_scores, shared_basis_filters
from server_app.strategies.base import Fleet
from server_app.strategies.fedhur import Server
from tests.models.helpers import user_items
from tests.running import history, run
from tests.tensors import LargestTensor

# K d >= I, so that the eigenvectors of S_g can span everything.
ITEMS, WIDTH, CLIENTS = 18, 4, 5
BASE = "model.dim=4 hierarchy.branching=[2,3] relation.query_width=3 residual.beta=[0.5,0.8] align.rank=18"


class Round:
    """One FedHUR round on random tables, without training: what each client ends up aligning to."""

    def __init__(self, overrides, tables=None):
        self.settings = load_settings("ml-100k", "fedhur-paper", overrides=f"{BASE} {overrides}")
        fleet = Fleet(dict(enumerate(range(CLIENTS))), ITEMS, dict.fromkeys(range(CLIENTS), 1))
        self.server = Server(self.settings, fleet)
        generator = torch.Generator().manual_seed(0)
        if tables is None:
            tables = torch.randn(CLIENTS, ITEMS, WIDTH, generator=generator) * torch.tensor([1, 2, 1, 3, 0.5]).view(
                -1, 1, 1
            )
        self.tables = tables
        self.clients = [self.client(k) for k in range(CLIENTS)]

    def client(self, k):
        empty = user_items([[0]])
        shard = Shard(k, ITEMS, np.zeros(1, dtype=np.int64), empty, user_items([[]]), user_items([[]]))
        state = ClientState(
            {"model": {"users": torch.zeros(1, WIDTH), "items": self.tables[k].clone()}},
            {"client": k, "trained_round": 1, "finished_round": 0, "best_round": 0},
        )
        return Client(self.settings, shard, state, 1, torch.device("cpu"))

    def play(self, monkeypatch, examples=(1,) * CLIENTS):
        """Run the stages; returns the personal filter of each client, dense."""
        uploads = {k: Content({"examples": examples[k]}, client.upload()) for k, client in enumerate(self.clients)}
        self.statistics = self.server.aggregate_items(1, uploads)
        everybody = list(range(CLIENTS))
        if Stage.UTILITY in self.server.stages:
            request = self.server.configure_utility(1, everybody)
            self.queries = {k: client.utility(request) for k, client in enumerate(self.clients)}
            self.server.aggregate_utility(1, self.queries)
        answers = self.server.configure_personalize(1, everybody)
        if isinstance(answers, Content):
            answers = dict.fromkeys(everybody, answers)
        seen = []
        original = PersonalFilter.__post_init__

        def spy(personal):
            original(personal)
            seen.append(personal)

        with monkeypatch.context() as patch:
            patch.setattr(PersonalFilter, "__post_init__", spy)
            filters = []
            for k, client in enumerate(self.clients):
                seen.clear()
                client.personalize(answers[k])
                filters.append(seen[0].dense())
        return torch.stack(filters)


def recorded_weights(monkeypatch):
    """Weights (blocks, K, K) of every level, filled in while a server works them off."""
    recorded = []
    original = Server._relations

    def spy(server, number):
        for index, blocks, alpha in original(server, number):
            if index == len(recorded):
                recorded.append(torch.empty(0))
            recorded[index] = torch.cat([recorded[index].reshape(-1, *alpha.shape[1:]), alpha])
            assert len(recorded[index]) == blocks.stop
            yield index, blocks, alpha

    monkeypatch.setattr(Server, "_relations", spy)
    return recorded


def dense_filters(round_, alphas):
    """S~_k of eq. 2 and 22-24 with everything I x I, from weights alpha (blocks, K, K) of every level."""
    tables, hierarchy = round_.tables.double(), round_.server.hierarchy
    grams = tables @ tables.transpose(-1, -2)
    result = grams.mean(dim=0).repeat(CLIENTS, 1, 1)
    for level, alpha, beta in zip(hierarchy.levels, alphas, round_.settings.residual.beta, strict=True):
        one_hot = torch.nn.functional.one_hot(level.labels).double()
        means = (one_hot.T / one_hot.sum(dim=0)[:, None]) @ tables
        filters = means @ means.transpose(-1, -2)
        same_parent = (level.parent[:, None] == level.parent[None]).double()
        for k in range(CLIENTS):
            residual = torch.zeros_like(filters[0])
            for j in range(CLIENTS):
                # alpha of the block that a group's row belongs to; blocks are numbered as the parents are.
                residual += alpha[level.parent, k, j].double()[:, None] * (filters[j] - filters.mean(dim=0))
            result[k] += beta * one_hot @ (residual * same_parent) @ one_hot.T
    return result


@pytest.mark.parametrize("kind", ["utility", "similarity", "complementarity", "both"])
def test_personal_filters_are_those_of_the_formulas(kind, monkeypatch):
    round_ = Round(f"relation.kind={kind} score.standardize=true")
    recorded = recorded_weights(monkeypatch)
    filters = round_.play(monkeypatch)
    assert len(recorded) == 2
    assert all(0.2 < float(alpha.amax(dim=-1).mean()) < 0.95 for alpha in recorded), "weights that test nothing"
    torch.testing.assert_close(filters.double(), dense_filters(round_, recorded), rtol=1e-4, atol=1e-4)


def test_literal_weights_are_the_softmax_of_the_energies(monkeypatch):
    """Eq. 10-18 and 22 written out, with the scorer switched off."""
    round_ = Round("score.correction=0 score.tau=100.0")
    recorded = recorded_weights(monkeypatch)
    round_.play(monkeypatch)
    tables, hierarchy = round_.tables, round_.server.hierarchy
    for index, level in enumerate(hierarchy.levels):
        means = group_means(tables, hierarchy)[index]
        blocks = blocks_of(means, level)
        for block, members in enumerate(level.members):
            size = int((members >= 0).sum())
            for k in range(CLIENTS):
                query = round_.queries[k].record("queries")[f"level.{index + 1}"]
                own = query[int(level.mask[:block].sum()) :][:size]
                scores = torch.stack([(own.T @ blocks[j, block, :size]).square().sum() for j in range(CLIENTS)])
                expected = torch.softmax(scores / 100.0, dim=0)
                torch.testing.assert_close(recorded[index][block, k], expected, rtol=1e-4, atol=1e-5)


def test_queries_are_unit_columns_of_the_projected_utility(monkeypatch):
    round_ = Round("")
    round_.play(monkeypatch)
    for content in round_.queries.values():
        first = content.record("queries")["level.1"]
        torch.testing.assert_close(first.norm(dim=0), torch.ones(3))


def test_without_relations_everybody_gets_the_mean_gram(monkeypatch):
    round_ = Round("relation.kind=none")
    grams = round_.tables @ round_.tables.transpose(-1, -2)
    filters = round_.play(monkeypatch)
    for k in range(CLIENTS):
        torch.testing.assert_close(filters[k], grams.mean(dim=0), rtol=1e-4, atol=1e-4)


def test_centred_residuals_leave_the_mean_filter_alone(monkeypatch):
    round_ = Round("residual.center=true score.standardize=true")
    filters = round_.play(monkeypatch)
    mean = (round_.tables @ round_.tables.transpose(-1, -2)).mean(dim=0)
    torch.testing.assert_close(filters.mean(dim=0), mean, rtol=1e-3, atol=1e-3)
    assert (filters[0] - filters[1]).abs().max() > 1e-2


def test_a_bound_on_the_residual_holds_in_item_space(monkeypatch):
    round_ = Round("residual.max_ratio=0.01 residual.beta=[0,0.8]")
    filters = round_.play(monkeypatch)
    mean = (round_.tables @ round_.tables.transpose(-1, -2)).mean(dim=0)
    for k in range(CLIENTS):
        assert (filters[k] - mean).norm() <= 0.0101 * mean.norm()


@pytest.mark.parametrize(
    "overrides",
    [
        "score.standardize=true score.steps=3",
        "score.correction=0 residual.center=true",
        "relation.match=cosine relation.include_self=false",
        "relation.kind=both residual.peers=2",
        "residual.coarse_parameter_levels=[1] residual.max_ratio=0.1",
        "residual.kind=item residual.item_level=1 residual.peers=3",
        "residual.kind=item residual.item_level=1 residual.peers=2 residual.span=own",
    ],
)
def test_answers_do_not_depend_on_how_much_is_matched_at_once(overrides, monkeypatch):
    """One target of one block at a time, some targets, some blocks, and everything."""
    answers, statistics, scorers = [], [], []
    for size in (1, 5 * 4 * 27 * CLIENTS * 2, 5 * 4 * 27 * CLIENTS**2, 2**26):
        monkeypatch.setattr("server_app.strategies.fedhur._PAIR_BYTES", size)
        round_ = Round(overrides)
        # Twice: the scorer trained on the pairs of the first round corrects the scores of the second.
        round_.play(monkeypatch)
        round_.clients = [round_.client(k) for k in range(CLIENTS)]
        answers.append(round_.play(monkeypatch))
        statistics.append(round_.server.statistics)
        scorers.append(round_.server.scorers.get(0))
    for filters, told, scorer in zip(answers[1:], statistics[1:], scorers[1:], strict=True):
        torch.testing.assert_close(filters, answers[0], rtol=1e-4, atol=1e-4)
        assert told["relation"].keys() == statistics[0]["relation"].keys()
        for level, numbers in told["relation"].items():
            assert numbers == pytest.approx(statistics[0]["relation"][level], rel=1e-5)
        if scorer is not None:
            assert told["scorer_loss"] == pytest.approx(statistics[0]["scorer_loss"], rel=1e-5)
            for name, array in scorer.state().items():
                np.testing.assert_allclose(array, scorers[0].state()[name], rtol=1e-3, atol=1e-5)


def test_matching_many_clients_never_holds_all_pairs_of_all_blocks(monkeypatch):
    """Beside the tables: small multiples of the pairs on one block."""
    clients, items, bound = 120, 60, 2**18
    monkeypatch.setattr("server_app.strategies.fedhur._PAIR_BYTES", bound)
    settings = load_settings(
        "ml-100k", "fedhur-paper", overrides="model.dim=4 hierarchy.branching=[4,5,3] score.steps=2 score.batch=500"
    )
    server = Server(settings, Fleet(dict(enumerate(range(clients))), items, dict.fromkeys(range(clients), 1)))
    generator = torch.Generator().manual_seed(3)
    tables = torch.randn(clients, items, 4, generator=generator)
    server.aggregate_items(1, {k: Content({"examples": 1}, {"table": {"items": tables[k]}}) for k in range(clients)})
    server.configure_utility(1, list(range(clients)))
    levels = server.hierarchy.levels
    queries = {
        f"level.{number}": torch.randn(level.n_groups, 16, generator=generator)
        for number, level in enumerate(levels, 1)
    }
    server.aggregate_utility(1, {k: Content({}, {"queries": queries}) for k in range(clients)})
    with LargestTensor() as largest:
        answers = server.configure_personalize(1, list(range(clients)))
    assert len(answers) == clients
    assert sum(len(level.members) for level in levels) > 20
    # The features of all pairs on one block alone are four times as much, those on all blocks a hundred times.
    assert largest.bytes <= bound


@pytest.mark.parametrize("level", [0, 1])
def test_item_residuals_in_the_shared_basis_equal_the_dense_formula_when_the_basis_is_complete(level, monkeypatch):
    """With V of full rank nothing is lost: V M V^T = S_g + gamma sum_a 1_a (sum_j alpha E_j E_j^T - S_g) 1_a."""
    round_ = Round(
        f"residual.kind=item residual.item_level={level} residual.gamma=0.4 residual.peers=2 "
        "relation.include_self=false"
    )
    recorded = recorded_weights(monkeypatch)
    filters = round_.play(monkeypatch)
    grams = round_.tables @ round_.tables.transpose(-1, -2)
    mean = grams.mean(dim=0)
    hierarchy = round_.server.hierarchy
    labels = torch.zeros(ITEMS, dtype=torch.long) if level == 0 else hierarchy.levels[level - 1].labels
    alpha = recorded[level]
    assert len(alpha) == int(labels.max()) + 1
    for k in range(CLIENTS):
        expected = mean.clone()
        for group in range(len(alpha)):
            inside = (labels == group).float()
            mixed = torch.einsum("j,jab->ab", alpha[group, k], grams)
            expected += 0.4 * inside[:, None] * (mixed - mean) * inside[None]
        # The client takes the positive part, as the minimiser of eq. 25 does.
        values, vectors = torch.linalg.eigh(expected)
        positive = (vectors * values.clamp_min(0)) @ vectors.T
        torch.testing.assert_close(filters[k], positive, rtol=1e-3, atol=2e-3)
        assert float(alpha[:, k, k].max()) == 0.0
        assert int((alpha[:, k] > 0).sum(dim=-1).max()) == 2


def test_weights_for_other_groups_than_there_are_name_both_numbers():
    vectors, values = torch.eye(4)[:, :2], torch.ones(2)
    tables = [torch.ones(4, 3)] * 2
    labels = torch.tensor([0, 0, 1, 1])
    for number in (1, 3):
        with pytest.raises(ValueError, match=f"{number} groups, but the items have 2 groups"):
            shared_basis_filters(vectors, values, tables, torch.eye(2).expand(number, 2, 2), 0.3, labels)


def test_shared_and_own_span_agree_on_what_the_client_needs(monkeypatch):
    """In the complete basis both forms give the same best table up to rotation."""
    settings = "residual.kind=item residual.gamma=0.4 residual.peers=3 "
    shared = Round(settings + "residual.span=shared")
    own = Round(settings + "residual.span=own")
    shared.play(monkeypatch)
    own.play(monkeypatch)
    for first, second in zip(shared.clients, own.clients, strict=True):
        one, two = (client.state.arrays["model"]["items"] for client in (first, second))
        torch.testing.assert_close(one @ one.T, two @ two.T, rtol=1e-2, atol=2e-2)


def test_coarse_levels_may_average_parameters_instead(monkeypatch):
    round_ = Round("residual.coarse_parameter_levels=[1] residual.beta=[0.5,0]")
    plain = Round("residual.beta=[0,0]")
    plain.play(monkeypatch)
    recorded = recorded_weights(monkeypatch)
    round_.play(monkeypatch)
    level = round_.server.hierarchy.levels[0]
    means = group_means(round_.tables, round_.server.hierarchy)[0]
    for k in range(CLIENTS):
        mixed = torch.einsum("j,jmd->md", recorded[0][0, k], means)
        shift = 0.5 * (mixed - means.mean(dim=0))[level.labels]
        moved = round_.clients[k].state.arrays["model"]["items"] - plain.clients[k].state.arrays["model"]["items"]
        torch.testing.assert_close(moved, shift, rtol=1e-3, atol=1e-3)


def test_this_rounds_weights_use_the_scorer_of_the_previous_round():
    """Swapping 'score, then train' for 'train, then score' must show."""
    server = Round("score.steps=5 score.lr=0.1").server
    generator = torch.Generator().manual_seed(1)

    def energies():
        rho = torch.rand(2, CLIENTS, CLIENTS, 3, generator=generator)
        return EnergyScores(rho, rho.square().sum(dim=-1), torch.rand(2, CLIENTS, generator=generator))

    rows = 2 * CLIENTS**2
    scorer = server.scorers[0] = server._new_scorer(0, 5)
    server.training = {0: scorer.draw(rows, generator)}
    server._corrected(energies(), 0, 0)
    scorer.fit(server.training[0])
    before = copy.deepcopy(scorer)
    second = energies()
    server.training = {0: scorer.draw(rows, generator)}
    result = server._corrected(second, 0, 0)
    scorer.fit(server.training[0])

    def by(scorer):
        kinds = [second.rho, second.nu[:, None, :, None].expand(2, CLIENTS, CLIENTS, 1), second.total.sqrt()[..., None]]
        x = torch.cat([standardise(kind, dim=2) for kind in kinds], dim=-1)
        return corrected_scores(second.total, scorer.predict(x), server.settings.score.correction)

    torch.testing.assert_close(result, by(before))
    assert (result - by(scorer)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["score.analytic=false", "score.analytic=true"])
@pytest.mark.parametrize("per_level", [False, True])
@pytest.mark.parametrize("timing", ["previous", "same"])
def test_settings_decide_which_scorer_a_level_has_and_when_it_is_trained(timing, per_level, kind, monkeypatch):
    """What is added to the scores of each level is the view of its own scorer, trained before or after."""
    round_ = Round(f"score.timing={timing} score.per_level={str(per_level).lower()} {kind} score.steps=3 score.lr=0.1")
    round_.play(monkeypatch)
    before = copy.deepcopy(round_.server.scorers)
    seen, added = [], []
    monkeypatch.setattr(
        "server_app.strategies.fedhur.features", lambda *of: seen.append(fedhur_features(*of)) or seen[-1]
    )
    monkeypatch.setattr(
        "server_app.strategies.fedhur.corrected_scores",
        lambda *of: added.append(of[1]) or corrected_scores(*of),
    )
    round_.tables = round_.tables.flip(1) ** 2
    round_.clients = [round_.client(k) for k in range(CLIENTS)]
    round_.play(monkeypatch)
    after = round_.server.scorers
    assert sorted(after) == ([1, 2] if per_level else [0])
    # With `same` all pairs pass by once before, to train on.
    assert len(added) == (4 if timing == "same" else 2)
    for level, x, correction in zip((1, 2), seen[-2:], added[-2:], strict=True):
        number = level if per_level else 0
        used, other = (after, before) if timing == "same" else (before, after)
        torch.testing.assert_close(correction, used[number].predict(x))
        assert (correction - other[number].predict(x)).abs().max() > 1e-4


@pytest.mark.parametrize("overrides", ["", "score.per_level=true", "score.analytic=true score.per_level=true"])
def test_a_resumed_server_has_the_scorers_that_it_had(overrides, monkeypatch):
    round_ = Round(f"{overrides} score.steps=3")
    round_.play(monkeypatch)
    saved = round_.server.state()
    other = Round(f"{overrides} score.steps=3").server
    other.load_state(saved)
    assert other.state().keys() == saved.keys()
    assert any(name.startswith("scorer/") for name in saved)
    for name, array in other.state().items():
        np.testing.assert_array_equal(array, saved[name])


def test_queries_may_keep_their_length(monkeypatch):
    """The same directions, each as long as the utility makes it."""
    unit, raw = Round("relation.query_norm=columns"), Round("relation.query_norm=none")
    unit.play(monkeypatch)
    raw.play(monkeypatch)
    for k in range(CLIENTS):
        one, two = (played.queries[k].record("queries")["level.1"] for played in (unit, raw))
        lengths = two.norm(dim=0)
        torch.testing.assert_close(two / lengths, one)
        assert (lengths - 1).abs().min() > 1e-3


def test_a_client_without_a_query_is_neither_target_nor_candidate(monkeypatch):
    round_ = Round("")
    everybody = list(range(CLIENTS))
    uploads = {k: Content({"examples": 1}, client.upload()) for k, client in enumerate(round_.clients)}
    round_.server.aggregate_items(1, uploads)
    request = round_.server.configure_utility(1, everybody)
    answered = {k: round_.clients[k].utility(request) for k in (0, 2, 4)}
    round_.server.aggregate_utility(1, answered)
    answers = round_.server.configure_personalize(1, [0, 2, 4])
    assert sorted(answers) == [0, 2, 4]
    assert round_.server.uploaded == [0, 2, 4]
    assert len(answers) == 3
    with pytest.raises(KeyError):
        answers[1]


@pytest.mark.parametrize("options", ["", "relation.kind=both", "relation.kind=none", "residual.kind=item"])
def test_a_client_without_data_gives_nothing_and_gets_the_global_filter(options, monkeypatch):
    tables = Round(options).tables
    without = Round(options, tables)
    filters = without.play(monkeypatch, examples=(1, 1, 0, 1, 1))
    noise = tables.clone()
    noise[2] = 100 * torch.randn(ITEMS, WIDTH, generator=torch.Generator().manual_seed(9))
    other = Round(options, noise)
    torch.testing.assert_close(other.play(monkeypatch, examples=(1, 1, 0, 1, 1)), filters, rtol=0, atol=0)
    assert without.server.uploaded == [0, 1, 3, 4]
    kept = tables[[0, 1, 3, 4]]
    torch.testing.assert_close(filters[2], (kept @ kept.mT).mean(0), rtol=1e-4, atol=1e-4)


def test_fedcia_sends_the_bytes_of_the_papers_table_7(tmp_path):
    """0.82 MiB each way a client and round at I = 1682, d = r = 128."""
    run(
        tmp_path,
        "fedcia",
        "rounds=1 min_rounds=1 model.dim=128 dataset.synthetic.users=20 dataset.synthetic.items=1682 "
        "dataset.synthetic.interactions_per_user=40 dataset.clients.number=2",
    )
    stages = history(tmp_path)[0]["stages"]
    up = stages["train.items"]["bytes_up"]["table"] / 2 / 2**20
    down = stages["train.personalize"]["bytes_down"]["filter"] / 2 / 2**20
    assert round(up, 2) == round(down, 2) == 0.82
    assert stages["train.items"]["bytes_up"]["table"] == 2 * (1682 * 128 * 4 + 128 + len("items"))


def test_statistics_of_a_round_are_in_the_history(tmp_path):
    run(tmp_path, "fedhur-paper", "rounds=2 min_rounds=1")
    line = history(tmp_path)[-1]
    assert line["groups"][0] == 4
    assert line["fit_error"] >= 0
    assert set(line["residual_ratio"]) == {"level.1", "level.2", "level.3"}
    for level in line["relation"].values():
        assert 0 < level["mean_largest_weight"] <= level["largest_weight"] <= 1
        assert 0 <= level["concentration"] <= 1


@pytest.mark.parametrize("levels", [1, 2, 3, 4, 5])
def test_one_to_five_levels(levels, tmp_path):
    branching = [2] * levels
    run(
        tmp_path,
        "fedhur-paper",
        f"rounds=1 min_rounds=1 hierarchy.branching={branching} residual.beta={[1.0] * levels}".replace(", ", ","),
    )
    assert len(history(tmp_path)[0]["groups"]) == levels


@pytest.mark.parametrize("kind", ["similarity", "complementarity", "both", "utility"])
@pytest.mark.parametrize("form", ["flat", "hierarchical"])
def test_every_relation_flat_and_hierarchical(kind, form, tmp_path):
    flat = "hierarchy.flat=true hierarchy.flat_groups=8 residual.beta=[1]" if form == "flat" else ""
    run(tmp_path, "fedhur-paper", f"rounds=1 min_rounds=1 relation.kind={kind} {flat}")
    assert ("query.utility" in history(tmp_path)[0]["stages"]) == (kind == "utility")


@pytest.mark.parametrize("query", ["symmetric", "local", "right", "left"])
@pytest.mark.parametrize("features", ["all", "total", "no-total", "no-scale", "no-direction", "direction"])
def test_every_query_form_and_feature_set(query, features, tmp_path):
    run(tmp_path, "fedhur-paper", f"rounds=1 min_rounds=1 relation.query={query} score.features={features}")


@pytest.mark.parametrize("solver", ["exact", "gd", "reference"])
def test_every_solver(solver, tmp_path):
    run(tmp_path, "fedhur-paper", f"rounds=2 min_rounds=1 align.solver={solver} align.steps=20")
    assert history(tmp_path)[-1]["fit_error"] < 1


def test_noise_is_symmetric_finite_laplace():
    noise = laplace_noise(400, 0.5, torch.Generator().manual_seed(0))
    assert torch.equal(noise, noise.T)
    upper = noise[tuple(torch.triu_indices(400, 400))]
    below = noise[tuple(torch.triu_indices(400, 400, 1))]
    for values in (upper, below):
        assert bool(torch.isfinite(values).all())
        assert kstest(values.numpy(), laplace(scale=0.5).cdf).pvalue > 0.01


def test_the_smallest_draw_gives_finite_noise(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.zeros(*shape, dtype=torch.float64))
    assert bool(torch.isfinite(laplace_noise(3, 1.0, torch.Generator())).all())


def test_concentration_does_not_depend_on_how_many_peers_are_kept(tmp_path):
    many = "dataset.clients.number=40 relation.match=cosine relation.client_scale=unit relation.filter_scale=spectral"
    for name, peers in (("all", "null"), ("two", "2")):
        run(tmp_path / name, "fedhur", f"rounds=1 min_rounds=1 residual.peers={peers} {many}")
    first, second = (history(tmp_path / name)[0]["relation"]["level.1"]["concentration"] for name in ("all", "two"))
    assert first == second < 1.0


def test_noise_on_the_gram_is_an_option_of_fedcia(tmp_path):
    for name, scale in (("none", "0.0"), ("some", "0.5")):
        run(tmp_path / name, "fedcia", f"rounds=2 min_rounds=1 privacy.laplace_scale={scale}")
    assert history(tmp_path / "none")[-1]["validation"] != history(tmp_path / "some")[-1]["validation"]


def test_grams_of_blocks_are_what_the_levels_say():
    """Guards the helper above: a block's Gram is that of its groups' means."""
    round_ = Round("")
    uploads = {k: Content({"examples": 1}, client.upload()) for k, client in enumerate(round_.clients)}
    round_.server.aggregate_items(1, uploads)
    level = round_.server.hierarchy.levels[1]
    means = group_means(round_.tables, round_.server.hierarchy)[1]
    gram = block_gram(blocks_of(means, level))
    a, b = level.members[0][:2]
    torch.testing.assert_close(gram[:, 0, 0, 1], (means[:, a] * means[:, b]).sum(dim=-1))
