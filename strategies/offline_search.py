"""Trials from one saved model, each for a check period, to choose settings beforehand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Generic, TypeVar

from flower_adsp.errors import require

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class Trials(Generic[Settings]):
    """What an offline search came to.

    Parameters
    ----------
    best : Settings
        The settings after which the loss was least.
    losses : list[float]
        The loss after each trial, in the order of the candidates.
    seconds : float
        Seconds of the run's clock that all trials took together.
    """

    best: Settings
    losses: list[float]
    seconds: float


def search_offline(
    candidates: Sequence[Settings],
    trial: Callable[[Settings], float],
    first_loss: float,
    seconds: float = 60.0,
) -> Trials[Settings]:
    """Try each candidate from the same saved model, and keep the one with the least loss.

    As the search for ADSP+ and ADSP++ in the released code of Hu, Wang and Wu, AAAI 2020,
    https://arxiv.org/abs/1911.06949: a loss of more than ten times that of the saved model, or
    none that is finite, rules a candidate out.

    Parameters
    ----------
    candidates : Sequence[Settings]
        Settings to try; at least one.
    trial : Callable[[Settings], float]
        Trains from the saved model for `seconds` and returns the loss.
    first_loss : float
        Loss of the saved model.
    seconds : float (default: 60.0)
        Length of a trial.

    Raises
    ------
    ConfigError
        If there are no candidates.
    RuntimeError
        If none is left.
    """
    require(len(candidates) > 0, "candidates", list(candidates), "at least one")
    losses = [trial(candidate) for candidate in candidates]
    kept = [
        (loss, index)
        for index, loss in enumerate(losses)
        if isfinite(loss) and loss <= 10 * first_loss
    ]
    if not kept:
        raise RuntimeError(f"no candidate kept the loss below ten times {first_loss}: {losses}")
    return Trials(candidates[min(kept)[1]], losses, seconds * len(candidates))
