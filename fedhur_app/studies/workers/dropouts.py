"""An ordinary run in which requests to clients get lost, as of devices that go away in the middle of a round.

Whether a request is lost depends on the run's seed, the stage, the round and the client alone. A client that misses one
stage of a round is out for the rest of it and comes back in the next one. The handshake and the test are never lost:
all methods are tested on all clients.
"""

from collections.abc import Sequence

from flwr.app import Message

from fedhur_app.protocol import Stage
from fedhur_app.runtime import Fault, run_local
from fedhur_app.seeding import numpy_generator
from fedhur_app.studies.workers.in_process import parser, run_config

_STAGES = (Stage.ITEMS, Stage.UTILITY, Stage.PERSONALIZE, Stage.REGULARIZED)


def is_lost(seed: int, stage: str, round_: int, client: int, probability: float) -> bool:
    """Whether the request of a stage of a round to a client gets lost."""
    if stage not in _STAGES:
        return False
    return bool(numpy_generator(seed, f"lost {stage}", round_, client).random() < probability)


def dropouts(seed: int, probability: float) -> Fault:
    """The fault of the local runtime that loses requests with this probability.

    Raises:
        ValueError: A probability outside [0, 1).
    """
    if not 0 <= probability < 1:
        raise ValueError(f"--drop {probability}: the share of lost requests must be at least 0 and below 1")

    def fault(message: Message, client: int) -> str | None:
        stage = message.metadata.message_type
        if stage not in _STAGES:
            return None
        round_ = int(message.content.config_records["fields"]["round"])  # type: ignore[arg-type]
        return "drop" if is_lost(seed, stage, round_, client, probability) else None

    return fault


def main(words: Sequence[str] | None = None) -> None:
    """Run once."""
    options = parser(__doc__ or "")
    options.add_argument("--drop", type=float, required=True, help="probability that a request is lost")
    chosen = options.parse_args(words)
    run_local(run_config(chosen), dropouts(chosen.seed, chosen.drop))


if __name__ == "__main__":
    main()
