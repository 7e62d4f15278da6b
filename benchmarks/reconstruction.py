"""What a curious server reads out of one upload: who of a client's users has which item.

    python -m benchmarks.reconstruction [--dataset ml-100k] [--clients 40]

The attack knows the uploaded item table and the number of users, and nothing of the client's draws: non-negative
factorisation of the positive part of the table's Gram matrix into as many parts as there are users. Parts are matched
to users as well as possible (the attacker cannot do that, but needs no names to hold lists of items), and each is
scored by the area under the ROC curve: does it rank the items of its user above those of the client's other users?
Chance is .5; a match of several random parts lies a little above.
"""

import argparse
import warnings

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.decomposition import NMF
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import roc_auc_score
from torch import Tensor

from client_app.algorithms import client_algorithm
from client_app.state import ClientState
from fedhur_app.config import Settings, load_settings
from fedhur_app.data.experiment import prepare_data
from fedhur_app.data.shards import Shard, load_shard, shard_path
from fedhur_app.protocol import Content


def upload(settings: Settings, shard: Shard) -> Tensor:
    """The item table (I, d) that a client sends in its first round."""
    client = client_algorithm(settings.algorithm)(settings, shard, ClientState(), 1, torch.device("cpu"))
    return client.items(Content({"best_round": 0})).record("table")["items"]


def reconstruction(table: Tensor, shard: Shard, seed: int = 0) -> float:
    """Mean AUC over a client's users of the attack on its item table (I, d)."""
    lengths = table.norm(dim=1)
    moved = np.flatnonzero((lengths > 1e-3 * lengths.max()).numpy())
    rows = table[torch.from_numpy(moved)].double()
    gram = (rows @ rows.T).clamp_min(0).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # more steps would make the attack a little better
        parts = NMF(shard.n_users, init="nndsvda", max_iter=150, random_state=seed).fit_transform(gram)
    guess = np.zeros((len(table), shard.n_users))
    guess[moved] = parts
    own = np.unique(shard.train.items)  # membership in the client is visible anyway: rows that moved
    users = [user for user in range(shard.n_users) if 0 < len(shard.train.of(user)) < len(own)]
    areas = np.array(
        [
            [roc_auc_score(np.isin(own, shard.train.of(user)), guess[own, part]) for part in range(shard.n_users)]
            for user in users
        ]
    )
    return float(areas[linear_sum_assignment(-areas)].mean())


def main() -> None:
    """Print one line a strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="ml-100k")
    parser.add_argument("--clients", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for strategy, overrides in (
        ("fedhur", "train.epochs=1"),
        ("fedhur", ""),
        ("fedhur-als", ""),
    ):
        settings = load_settings(options.dataset, strategy, overrides=overrides)
        data = prepare_data(settings)
        assert data is not None
        areas = []
        for client in range(min(options.clients, data.clients)):
            shard = load_shard(shard_path(data.folder, client))
            areas.append(reconstruction(upload(settings, shard), shard))
        name = f"{strategy} {overrides}".strip()
        print(f"{name}: AUC {np.mean(areas):.3f} (mean of {len(areas)} clients, least {np.min(areas):.3f})", flush=True)


if __name__ == "__main__":
    main()
