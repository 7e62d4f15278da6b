import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhur_app.config import load_settings
from fedhur_app.data.errors import DataError
from fedhur_app.data.experiment import load_interactions_of, number_of_clients, prepare_data
from fedhur_app.data.markets import generate
from fedhur_app.data.partition import market_numbers
from fedhur_app.data.shards import UserItems, load_shard, shard_path
from fedhur_app.evaluation.ranking import rank_users
from fedhur_app.models.item_filters import ease_weights, item_counts, sum_item_rows


def counts_of_items(data):
    """How often each item was picked in each market, (markets, items)."""
    market = market_numbers(data)
    counts = np.zeros((market.max() + 1, data.n_items), dtype=int)
    np.add.at(counts, (market[data.users], data.items), 1)
    return counts


@st.composite
def arguments(draw):
    markets = draw(st.integers(1, 4))
    several = st.lists(st.integers(1, 12), min_size=markets, max_size=markets)
    return {
        "users": draw(several),
        "interactions_per_user": draw(several),
        "items": draw(st.integers(markets, 30)),
        "dim": draw(st.integers(1, 4)),
        "shift": draw(st.floats(0, 1)),
        "own_items": draw(st.floats(0, 1)),
        "popularity_skew": draw(st.floats(0, 3)),
        "sharpness": draw(st.floats(0, 50)),
        "activity_spread": draw(st.floats(0, 1)),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@settings(max_examples=60, deadline=None)
@given(arguments())
def test_every_market_has_its_users_and_sells_what_it_may(given):
    data = generate(**given)
    markets, items = len(given["users"]), given["items"]
    assert (data.n_users, data.n_items) == (sum(given["users"]), items)
    assert data.user_markets.tolist() == [str(m) for m in range(markets) for _ in range(given["users"][m])]
    assert data.user_ids.tolist() == [str(user) for user in range(data.n_users)]
    assert (np.diff(data.timestamps) >= 0).all()
    picks = np.bincount(data.users, minlength=data.n_users)
    assert picks.min() >= 1
    # Of the items that one market alone sells, each of the other markets has none.
    own = round(given["own_items"] * items)
    sold = [items - own + len(range(market, own, markets)) for market in range(markets)]
    assert (picks <= np.array(sold)[market_numbers(data)]).all()
    several_sell = (counts_of_items(data) > 0).sum(axis=0) > 1
    assert several_sell.sum() <= items - own
    assert data.notes == ()  # nobody picks an item twice
    assert all(len(genres) == 1 and 1 <= int(genres[0][:-1]) <= given["dim"] for genres in data.item_genres)
    assert generate(**given).fingerprint() == data.fingerprint()


def test_without_spread_every_user_has_the_mean_or_all_that_is_sold():
    data = generate((5, 4), (3, 9), items=8, own_items=0.5, activity_spread=0)
    # Four items are sold everywhere, two in each market alone.
    assert np.bincount(data.users).tolist() == [3] * 5 + [6] * 4
    assert (counts_of_items(data)[1] > 0).sum() == 6


def test_own_items_are_all_there_is_without_common_ones():
    counts = counts_of_items(generate((60, 60, 60), (10, 10, 10), items=30, own_items=1.0))
    assert ((counts > 0).sum(axis=0) == 1).all()
    assert ((counts > 0).sum(axis=1) == 10).all()


@pytest.mark.parametrize(("shift", "low", "high"), [(0.0, 0.9, 1.0), (0.7, 0.3, 0.7), (1.0, -0.2, 0.2)])
def test_popularity_agrees_between_markets_as_far_as_they_are_alike(shift, low, high):
    # log counts by popularity alone correlate with 1 - shift^2, less the noise of counting.
    data = generate((1500, 1500), (20, 20), items=300, shift=shift, popularity_skew=1.0, sharpness=0.0, seed=3)
    one, two = np.log(counts_of_items(data) + 1)
    assert low <= np.corrcoef(one, two)[0, 1] <= high


@pytest.mark.parametrize(("shift", "low", "high"), [(0.0, 0.8, 1.0), (1.0, -0.1, 0.1)])
def test_items_go_together_in_all_markets_as_far_as_these_are_alike(shift, low, high):
    data = generate((2500, 2500), (12, 12), items=40, shift=shift, popularity_skew=0.0, sharpness=3.0, seed=3)
    market, together = market_numbers(data), []
    for m in range(2):
        rows = np.zeros((data.n_users, data.n_items))
        rows[data.users, data.items] = 1
        together.append(np.corrcoef(rows[market == m].T)[np.triu_indices(data.n_items, 1)])
    assert low <= np.corrcoef(*together)[0, 1] <= high


def test_genres_say_what_the_markets_have_in_common():
    data = generate((1000, 1000), (12, 12), items=60, dim=3, shift=0.0, popularity_skew=0.0, sharpness=4.0, seed=1)
    genre = np.unique([genres[0] for genres in data.item_genres], return_inverse=True)[1]
    rows = np.zeros((data.n_users, data.n_items))
    rows[data.users, data.items] = 1
    alike = np.corrcoef(rows.T)
    same = (genre[:, None] == genre) & ~np.eye(60, dtype=bool)
    assert alike[same].mean() > alike[genre[:, None] != genre].mean() + 0.1


def test_single_picks_follow_the_stated_probabilities():
    # By popularity alone: log shares are popularity_skew times standard normal numbers, up to a constant.
    data = generate((60_000,), (1,), items=6, popularity_skew=0.5, sharpness=0.0, activity_spread=0, seed=4)
    double = generate((60_000,), (1,), items=6, popularity_skew=1.0, sharpness=0.0, activity_spread=0, seed=4)
    once, twice = (np.log(np.bincount(d.items, minlength=6)) for d in (data, double))
    # Twice the skew is twice the distance of all log shares.
    assert twice - twice[0] == pytest.approx(2 * (once - once[0]), abs=0.12)


def test_times_follow_the_order_of_the_picks():
    # Who picks more picks the same item first.
    one, three = (generate((500,), (n,), items=6, activity_spread=0, seed=2) for n in (1, 3))
    first_row = np.unique(three.users, return_index=True)[1]
    assert three.items[first_row].tolist() == one.items[np.argsort(one.users)].tolist()


def test_the_defaults_of_generator_and_settings_are_the_same():
    generated = generate(seed=7)
    assert load_interactions_of(load_settings("markets-synthetic", "local", 7)).fingerprint() == generated.fingerprint()


def rows_of(data, market):
    numbers = market_numbers(data)
    rows = numbers[data.users] == market
    return sorted(zip(data.user_ids[data.users[rows]].tolist(), data.items[rows].tolist(), strict=True))


def test_a_market_stays_the_same_when_another_one_changes():
    one, two = generate((50, 20), (9, 4), 60), generate((50, 7, 5), (9, 30, 2), 60)
    assert rows_of(one, 0) == rows_of(two, 0)
    assert generate((50, 20), (9, 4), 60, seed=2).fingerprint() != one.fingerprint()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"users": ()}, "one number a market each, not 0 and 2"),
        ({"users": (5,)}, "one number a market each, not 1 and 2"),
        ({"users": (5, 0)}, "at least 1"),
        ({"interactions_per_user": (0, 5)}, "at least 1"),
        ({"items": 0}, "at least 1"),
        ({"dim": 0}, "at least 1"),
        ({"shift": 1.1}, r"shift and own_items must be 0\.\.1"),
        ({"own_items": -0.1}, r"shift and own_items must be 0\.\.1"),
        ({"sharpness": -1.0}, "must be >= 0"),
        ({"items": 1, "own_items": 1.0}, "1 items are too few, a market would sell nothing"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, message):
    with pytest.raises(DataError, match=message):
        generate(**arguments)


