"""PFedRec (Zhang et al., IJCAI 2023): the plain mean of the item tables is where everybody starts the next round.

A client ranks with the table that it trained, not with the mean: personalised twice, in the users' score functions and
in the items. So the mean travels with the next call to train, and a round has one stage.
"""

from fedhur_app.protocol import Stage
from server_app.strategies.mixing import MixingStrategy


class Server(MixingStrategy):
    """Mean of the tables, `W = 1/K` (`fedavg.weighting: uniform`)."""

    stages = (Stage.ITEMS,)
