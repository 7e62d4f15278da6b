from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedhur_app.models.ncf import NeuralCollaborativeFiltering
from fedhur_app.models.negatives import NegativeSampler
from fedhur_app.models.training import TrainingOptions, train_locally
from tests.models.helpers import generator, separates_tastes, two_tastes, user_items
from tests.models.test_mf import autograd_loss

FORMS = [True, False]
N_USERS, N_ITEMS, DIM, HIDDEN = 5, 7, 3, (4, 6, 2)


def new_model(gmf, loss="bpr", dtype=torch.float64, hidden=HIDDEN, n_users=N_USERS, n_items=N_ITEMS):
    """A model whose parameters, biases too, are all of the size of 1."""
    start = NeuralCollaborativeFiltering.initialise(
        n_users, n_items, DIM, hidden, 1.0, gmf, generator(1), generator(2), generator(3), loss
    )
    g = generator(4)
    parameters = start.parameters()
    for name, tensor in parameters.items():
        if name.endswith("bias"):
            tensor.normal_(0, 0.5, generator=g)
    return NeuralCollaborativeFiltering({k: t.to(dtype) for k, t in parameters.items()}, gmf, loss)


def naive_logits(parameters, gmf, users, items):
    """The formulas of the papers, one pair at a time, on concatenated vectors and from torch's own modules."""
    mlp_users, mlp_items = ("users_mlp", "items_mlp") if gmf else ("users", "items")
    depth = sum(name.startswith("mlp.") for name in parameters) // 2
    logits = []
    for u, i in zip(users, items, strict=True):
        x = torch.cat([parameters[mlp_users][u], parameters[mlp_items][i]])
        for k in range(depth):
            x = nn.functional.relu(parameters[f"mlp.{k}.weight"] @ x + parameters[f"mlp.{k}.bias"])
        if gmf:
            x = torch.cat([parameters["users"][u] * parameters["items"][i], x])
        logits.append((parameters["output.weight"] @ x + parameters["output.bias"])[0])
    return torch.stack(logits)


@pytest.mark.parametrize("gmf", FORMS)
@pytest.mark.parametrize("loss", ["bpr", "bce"])
@pytest.mark.parametrize("hidden", [(4,), HIDDEN])
def test_gradients_equal_autograd_of_the_formulas_with_repeats_in_the_batch(gmf, loss, hidden):
    model = new_model(gmf, loss, hidden=hidden)
    # User 1 three times, (1, 2) twice, item 2 also as a negative; user 0 and item 5 never.
    users, positives, negatives = torch.tensor([[1, 1, 1, 2, 3], [2, 2, 0, 3, 0], [4, 1, 1, 2, 4]])
    before = {name: tensor.clone() for name, tensor in model.parameters().items()}
    value, gradients = model.loss_and_gradients(users, positives, negatives)

    leaves = {name: tensor.clone().requires_grad_() for name, tensor in before.items()}
    s_i, s_j = (naive_logits(leaves, gmf, users, items)[:, None] for items in (positives, negatives))
    one = torch.ones_like(s_i)  # scores as vectors of one coordinate whose product with 1 they are
    expected = autograd_loss(loss, one, s_i, s_j)
    expected.backward()
    assert value == pytest.approx(expected.item(), rel=1e-12)
    assert gradients.keys() == leaves.keys()
    for name, leaf in leaves.items():
        torch.testing.assert_close(gradients[name], leaf.grad, rtol=1e-11, atol=1e-14)
        assert torch.equal(model.parameters()[name], before[name])
        assert not model.parameters()[name].requires_grad
    assert any(gradients[name].any() for name in gradients if name.startswith("mlp."))
    assert not gradients["users"][0].any()
    assert not gradients["items"][5].any()


@pytest.mark.parametrize("gmf", FORMS)
def test_bpr_gives_the_output_bias_no_gradient_at_all(gmf):
    # A sum of +g and -g over the batch would leave rounding errors, and Adam makes a step of lr of each.
    model = new_model(gmf, dtype=torch.float32, n_users=50, n_items=60)
    users, items = torch.randint(50, (300,), generator=generator()), torch.randint(60, (2, 300), generator=generator())
    _, gradients = model.loss_and_gradients(users, *items)
    assert torch.equal(gradients["output.bias"], torch.zeros(1))