def test_settings_reach_the_generator():
    overrides = "dataset.markets.users=[9,5,4] dataset.markets.interactions_per_user=[4,3,2] dataset.markets.items=30"
    settings = load_settings("markets-synthetic", "local", 3, overrides)
    assert number_of_clients(settings) == 3
    data = load_interactions_of(settings)
    assert data.fingerprint() == generate((9, 5, 4), (4, 3, 2), 30, seed=3).fingerprint()
    prepared = prepare_data(settings)
    assert (prepared.clients, prepared.markets, prepared.n_users) == (3, ("0", "1", "2"), 18)
    central = load_settings("markets-synthetic", "popularity", 3, overrides)
    assert number_of_clients(central) == 1
    assert load_shard(shard_path(prepare_data(central).folder, 0)).markets.tolist() == [0] * 9 + [1] * 5 + [2] * 4


def test_one_client_a_market_needs_markets():
    with pytest.raises(DataError, match="synthetic has no markets"):
        number_of_clients(load_settings("synthetic", "local", overrides="dataset.clients.kind=market"))


def users_of(part, users):
    return UserItems(np.cumsum([0, *part.counts[users]]), np.concatenate([part.of(user) for user in users]))


def ndcg(shard, market, model, learn_from):
    """Mean test NDCG@10 of a market's users, with EASE or popularity learnt from the users of some markets."""
    users = np.flatnonzero(shard.markets == market)
    train, valid, test = (users_of(part, users) for part in (shard.train, shard.valid, shard.test))
    learnt = users_of(shard.train, np.flatnonzero(np.isin(shard.markets, learn_from)))
    if model == "popularity":
        counts = item_counts(learnt, shard.n_items)
        ranks = rank_users(lambda u: counts.expand(len(u), -1), [train, valid], test, n_items=shard.n_items)
    else:
        weights = ease_weights(learnt, shard.n_items, 200.0)
        ranks = rank_users(lambda u: sum_item_rows(train, u, weights), [train, valid], test, n_items=shard.n_items)
    return ranks.sums().means()["ndcg@10"]


def test_the_default_markets_reward_taste_and_help_from_like_markets():
    def shard(shift):
        settings = load_settings("markets-synthetic", "ease", 1, f"dataset.markets.shift={shift}")
        return load_shard(shard_path(prepare_data(settings).folder, 0))

    default = shard(0.5)
    rich, sparse = (ndcg(default, market, "ease", [market]) for market in (0, 1))
    assert rich > 4 * ndcg(default, 0, "popularity", [0])
    assert rich > 2 * sparse  # few users with few interactions
    # Help from the rich market: much where it is alike, none where it has nothing in common.
    alike, unlike = shard(0.0), shard(1.0)
    assert ndcg(alike, 1, "ease", [0, 1]) > 1.5 * ndcg(alike, 1, "ease", [1])
    assert ndcg(unlike, 1, "ease", [0]) < 0.5 * ndcg(unlike, 1, "ease", [1])
