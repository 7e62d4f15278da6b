"""PFedRec (Zhang et al., IJCAI 2023) on the client.

In shard form a user's score function `sigma(w_u . e_i + b_u)` is a row of the user table and a bias. The published code
uses SGD with a learning rate for the table that grows with the catalogue (`train.optimizer: sgd`,
`train.item_lr_factor` 80 I); Adam for both is the sound form.
"""

from client_app.algorithms.base import ClientAlgorithm


class Client(ClientAlgorithm):
    """Every batch steps the score functions first, then the item table."""

    alternate = True
