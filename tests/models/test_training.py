from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedhur_app.data.shards import UserItems
from fedhur_app.models.mf import MatrixFactorization
from fedhur_app.models.negatives import NegativeSampler
from fedhur_app.models.training import DivergedError, TrainingOptions, train_locally
from tests.models.helpers import generator, user_items
from tests.models.test_mf import autograd_loss

N_ITEMS = 15
ROWS = [{0, 1, 2, 3}, {2, 5, 8}, set(), {4, 14}, {1, 3, 5, 7, 9, 11, 13}]
OPTIONS = TrainingOptions(epochs=3, batch_size=5, optimizer="adam", lr=0.05, weight_decay=1e-3)


class Recorder(MatrixFactorization):
    """A model that remembers its batches."""

    def __init__(self, *args):
        super().__init__(*args)
        self.batches = []

    def loss_and_gradients(self, users, positives, negatives):
        self.batches.append((users, positives, negatives))
        return super().loss_and_gradients(users, positives, negatives)


def new_model(rows=ROWS, loss="bpr", std=0.5, dtype=torch.float32, cls=MatrixFactorization):
    g = generator(7)
    return cls(
        torch.randn(len(rows), 4, generator=g, dtype=dtype) * std,
        torch.randn(N_ITEMS, 4, generator=g, dtype=dtype) * std,
        loss,
    )


def train(model, options=OPTIONS, rows=ROWS, g=None, **kwargs):
    items = user_items(rows)
    return train_locally(model, items, NegativeSampler(items, N_ITEMS), options, g or generator(), **kwargs)


