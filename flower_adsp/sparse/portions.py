"""Portions: what is trained of a unit, and of a parameter."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
RATIOS = (1.0, 0.5, 0.25, 0.125)


@dataclass(frozen=True)
class Portion:
    """What is trained of a unit.

    Parameters
    ----------
    ratio : float
        Part of the input channels of its layers; 1 for the whole unit.
    channels : dict[str, NDArray[np.int64]]
        Indices of the input channels that are trained, by the name of the weight; empty at ratio 1.
    """

    ratio: float = 1.0
    channels: Mapping[str, Indices] = field(default_factory=dict)


@dataclass(frozen=True)
class Slice:
    """What is trained of a parameter: indices along an axis, or all where `axis` is None."""

    axis: int | None = None
    channels: Indices | None = None

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what is trained of a parameter of a shape."""
        if self.axis is None or self.channels is None:
            return whole
        return (*whole[: self.axis], len(self.channels), *whole[self.axis + 1 :])

    def expand(self, part: NDArray[np.floating], whole: tuple[int, ...]) -> NDArray[np.floating]:
        """Return what is trained within zeros of the whole parameter's shape."""
        if self.axis is None or self.channels is None:
            return part
        full = np.zeros(whole, part.dtype)
        full[(slice(None),) * self.axis + (self.channels,)] = part
        return full


WHOLE = Slice()


def choose_channels(weight: NDArray[np.floating], axis: int, ratio: float, window: int) -> Indices:
    """Return the input channels with the largest norms, or those that follow them.

    Parameters
    ----------
    weight : NDArray
        The layer's weight.
    axis : int
        Along its input channels.
    ratio : float
        Part of them to take; at least one is taken.
    window : int
        0 for those with the largest norms, k for those that come k times as many places later;
        after the last come the first again.

    Returns
    -------
    NDArray[np.int64]
        Indices in increasing order, of shape ``(c,)``.
    """
    others = tuple(other for other in range(weight.ndim) if other != axis)
    norms = np.square(weight.astype(np.float64)).sum(axis=others)
    order = np.argsort(-norms, kind="stable")
    count = max(1, round(len(order) * ratio))
    places = np.arange(window * count, (window + 1) * count) % len(order)
    return np.sort(order[np.unique(places)]).astype(np.int64)
