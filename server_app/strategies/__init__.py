"""The server half of each strategy, one file each, found by the name of the algorithm."""

from importlib import import_module

from server_app.strategies.base import StagedStrategy


def server_strategy(name: str) -> type[StagedStrategy]:
    """The class `Server` of `server_app/strategies/<name>.py`.

    Raises:
        ValueError: There is no such algorithm.
    """
    try:
        module = import_module(f"server_app.strategies.{name.replace('-', '_')}")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("server_app.strategies."):
            raise
        raise ValueError(f"algorithm {name!r} has no file in server_app/strategies/") from error
    strategy: type[StagedStrategy] = module.Server
    return strategy
