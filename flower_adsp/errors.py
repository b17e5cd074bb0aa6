"""The errors that a user of flower-adsp may see."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class FlowerAdspError(Exception):
    """Base class of the errors raised here."""


class ConfigError(FlowerAdspError, ValueError):
    """A setting is unknown, of the wrong type or out of range."""


class NodeCountError(FlowerAdspError, RuntimeError):
    """Too few nodes are connected."""


class EngineFailed(FlowerAdspError, RuntimeError):
    """What runs the devices has failed several times in a row, not the devices themselves."""


class DataError(FlowerAdspError, ValueError):
    """A data set or a partition of it cannot be used."""


class RefusedMessage(FlowerAdspError, ValueError):
    """A message does not say what it should.

    Parameters
    ----------
    kind : str
        A short name of the fault, by which refusals are counted.
    detail : str
        What was found and what is allowed.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


def require(condition: bool, name: str, value: Any, allowed: str) -> None:
    """Raise a `ConfigError` that names a setting, its value and what is allowed, unless met."""
    if not condition:
        raise ConfigError(f"{name} = {value!r} is not allowed; it must be {allowed}")


def unknown(what: str, value: Any, allowed: Iterable[str]) -> ConfigError:
    """Return the error for a name that is not among the allowed ones."""
    names = sorted(allowed)
    close = get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return ConfigError(f"unknown {what} {value!r}{hint}; allowed: {', '.join(names) or 'none'}")
