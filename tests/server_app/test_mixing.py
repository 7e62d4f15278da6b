"""The mixing strategies: weights against closed forms and scipy, and what travels where."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import minimize
from sklearn.decomposition import PCA

from client_app.algorithms.fedca import principal_directions
from client_app.state import ClientState
from fedhur_app import runtime
from fedhur_app.config import load_settings
from fedhur_app.protocol import Content, decode
from server_app.strategies import mixing
from server_app.strategies.base import Fleet
from server_app.strategies.cofedrec import elbow, group_of, item_clusters
from server_app.strategies.fedavg import Server as FedAvg
from server_app.strategies.fedca import (
    composite_weights,
    data_complementarity,
    simplex_projection,
    table_similarity,
)
from server_app.strategies.gpfedrec import neighbour_weights
from server_app.strategies.mixing import Mixtures, mix, weighted_mean
from tests.running import run
from tests.tensors import LargestTensor


def settings(strategy, overrides=""):
    return load_settings("synthetic", strategy, overrides=overrides)


# --- means ----------------------------------------------------------------------------------------------------------


def test_mix_and_weighted_mean_are_the_same_sums():
    generator = torch.Generator().manual_seed(1)
    uploads = [
        {"items": torch.randn(5, 3, generator=generator), "b": torch.randn(4, generator=generator)} for _ in "abc"
    ]
    weights = torch.rand(3, 3, generator=generator, dtype=torch.float64)
    for row, mixed in zip(weights, mix(weights, uploads), strict=True):
        for name in ("items", "b"):
            naive = sum(w * tables[name].double() for w, tables in zip(row, uploads, strict=True)) / row.sum()
            torch.testing.assert_close(mixed[name].double(), naive, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(weighted_mean(row, uploads)[name].double(), naive, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mixed_bytes", [1, 2 * (15 + 4) * 4, 2**20])
@pytest.mark.parametrize("chunk_bytes", [1, 4 * 5 * 6, 2**20])
def test_mixtures_made_in_parts_are_those_of_mix(mixed_bytes, chunk_bytes, monkeypatch):
    generator = torch.Generator().manual_seed(2)
    uploads = {
        client: {"items": torch.randn(5, 3, generator=generator), "b": torch.randn(4, generator=generator)}
        for client in (3, 4, 7, 8, 20)
    }
    weights = torch.rand(5, 5, generator=generator, dtype=torch.float64)
    expected = dict(zip(uploads, mix(weights, list(uploads.values())), strict=True))
    monkeypatch.setattr(mixing, "_MIXED_BYTES", mixed_bytes)
    monkeypatch.setattr(mixing, "_CHUNK_BYTES", chunk_bytes)
    mixtures = Mixtures(weights, uploads)
    assert list(mixtures) == list(uploads)
    for client in (3, 4, 7, 8, 20, 3, 8):
        for name, tensor in expected[client].items():
            torch.testing.assert_close(mixtures[client][name], tensor)
    for name, tensor in mixtures.mean().items():
        torch.testing.assert_close(tensor, torch.stack([tables[name] for tables in expected.values()]).mean(dim=0))
    with pytest.raises(KeyError):
        mixtures[5]


def test_mixing_holds_no_second_array_of_all_tables(monkeypatch):
    monkeypatch.setattr(mixing, "_MIXED_BYTES", 2**14)
    monkeypatch.setattr(mixing, "_CHUNK_BYTES", 2**14)
    generator = torch.Generator().manual_seed(3)
    uploads = {client: {"items": torch.randn(200, 4, generator=generator)} for client in range(60)}
    tables = [upload["items"] for upload in uploads.values()]
    with LargestTensor() as largest:
        weights = neighbour_weights(tables, gpfedrec())
        mixtures = Mixtures(weights, uploads)
        for client in mixtures:
            assert mixtures[client]["items"].shape == (200, 4)
        mixtures.mean()
        table_similarity(tables, "aligned")
    # K tables are 192 kB; K^2 or K I numbers in float64 are what there is of all clients.
    assert largest.bytes <= max(8 * 60 * 200, 2**14)


def test_row_masked_average_by_hand():
    """Row 0: only client 0 trained it. Row 1: twice and six times. Row 2: nobody, it stays."""
    server = FedAvg(settings("fedncf", "fedavg.row_masked=true"), Fleet({0: 0, 1: 1}, 3, {0: 1, 1: 1}))

    def reply(examples, value, counts):
        table = {"items": torch.full((3, 2), value), "mlp.0.weight": torch.full((2, 2), value)}
        counted = {"items": torch.tensor(counts, dtype=torch.int32)}
        return Content({"examples": examples}, {"table": table, "counts": counted})

    server.table = {"items": torch.full((3, 2), 9.0), "mlp.0.weight": torch.zeros(2, 2)}
    server.aggregate_items(1, {0: reply(1, 1.0, [4, 2, 0]), 1: reply(3, 5.0, [0, 6, 0])})
    assert server.table["items"].tolist() == [[1.0, 1.0], [4.0, 4.0], [9.0, 9.0]]
    assert server.table["mlp.0.weight"].tolist() == [[4.0, 4.0], [4.0, 4.0]]  # by examples: (1 + 3 * 5) / 4


# --- FedCA ----------------------------------------------------------------------------------------------------------


@given(arrays(np.float64, st.integers(1, 6), elements=st.floats(-3, 3)))
def test_simplex_projection_solves_the_quadratic_programme_of_fedca(point):
    """Minimise ||x||^2 + q.x over the simplex with q = -2 point, as the published code gives it to a solver."""
    x = simplex_projection(torch.tensor(point)).numpy()
    assert x.min() >= 0
    assert x.sum() == pytest.approx(1, abs=1e-9)
    assert simplex_projection(torch.tensor(point) + 1e6).numpy() == pytest.approx(x, abs=1e-8)
    start = np.full(len(point), 1 / len(point))
    solved = minimize(
        lambda v: v @ v - 2 * point @ v,
        start,
        jac=lambda v: 2 * v - 2 * point,
        bounds=[(0, None)] * len(point),
        constraints={"type": "eq", "fun": lambda v: v.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-14},
    )
    np.testing.assert_allclose(x, solved.x, atol=1e-5)


def test_simplex_projection_works_row_by_row():
    rows = torch.tensor([[0.2, 0.3, 0.5], [2.0, 0.0, 0.0], [1.0, 1.0, -5.0]], dtype=torch.float64)
    expected = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(simplex_projection(rows), expected)


def test_alpha_weighs_similarity_and_swapped_exchanges_the_two():
    shares = torch.tensor([0.5, 0.5], dtype=torch.float64)
    similarity = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    none = torch.zeros(2, 2, dtype=torch.float64)
    plain = settings("fedca", "fedca.alpha=0.4 fedca.beta=0.0").fedca
    swapped = settings("fedca", "fedca.alpha=0.4 fedca.beta=0.0 fedca.swapped=true").fedca
    assert composite_weights(shares, similarity, none, plain).flatten().tolist() == pytest.approx([0.7, 0.3, 0.3, 0.7])
    assert composite_weights(shares, similarity, none, swapped).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert composite_weights(shares, none, similarity, swapped).flatten().tolist() == pytest.approx(
        [0.7, 0.3, 0.3, 0.7]
    )


def test_similarity_of_tables_does_not_depend_on_the_sign_of_their_components():
    table = torch.randn(20, 4, generator=torch.Generator().manual_seed(2))
    other = torch.randn(20, 4, generator=torch.Generator().manual_seed(3))
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(4)))[0]
    tables = torch.stack([table, -table, table @ rotation, other])
    aligned = table_similarity(tables, "aligned")
    # Distances of equal scores are square roots of rounding errors.
    torch.testing.assert_close(aligned[:3, :3], torch.ones(3, 3, dtype=torch.float64), rtol=0, atol=1e-5)
    scores = PCA(1).fit_transform(table)[:, 0], PCA(1).fit_transform(other)[:, 0]
    distance = min(np.linalg.norm(scores[0] - scores[1]), np.linalg.norm(scores[0] + scores[1]))
    assert float(aligned[0, 3]) == pytest.approx(1 / (1 + distance), rel=1e-4)


def test_complementarity_of_subspaces_by_hand():
    axes = torch.eye(4, dtype=torch.float64)
    same, apart, half = axes[:2], axes[2:], axes[[0, 2]]
    empty = torch.zeros(2, 4, dtype=torch.float64)
    bases = torch.stack([same, apart, half, empty])
    outside = data_complementarity(bases, "outside")
    assert outside[0].tolist() == pytest.approx([0.0, 1.0, 0.5, 0.0])
    assert outside[3].tolist() == pytest.approx([1.0, 1.0, 1.0, 0.0])
    # Principal angles of the pair (same, half): 0 and 90 degrees; their mean has cosine cos 45.
    for form in ("aligned", "repo"):
        assert data_complementarity(bases, form)[0, :3].tolist() == pytest.approx([1.0, 0.0, 2**-0.5], abs=1e-7)


def test_greedy_matching_differs_from_principal_angles_where_signs_and_rotations_matter():
    first = torch.eye(3, dtype=torch.float64)[:2]
    turned = torch.tensor([[1.0, 1.0, 0.0], [-1.0, 1.0, 0.0]], dtype=torch.float64) / 2**0.5  # the same plane
    bases = torch.stack([first, turned])
    assert float(data_complementarity(bases, "aligned")[0, 1]) == pytest.approx(1.0, abs=1e-7)
    # Greedy: cosines (0.707, 0.707; -0.707, 0.707) give 45 and 45 degrees whichever pair comes first.
    assert float(data_complementarity(bases, "repo")[0, 1]) == pytest.approx(2**-0.5, abs=1e-7)


def test_principal_directions_are_those_of_scikit_learn_and_zero_where_there_are_none():
    rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(5))
    ours, theirs = principal_directions(rows, 3).numpy(), PCA(3).fit(rows.numpy()).components_
    np.testing.assert_allclose(np.abs((ours * theirs).sum(axis=1)), 1, atol=1e-5)
    two = principal_directions(rows[:2], 3)
    assert two.norm(dim=1).tolist() == pytest.approx([1, 0, 0], abs=1e-6)
    assert not principal_directions(rows[:1], 3).any()
    assert not principal_directions(rows[:0], 3).any()


@pytest.mark.parametrize("form", ["outside", "aligned", "repo"])
def test_complementarity_of_some_targets_at_a_time(form, monkeypatch):
    bases = torch.linalg.qr(torch.randn(5, 6, 3, generator=torch.Generator().manual_seed(8)).double())[
        0
    ].mT.contiguous()
    bases[1, 2], bases[4] = 0, 0
    whole = data_complementarity(bases, form)
    monkeypatch.setattr("server_app.strategies.fedca._PAIR_BYTES", 2 * 8 * 5 * 9)
    torch.testing.assert_close(data_complementarity(bases, form), whole)


# --- GPFedRec -------------------------------------------------------------------------------------------------------


def gpfedrec(overrides=""):
    return settings("gpfedrec", f"gpfedrec.neighbours=null {overrides}").gpfedrec


TABLES = torch.tensor([[[1.0, 0.0]], [[0.9, 0.1]], [[0.0, 1.0]]])


def test_neighbours_above_the_mean_similarity_get_equal_weights():
    weights = neighbour_weights(TABLES, gpfedrec("gpfedrec.centre=false"))
    assert weights.tolist() == [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]


def test_the_published_metric_links_the_clients_that_differ_most():
    weights = neighbour_weights(TABLES, gpfedrec("gpfedrec.centre=false gpfedrec.metric=repo"))
    assert weights.tolist() == [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.5, 0.5, 0.0]]


def test_a_client_without_neighbours_is_its_own():
    weights = neighbour_weights(TABLES, gpfedrec("gpfedrec.centre=false gpfedrec.threshold=10"))
    assert weights.tolist() == torch.eye(3).tolist()


def test_a_number_of_neighbours_and_two_hops():
    settings_ = gpfedrec("gpfedrec.centre=false gpfedrec.neighbours=2 gpfedrec.hops=2")
    weights = neighbour_weights(TABLES, settings_)
    once = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]).double()
    torch.testing.assert_close(weights, once @ once)


def test_centring_tells_apart_tables_that_share_a_large_mean():
    near = TABLES + 100.0
    assert neighbour_weights(near, gpfedrec())[2].tolist() == [0.0, 0.0, 1.0]
    assert neighbour_weights(near, gpfedrec())[0].tolist() == [0.5, 0.5, 0.0]


# --- CoFedRec -------------------------------------------------------------------------------------------------------


def test_elbow_is_the_point_farthest_from_the_chord():
    assert elbow(np.array([10.0, 9.9, 9.8, 2.0, 1.0, 0.0])) == 2
    assert elbow(np.array([10.0, 1.0, 0.5, 0.0])) == 1
    assert elbow(np.array([3.0])) == 0


def test_the_group_of_a_client_holds_those_like_it_and_itself():
    generator = torch.Generator().manual_seed(6)
    taste = torch.randn(2, 5, 3, generator=generator)
    rows = torch.cat([taste[:1] + 0.01 * torch.randn(4, 5, 3, generator=generator), taste[1:].expand(2, -1, -1)])
    assert group_of(rows, 1).tolist() == [0, 1, 2, 3]
    # Two alike and four others: the point farthest from the chord, which belongs to the group, is the third.
    assert {4, 5} < set(group_of(rows, 4).tolist())
    assert len(group_of(rows, 4)) == 3


def test_item_clusters_are_seeded_and_never_more_than_distinct_rows():
    table = torch.cat([torch.zeros(4, 2), torch.ones(3, 2)])
    labels = item_clusters(table, 5, seed=1)
    assert len(set(labels[:4].tolist())) == len(set(labels[4:].tolist())) == 1
    assert labels[0] != labels[4]
    assert torch.equal(labels, item_clusters(table, 5, seed=1))


# --- few clients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fedca", "gpfedrec", "cofedrec", "pfedrec", "fedrap", "fedavg"])
def test_one_client_alone(strategy, tmp_path):
    run(tmp_path, strategy, "rounds=2 min_rounds=1 dataset.clients.number=1 fedca.keep=0.0")


def test_a_lone_participant_of_fedca_keeps_its_own_table(traffic, tmp_path):
    """One upload makes one mixture, which is for its owner and nobody else."""
    run(tmp_path, "fedca", "rounds=5 min_rounds=5 fraction_train=0.1 fedca.keep=0.0")
    for (_, kind, _), (request, _, _) in traffic.items():
        assert kind != "train.items" or "table" not in request.arrays
    for (group, kind, client), (_, _, state) in traffic.items():
        if kind == "train.personalize":
            trained = traffic[group, "train.items", client][1].record("table")["items"]
            assert torch.equal(state["model"]["items"], trained)


# --- what travels ---------------------------------------------------------------------------------------------------


@pytest.fixture
def traffic(monkeypatch):
    """(round, stage, client) -> (decoded request, decoded reply, the client's state after it)."""
    seen = {}
    answer = runtime.LocalGrid._answer

    def spy(grid, message, context, fault):
        reply = answer(grid, message, context, fault)
        group, kind = message.metadata.group_id, message.metadata.message_type
        client = int(context.node_config["partition-id"])
        state = ClientState.from_context(context)
        seen[group, kind, client] = decode(message.content), decode(reply.content), state.arrays
        return reply

    monkeypatch.setattr(runtime.LocalGrid, "_answer", spy)
    return seen


CLIENTS = range(6)


def test_pfedrec_starts_from_the_plain_mean_and_ranks_with_what_it_trained(traffic, tmp_path):
    run(tmp_path, "pfedrec", "rounds=2 min_rounds=1")
    uploads = [traffic["round-1", "train.items", k][1].record("table")["items"] for k in CLIENTS]
    mean = torch.stack(uploads).double().mean(dim=0).float()
    for k in CLIENTS:
        request, reply, state = traffic["round-2", "train.items", k]
        torch.testing.assert_close(request.record("table")["items"], mean)
        assert torch.equal(state["model"]["items"], reply.record("table")["items"])
        assert not torch.equal(state["model"]["items"], request.record("table")["items"])
        assert set(reply.record("table")) == {"items"}


def test_gpfedrec_starts_from_the_common_table_and_keeps_its_guide(traffic, tmp_path):
    run(tmp_path, "gpfedrec", "rounds=2 min_rounds=1")
    answers = [traffic["round-1", "train.personalize", k] for k in CLIENTS]
    guides = torch.stack([request.record("guide")["items"] for request, _, _ in answers])
    common = answers[0][0].record("table")["items"]
    torch.testing.assert_close(common, guides.mean(dim=0))
    for k, (_, _, state) in zip(CLIENTS, answers, strict=True):
        trained = traffic["round-1", "train.items", k][1].record("table")["items"]
        assert torch.equal(state["model"]["items"], trained), "users are ranked with the trained table"
        assert torch.equal(state["start"]["items"], common)
        assert torch.equal(state["guide"]["items"], guides[k])
        assert "start" not in traffic["round-2", "train.items", k][2]


def test_a_large_regularisation_holds_gpfedrec_at_its_guide(traffic, tmp_path):
    """SGD with a step of half the curvature's inverse: the table lands on the guide whatever the data say."""
    size = 80 * 8
    run(
        tmp_path,
        "gpfedrec",
        f"rounds=2 min_rounds=1 model.kind=mf train.optimizer=sgd train.epochs=1 train.lr=1e-6 "
        f"gpfedrec.regularisation={size / 2 / 1e-6}",
    )
    for k in CLIENTS:
        guide = traffic["round-1", "train.personalize", k][0].record("guide")["items"]
        trained = traffic["round-2", "train.items", k][1].record("table")["items"]
        torch.testing.assert_close(trained, guide, atol=1e-5, rtol=1e-5)


def test_fedca_moves_by_its_share_towards_the_mixture(traffic, tmp_path):
    run(tmp_path, "fedca", "rounds=1 min_rounds=1 fedca.keep=0.25")
    for k in CLIENTS:
        trained = traffic["round-1", "train.items", k][1].record("table")["items"]
        request, _, state = traffic["round-1", "train.personalize", k]
        mixture = request.record("table")["items"]
        torch.testing.assert_close(state["model"]["items"], 0.25 * trained + 0.75 * mixture)


def test_cofedrec_gives_a_table_to_the_group_only_and_clusters_to_all(traffic, tmp_path):
    run(tmp_path, "cofedrec", "rounds=1 min_rounds=1")
    members = [k for k in CLIENTS if "table" in traffic["round-1", "train.personalize", k][0].arrays]
    assert 1 <= len(members) <= 6
    trained = {k: traffic["round-1", "train.items", k][1].record("table")["items"] for k in CLIENTS}
    mean = torch.stack([trained[k] for k in members]).double().mean(dim=0).float()
    for k in CLIENTS:
        request, _, state = traffic["round-1", "train.personalize", k]
        assert request.record("labels")["items"].shape == (80,)
        torch.testing.assert_close(state["model"]["items"], mean if k in members else trained[k])


def test_fedrap_shares_one_of_its_two_tables(traffic, tmp_path):
    run(tmp_path, "fedrap", "rounds=1 min_rounds=1")
    for k in CLIENTS:
        reply, state = traffic["round-1", "train.items", k][1], traffic["round-1", "train.personalize", k][2]
        assert set(reply.record("table")) == {"items"}
        assert {"items", "private_items", "users", "user_bias"} == set(state["model"])
        assert torch.equal(
            state["model"]["items"], traffic["round-1", "train.personalize", k][0].record("table")["items"]
        )


def test_fedncf_shares_item_tables_and_the_network(traffic, tmp_path):
    run(tmp_path, "fedncf", "rounds=1 min_rounds=1 fedavg.row_masked=true")
    reply = traffic["round-1", "train.items", 0][1]
    network = {"mlp.0.weight", "mlp.0.bias", "mlp.1.weight", "mlp.1.bias", "mlp.2.weight", "mlp.2.bias"}
    assert set(reply.record("table")) == {"items", "items_mlp", "output.weight", "output.bias"} | network
    # Every interaction is trained on with 4 negatives, in 2 epochs.
    assert int(reply.record("counts")["items"].sum()) == reply.fields["examples"] * 4 * 2 * 2
