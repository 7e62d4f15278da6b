"""Live view: the lines of the history as TensorBoard scalars, for `tensorboard --logdir <run folder>`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from fedhur_app.config import ConfigError, Settings
from server_app.checkpoint import RunFolder


class _Writer(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...

    def flush(self) -> object: ...


def live_view(
    settings: Settings, folder: RunFolder, last_round: int, markets: Sequence[str]
) -> Callable[[dict[str, Any]], None] | None:
    """What takes each line of the history, or None without `server.tensorboard`.

    Args:
        settings: The run's settings.
        folder: Its folder; scalars go to `tensorboard` in it.
        last_round: The round after which a resumed run goes on. What was shown of later rounds is taken back.
        markets: Names of the markets by number.

    Raises:
        ConfigError: The package tensorboard is not installed.
    """
    if not settings.server.tensorboard:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"server.tensorboard is true, but TensorBoard cannot be imported ({error}): install it with "
            "`pip install 'fedhur[live]'` (in a checkout `pip install -e '.[live]'`), or set server.tensorboard=false"
        ) from error
    path = folder.path / "tensorboard"
    writer: _Writer = SummaryWriter(str(path), purge_step=last_round + 1)

    def show(line: dict[str, Any]) -> None:
        for tag, value in scalars(line, markets):
            writer.add_scalar(tag, value, line["round"])
        writer.flush()

    return show


def scalars(line: dict[str, Any], names: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Tags and values of one line of history.jsonl; a metric over nobody (None) is left out.

    Args:
        line: The line.
        names: Names of the markets by number; a market without one is shown by its number.
    """
    values = {
        "loss": line["loss"],
        **{f"validation/{name}": value for name, value in line["validation"].items()},
        "bytes/up_per_client": line["bytes_up_per_client"],
        "bytes/down_per_client": line["bytes_down_per_client"],
        "seconds/round": line["seconds"]["round"],
    }
    for number, metrics in line.get("markets", {}).items():
        name = names[int(number)] if int(number) < len(names) else number
        values |= {f"markets/{name}/{metric}": value for metric, value in metrics.items()}
    return ((tag, float(value)) for tag, value in values.items() if value is not None)