def copies(model):
    return {name: table.clone() for name, table in model.parameters().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("loss", ["bpr", "bce", "mse", "elementwise"])
def test_steps_equal_torch_optimisers_on_autograd_gradients(loss, optimizer):
    model = new_model(loss=loss, dtype=torch.float64, cls=Recorder)
    p, e = model.users.clone().requires_grad_(), model.items.clone().requires_grad_()
    report = train(model, replace(OPTIONS, optimizer=optimizer))

    cls = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
    reference = cls([p, e], lr=OPTIONS.lr, weight_decay=OPTIONS.weight_decay)
    losses = []
    for users, positives, negatives in model.batches:
        reference.zero_grad()
        value = autograd_loss(loss, p[users], e[positives], e[negatives])
        value.backward()
        reference.step()
        losses.append((value.item(), len(users)))
    torch.testing.assert_close(model.users, p.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(model.items, e.detach(), rtol=1e-9, atol=1e-12)

    per_epoch = len(losses) // 3
    means = [sum(v * n for v, n in losses[i : i + per_epoch]) / 16 for i in range(0, len(losses), per_epoch)]
    assert report.first_epoch_mean == pytest.approx(means[0])
    assert report.loss_mean == pytest.approx(means[-1])
    assert report.loss_sum == pytest.approx(16 * means[-1])
    assert report.examples == 16


def test_an_epoch_shows_every_interaction_with_fresh_negatives_in_a_new_order():
    model = new_model(cls=Recorder)
    train(model, replace(OPTIONS, epochs=2, negatives=3))
    assert [len(users) for users, _, _ in model.batches] == [5] * 9 + [3] + [5] * 9 + [3]
    users, positives, negatives = (torch.cat(column).tolist() for column in zip(*model.batches, strict=True))
    wanted = Counter({(u, i): 3 for u, row in enumerate(ROWS) for i in row})
    pairs = list(zip(users, positives, strict=True))
    assert Counter(pairs[:48]) == Counter(pairs[48:]) == wanted
    assert pairs[:48] != pairs[48:]
    assert all(j not in ROWS[u] for u, j in zip(users, negatives, strict=True))
    triples = list(zip(pairs, negatives, strict=True))
    assert Counter(triples[:48]) != Counter(triples[48:])


def test_same_generator_same_bits():
    a, b, c = new_model(), new_model(), new_model()
    first, again, other = train(a, g=generator(1)), train(b, g=generator(1)), train(c, g=generator(2))
    assert same(copies(a), copies(b))
    assert first.loss_mean == again.loss_mean
    assert same(first.optimizer_state, again.optimizer_state)
    assert first.loss_mean != other.loss_mean


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_restored_optimiser_state_equals_an_unbroken_run(optimizer):
    options = replace(OPTIONS, optimizer=optimizer)
    whole, broken = new_model(), new_model()
    unbroken = train(whole, replace(options, epochs=4))

    g, state = generator(), None
    for _ in range(4):
        before = None if state is None else {name: value.clone() for name, value in state.items()}
        report = train(broken, replace(options, epochs=1), g=g, optimizer_state=state)
        assert before is None or same(state, before)  # what was handed in is the caller's
        state = report.optimizer_state
    assert same(copies(whole), copies(broken))
    assert same(unbroken.optimizer_state, state)
    names = {f"adam/{table}/{entry}" for table in ("users", "items") for entry in ("step", "exp_avg", "exp_avg_sq")}
    assert state.keys() == (names if optimizer == "adam" else set())


def test_without_kept_state_every_call_starts_afresh():
    forgetful = replace(OPTIONS, keep_optimizer_state=False)
    state = train(new_model()).optimizer_state
    a, b = new_model(), new_model()
    assert train(a, forgetful, optimizer_state=state).optimizer_state == {}
    train(b)
    assert same(copies(a), copies(b))


@pytest.mark.parametrize("key", ["sgd/items/exp_avg", "adam/items/exp_avg"])
def test_an_optimiser_state_that_does_not_fit_is_refused(key):
    with pytest.raises(ValueError, match=key):
        train(new_model(), optimizer_state={key: torch.zeros(3, 4)})


def test_frozen_parameters_and_their_moments_stay():
    model = new_model()
    state = train(model).optimizer_state
    before = copies(model)
    report = train(model, frozen=frozenset({"items"}), optimizer_state=state)
    assert torch.equal(model.items, before["items"])
    assert not torch.equal(model.users, before["users"])
    for entry in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(report.optimizer_state[f"adam/items/{entry}"], state[f"adam/items/{entry}"])
        assert not torch.equal(report.optimizer_state[f"adam/users/{entry}"], state[f"adam/users/{entry}"])
    with pytest.raises(ValueError, match=r"cannot freeze \['item'\].*'items'"):
        train(model, frozen=frozenset({"item"}))


def test_extra_gradient_is_added_to_the_objective_and_not_to_the_loss():
    plain, pulled = new_model(cls=Recorder), new_model(cls=Recorder)
    options = TrainingOptions(epochs=1, batch_size=100, optimizer="sgd", lr=0.1)
    expected = train(plain, options)
    start, seen = new_model().items, []

    def towards_zero(parameters, items):
        seen.append(items)
        gradient = torch.zeros_like(parameters["items"])
        gradient[items] = 3 * parameters["items"][items]
        return 2.5, {"items": gradient}

    report = train(pulled, options, extra_gradient=towards_zero)
    _, positives, negatives = pulled.batches[0]
    assert [items.tolist() for items in seen] == [sorted({*positives.tolist(), *negatives.tolist()})]
    assert (report.loss_mean, report.extra_mean, expected.extra_mean) == (expected.loss_mean, 2.5, 0.0)
    assert torch.equal(pulled.users, plain.users)
    change = torch.zeros_like(start)
    change[seen[0]] = 0.1 * 3 * start[seen[0]]
    torch.testing.assert_close(pulled.items, plain.items - change)


@pytest.mark.parametrize("rows", [[set()], [set(range(N_ITEMS)), set()], []])
def test_a_client_without_a_trainable_interaction_changes_nothing(rows):
    model = new_model(rows)
    before, g = copies(model), generator(3)
    state = {"adam/items/step": torch.tensor(4.0)}
    report = train(model, rows=rows, g=g, optimizer_state=state)
    assert same(copies(model), before)
    assert (report.examples, report.loss_sum, report.loss_mean) == (0, 0.0, 0.0)
    assert report.skipped_users == sum(len(row) == N_ITEMS for row in rows)
    assert report.optimizer_state == state
    assert torch.equal(g.get_state(), generator(3).get_state())


def test_a_user_with_all_items_is_skipped_and_counted():
    rows = [{0, 1}, set(range(N_ITEMS)), {3}]
    model = new_model(rows)
    before = copies(model)
    report = train(model, TrainingOptions(optimizer="sgd", lr=0.1), rows)
    assert (report.examples, report.skipped_users) == (3, 1)
    assert torch.equal(model.users[1], before["users"][1])
    assert not torch.equal(model.users[0], before["users"][0])


@pytest.mark.parametrize("loss", ["bpr", "bce", "mse", "elementwise"])
def test_the_loss_falls(loss):
    report = train(new_model(loss=loss, std=0.1), replace(OPTIONS, epochs=60, weight_decay=0.0))
    assert report.loss_mean < 0.5 * report.first_epoch_mean


def test_divergence_is_an_error_that_names_step_size_and_loss():
    with pytest.raises(DivergedError, match=r"diverged: .*loss.*(nan|inf).*sgd and lr 1000; lower"):
        train(new_model(loss="mse"), replace(OPTIONS, optimizer="sgd", lr=1e3, epochs=50))


def test_a_table_that_is_not_finite_is_an_error_even_when_the_loss_is():
    def poison(parameters, items):
        return 0.0, {"items": torch.full_like(parameters["items"], torch.nan)}

    with pytest.raises(DivergedError, match=r"table 'items' is no longer finite \(last loss 0"):
        train(new_model(), replace(OPTIONS, epochs=1, batch_size=100), extra_gradient=poison)


def test_bpr_with_adam_survives_a_step_size_of_1e3():
    model = new_model(std=100.0)  # scores of 1e4
    report = train(model, TrainingOptions(epochs=5, batch_size=5, lr=1e3))
    assert np.isfinite(report.loss_mean)
    assert all(bool(table.isfinite().all()) for table in model.parameters().values())


@pytest.mark.parametrize(
    "wrong",
    [{"epochs": 0}, {"batch_size": 0}, {"negatives": 0}, {"lr": 0.0}, {"lr": float("nan")},
     {"weight_decay": -1.0}, {"optimizer": "adamw"}],
)  # fmt: skip
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainingOptions(**wrong)


# --- options of the baselines ----------------------------------------------------------------------------------------


def small_model(seed=3):
    generator = torch.Generator().manual_seed(seed)
    return MatrixFactorization.initialise(4, 9, 3, 0.5, generator, generator, loss="bce", user_bias=True)


SMALL_TRAIN = UserItems(np.array([0, 3, 5, 6, 8]), np.array([0, 2, 4, 1, 8, 3, 5, 7]))


def trained(model, alternate=False, **options):
    return train_locally(
        model,
        SMALL_TRAIN,
        NegativeSampler(SMALL_TRAIN, 9),
        TrainingOptions(**options),
        torch.Generator().manual_seed(5),
        alternate=alternate,
    )


def test_item_tables_learn_with_their_own_rate():
    """One step of SGD: the items move by the factor, the users do not care."""
    start, plain, scaled = small_model(), small_model(), small_model()
    trained(plain, optimizer="sgd", lr=0.01)
    trained(scaled, optimizer="sgd", lr=0.01, item_lr_factor=7.0)
    torch.testing.assert_close(scaled.items - start.items, 7 * (plain.items - start.items), rtol=1e-3, atol=1e-6)
    assert torch.equal(scaled.users, plain.users)
    assert torch.equal(scaled.bias, plain.bias)


def test_alternating_takes_the_gradient_of_the_items_at_the_new_users():
    start, both = small_model(), small_model()
    trained(both, alternate=True, optimizer="sgd", lr=0.5)
    generator = torch.Generator().manual_seed(5)
    users, positives = (torch.as_tensor(column) for column in SMALL_TRAIN.pairs())
    negatives = NegativeSampler(SMALL_TRAIN, 9).sample(users, generator)
    gradients = start.loss_and_gradients(users, positives, negatives)[1]
    start.users -= 0.5 * gradients["users"]
    start.bias -= 0.5 * gradients["user_bias"]
    start.items -= 0.5 * start.loss_and_gradients(users, positives, negatives)[1]["items"]
    for name, tensor in both.parameters().items():
        torch.testing.assert_close(tensor, start.parameters()[name])


def test_alternating_calls_the_extra_term_once_a_batch_and_keeps_all_moments():
    calls = []

    def extra(parameters, items):
        calls.append(len(items))
        return 0.0, {}

    model = small_model()
    options = TrainingOptions(lr=0.01, batch_size=3, epochs=2)
    report = train_locally(
        model,
        SMALL_TRAIN,
        NegativeSampler(SMALL_TRAIN, 9),
        options,
        torch.Generator().manual_seed(5),
        extra_gradient=extra,
        alternate=True,
    )
    assert len(calls) == 2 * 3  # 8 interactions in batches of 3
    assert {key.split("/")[1] for key in report.optimizer_state} == {"users", "user_bias", "items"}
    assert all(float(report.optimizer_state[f"adam/{name}/step"]) == 6 for name in ("users", "user_bias", "items"))


def test_epochs_end_when_the_loss_stands_still():
    counted = {}
    for tolerance in (0.0, 0.5):
        report = trained(small_model(), lr=1e-6, epochs=5, tolerance=tolerance)
        counted[tolerance] = int(report.item_counts.sum())
    # Positives and negatives of 8 interactions, in five epochs or in the two that a comparison takes.
    assert counted == {0.0: 5 * 16, 0.5: 2 * 16}


def test_item_counts_are_positives_and_negatives():
    report = trained(small_model(), negatives=3)
    positives = np.bincount(SMALL_TRAIN.items, minlength=9)
    assert int(report.item_counts.sum()) == 8 * 3 * 2
    assert (report.item_counts.numpy() >= 3 * positives).all()
    assert int(report.item_counts[6]) > 0, "an item that nobody has is trained on as a negative only"
