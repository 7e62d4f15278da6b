"""The client half of each strategy, one file each, found by the name of the algorithm."""

from importlib import import_module

from client_app.algorithms.base import ClientAlgorithm


def client_algorithm(name: str) -> type[ClientAlgorithm]:
    """The class `Client` of `client_app/algorithms/<name>.py`.

    Raises:
        ValueError: There is no such algorithm.
    """
    try:
        module = import_module(f"client_app.algorithms.{name.replace('-', '_')}")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("client_app.algorithms."):
            raise
        raise ValueError(f"algorithm {name!r} has no file in client_app/algorithms/") from error
    algorithm: type[ClientAlgorithm] = module.Client
    return algorithm