@pytest.mark.parametrize("gmf", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_equal_the_formulas_pair_by_pair(gmf, dtype):
    model = new_model(gmf, dtype=dtype)
    scores = model.scores(torch.tensor([3, 0]))
    assert (scores.dtype, scores.shape) == (torch.float64, (2, N_ITEMS))
    double = {name: tensor.double() for name, tensor in model.parameters().items()}
    for row, user in zip(scores, (3, 0), strict=True):
        expected = naive_logits(double, gmf, [user] * N_ITEMS, range(N_ITEMS))
        torch.testing.assert_close(row, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("gmf", FORMS)
def test_scores_as_float32_do_not_depend_on_the_batch(gmf):
    # 61 users x 700 items x 32 units in float64: 11 MB, three blocks.
    model = new_model(gmf, dtype=torch.float32, hidden=(32, 16, 8), n_users=61, n_items=700)
    users = torch.randperm(61, generator=generator())
    whole = model.scores(users).float()
    alone = torch.cat([model.scores(user[None]) for user in users]).float()
    assert torch.equal(whole, alone)


@pytest.mark.parametrize("gmf", FORMS)
@given(data=st.data())
def test_any_shape_scores_as_the_formulas_say(gmf, data):
    small = st.integers(1, 5)
    n_users, n_items, dim = data.draw(small), data.draw(small), data.draw(small)
    hidden = data.draw(st.lists(small, min_size=1, max_size=3))
    seed = data.draw(st.integers(0, 1000))
    model = NeuralCollaborativeFiltering.initialise(
        n_users, n_items, dim, hidden, 1.0, gmf, generator(seed), generator(seed + 1), generator(seed + 2)
    )
    double = {name: tensor.double() for name, tensor in model.parameters().items()}
    users, items = torch.cartesian_prod(torch.arange(n_users), torch.arange(n_items)).T
    expected = naive_logits(double, gmf, users, items).view(n_users, n_items)
    torch.testing.assert_close(model.scores(torch.arange(n_users)), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("gmf", FORMS)
@pytest.mark.parametrize("loss", ["bpr", "bce"])
def test_scores_of_1e4_give_finite_losses_and_gradients(gmf, loss):
    model = new_model(gmf, loss, dtype=torch.float32)
    for tensor in model.parameters().values():
        tensor.mul_(30)
    users = torch.arange(N_USERS)
    assert model.scores(users).abs().max() > 1e4
    value, gradients = model.loss_and_gradients(users, users, users + 2)
    assert value >= 0
    assert torch.tensor(value).isfinite()
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())


@pytest.mark.parametrize("gmf", FORMS)
@pytest.mark.parametrize("loss", ["bpr", "bce"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_training_separates_two_tastes(gmf, loss, optimizer):
    model = NeuralCollaborativeFiltering.initialise(
        20, 10, 4, [8, 4], 0.5, gmf, generator(1), generator(2), generator(3), loss
    )
    items = user_items(two_tastes())
    options = TrainingOptions(epochs=100, batch_size=16, optimizer="adam", lr=0.02)
    if optimizer == "sgd":
        options = replace(options, optimizer="sgd", lr=0.5)
    report = train_locally(model, items, NegativeSampler(items, 10), options, generator(4))
    assert report.loss_mean < 0.5 * report.first_epoch_mean
    assert separates_tastes(model.scores(torch.arange(20)))


@pytest.mark.parametrize("gmf", FORMS)
def test_the_same_inputs_give_the_same_bits(gmf):
    batch = torch.randint(40, (3, 500), generator=generator())
    runs = [new_model(gmf, dtype=torch.float32, n_users=40, n_items=40) for _ in range(2)]
    (a, first), (b, again) = (model.loss_and_gradients(*batch) for model in runs)
    assert a == b
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("gmf", FORMS)
def test_initialise_draws_what_the_docstring_says(gmf):
    def model(user_seed):
        return NeuralCollaborativeFiltering.initialise(
            300, 500, 16, (64, 32), 0.01, gmf, generator(user_seed), generator(9), generator(8), "bce"
        )

    a, b = model(1).parameters(), model(2).parameters()
    private = {"users", "users_mlp"} if gmf else {"users"}
    assert {name for name in a if not torch.equal(a[name], b[name])} == private
    assert {name for name in a if name.startswith("user")} == private
    assert {tensor.dtype for tensor in a.values()} == {torch.float32}
    for name in (name for name in a if name.startswith(("users", "items"))):
        assert a[name].std().item() == pytest.approx(0.01, rel=0.05)
    if gmf:
        assert not torch.equal(a["items"], a["items_mlp"])
    output_width = 48 if gmf else 32
    for name, shape, bound in (
        ("mlp.0.weight", (64, 32), (6 / 32) ** 0.5),
        ("mlp.1.weight", (32, 64), (6 / 64) ** 0.5),
        ("output.weight", (1, output_width), output_width**-0.5),
    ):
        assert a[name].shape == shape
        assert 0.8 * bound < a[name].abs().max().item() <= bound
        assert a[name].min() < 0 < a[name].max()
    assert not any(a[name].any() for name in a if name.endswith("bias"))


def test_parameters_are_the_tensors_themselves_and_there_are_no_item_vectors():
    model = new_model(True)
    for tensor in model.parameters().values():
        tensor.zero_()
    assert not model.scores(torch.tensor([0])).any()
    assert model.item_vectors() is None


@pytest.mark.parametrize(
    ("gmf", "name", "tensor", "message"),
    [
        (True, "items_mlp", None, "NeuMF lack items_mlp"),
        (False, "mlp.0.weight", None, r"the MLP alone lack mlp\.0\.weight"),
        (False, "mlp.1.weight", None, r"lack mlp\.1\.weight"),
        (False, "users_mlp", torch.zeros(5, 3), "the MLP alone has no parameter users_mlp"),
        (True, "users_mlp", torch.zeros(4, 3), r"'users_mlp' has shape \(4, 3\), expected \(5, 3\)"),
        (True, "users", torch.zeros(5), "'users' has shape"),
        (True, "items", torch.zeros(7, 2), r"'items' has shape \(7, 2\), expected \(7, 3\)"),
        (True, "mlp.0.weight", torch.zeros(4, 5), r"'mlp\.0\.weight' has shape \(4, 5\), expected \(4, 6\)"),
        (True, "mlp.1.bias", torch.zeros(5), r"'mlp\.1\.bias' has shape \(5,\), expected \(6,\)"),
        (True, "mlp.2.weight", torch.tensor(0.0), r"'mlp\.2\.weight' has shape \(\)"),
        (True, "output.weight", torch.zeros(1, 2), r"'output\.weight' has shape \(1, 2\), expected \(1, 5\)"),
        (False, "output.bias", torch.tensor(0.0), r"'output\.bias' has shape \(\), expected \(1,\)"),
        (True, "items_mlp", torch.zeros(7, 3).double(), r"'items_mlp' is torch\.float64: all must have one floating"),
        (True, "users", torch.zeros(5, 3, dtype=torch.int64), r"'users' is torch\.int64"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(gmf, name, tensor, message):
    parameters = new_model(gmf, dtype=torch.float32).parameters()
    if tensor is None:
        del parameters[name]
    else:
        parameters[name] = tensor
    with pytest.raises(ValueError, match=message):
        NeuralCollaborativeFiltering(parameters, gmf)


@pytest.mark.parametrize("loss", ["mse", "elementwise", "bprr"])
def test_other_losses_are_refused(loss):
    with pytest.raises(ValueError, match=f"'{loss}'.*choose bpr or bce"):
        NeuralCollaborativeFiltering(new_model(True).parameters(), True, loss)


@pytest.mark.parametrize("hidden", [(), (4, 0)])
def test_a_network_without_units_is_refused(hidden):
    with pytest.raises(ValueError, match="one hidden layer or more of at least one unit"):
        NeuralCollaborativeFiltering.initialise(5, 7, 3, hidden, 1.0, True, generator(1), generator(2), generator(3))
