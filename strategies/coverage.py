"""Aggregation where not all workers train all: each slice over those that trained it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_adsp.arrays import Weights, add_scaled, is_averaged, mix_buffers
from flower_adsp.messages import Commit
from flower_adsp.sparse.plan import WorkerPlan
from flower_adsp.sparse.portions import WHOLE, Slice

Factor = float | NDArray[np.float64]


class Coverage:
    """By what to multiply an update so that each slice counts over those that train it.

    A strategy gives a commit its share of a full round, w_i with Σ w_i = 1 over all workers. For a
    slice that only the workers G train, the share is w_i / Σ_{j ∈ G} w_j, which is w_i times the
    factor 1 / Σ_{j ∈ G} w_j.

    Parameters
    ----------
    plans : Iterable[tuple[WorkerPlan, float]]
        The workers' plans, and their shares.
    model : Weights
        For the shapes.
    """

    def __init__(self, plans: Iterable[tuple[WorkerPlan, float]], model: Weights) -> None:
        self._model = model
        self._whole: dict[str, float] = {}
        self._parts: dict[str, list[tuple[Slice, float]]] = {}
        self._num_workers = 0
        for plan, share in plans:
            self._num_workers += 1
            for name, part in plan.slices.items():
                if part.axis is None:
                    self._whole[name] = self._whole.get(name, 0.0) + share
                else:
                    self._parts.setdefault(name, []).append((part, share))
            for name in plan.buffers:
                self._whole[name] = self._whole.get(name, 0.0) + share
        self._factors: dict[str, Factor] = {}

    def factor(self, name: str) -> Factor:
        """Return the factor of an array: a number, or numbers along the axis of its channels."""
        if name not in self._factors:
            total = _total(self._whole.get(name, 0.0), self._parts.get(name, []), self._model[name])
            # A sum of shares that is 1 but for rounding is all of them.
            with np.errstate(divide="ignore"):
                inverse = 1.0 / np.where(np.abs(total - 1.0) < 1e-9, 1.0, total)
            # What comes late, from a plan that is over, and nobody trains now, counts as if it
            # were trained by one worker.
            factor = np.where(np.isfinite(inverse), inverse, self._num_workers)
            self._factors[name] = float(factor) if factor.ndim == 0 else factor
        return self._factors[name]


def _total(
    whole: float, parts: Sequence[tuple[Slice, float]], array: NDArray[Any]
) -> NDArray[np.float64]:
    """Return the sum of shares, for all of an array or along the axis of its channels."""
    if not parts:
        return np.asarray(whole, np.float64)
    axis = parts[0][0].axis
    assert axis is not None
    totals = np.full(array.shape[axis], float(whole))
    for part, share in parts:
        assert part.channels is not None
        totals[part.channels] += share
    shape = [1] * array.ndim
    shape[axis] = -1
    return totals.reshape(shape)


def mean_over_trainers(
    commits: Sequence[Commit], shares: Sequence[float], kind: str = "update"
) -> Weights:
    """Return for each slice Σ_{i ∈ G} w_i U_i / Σ_{i ∈ G} w_i over the commits that contain it.

    Integer arrays are not averaged but the largest is kept.

    Parameters
    ----------
    commits : Sequence[Commit]
        Commits; where their updates are partial, what is not trained is zero.
    shares : Sequence[float]
        w_i, adding up to one.
    kind : str (default: "update")
        ``update`` or ``buffers``.
    """
    mean: Weights = {}
    names = dict.fromkeys(name for commit in commits for name in getattr(commit, kind))
    for name in names:
        held = [
            (getattr(commit, kind)[name], commit.slices.get(name, WHOLE), share)
            for commit, share in zip(commits, shares, strict=True)
            if name in getattr(commit, kind)
        ]
        array = held[0][0]
        if not is_averaged(array):
            mean[name] = np.maximum.reduce([value for value, _, _ in held])
            continue
        parts = [(part, share) for _, part, share in held if part.axis is not None]
        if len(held) == len(commits) and not parts:
            scaled = [value * array.dtype.type(share) for value, _, share in held]
        else:
            whole = sum(share for _, part, share in held if part.axis is None)
            total = _total(whole, parts, array)
            safe = np.where(total > 0, total, 1.0)
            scaled = [value * (share / safe).astype(array.dtype) for value, _, share in held]
        total_update = scaled[0]
        for value in scaled[1:]:
            total_update = total_update + value
        mean[name] = total_update
    return mean


def apply_mean(model: Weights, commits: Sequence[Commit], weights: Sequence[float]) -> list[str]:
    """Move a model by the weighted mean of commits, each slice over those that trained it.

    Parameters
    ----------
    model : Weights
        The model; it is changed in place.
    commits : Sequence[Commit]
        At least one.
    weights : Sequence[float]
        Of each, above 0.

    Returns
    -------
    list[str]
        The names of the arrays that it changed.
    """
    shares = [weight / sum(weights) for weight in weights]
    update = mean_over_trainers(commits, shares)
    buffers = mean_over_trainers(commits, shares, "buffers")
    add_scaled(model, update, 1.0)
    mix_buffers(model, buffers, 1.0)
    return [*update, *buffers]
