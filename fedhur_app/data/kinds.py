"""Tables of named ways to do a thing: a kind leads to one function, and the function says what it needs."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fedhur_app.data.errors import DataError

Result = TypeVar("Result")


def choose(table: Mapping[str, Callable[..., Result]], kind: str, what: str) -> Callable[..., Result]:
    """The function of a kind.

    Raises:
        DataError: There is no such kind; the text names the nearest and all others.
    """
    if kind in table:
        return table[kind]
    near = difflib.get_close_matches(kind, table, n=1, cutoff=0.5)
    guess = f" (did you mean '{near[0]}'?)" if near else ""
    raise DataError(f"there is no {what} '{kind}'{guess}; choose one of {', '.join(table)}")


def needs(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments of a function."""
    return tuple(inspect.signature(function).parameters)


def call(function: Callable[..., Result], **known: Any) -> Result:
    """Call a function with those of the known values that it asks for by name."""
    return function(**{name: known[name] for name in needs(function) if name in known})
