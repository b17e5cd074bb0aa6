"""The reward of a commit rate: how soon the loss would reach its target at this pace.

Hu, Wang and Wu, AAAI 2020, https://arxiv.org/abs/1911.06949, fit ℓ(t) = 1/(a1² t + a2) + a3 to the
losses of a window and take r = a1² / (1/(ℓ* − a3) − a2), which is 1/t* where ℓ(t*) = ℓ*.
"""

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MAX_EVALUATIONS = 200_000  # about 2 s; the authors' released code has 5,000,000
_LEAST_OFFSET = 1e-9  # of a bounded fit, whose losses are thus below 10⁹
_AT_THE_ASYMPTOTE, _NO_TIME = -100_000.0, -100_001.0  # as the authors' released code has them


def decay(t: NDArray[np.float64], a1: float, a2: float, a3: float) -> NDArray[np.float64]:
    """Return ℓ(t) = 1/(a1² t + a2) + a3."""
    return np.asarray(1 / (a1**2 * t + a2) + a3)


def fit_as_published(times: Sequence[float], losses: Sequence[float]) -> tuple[float, float, float]:
    """Return a1, a2 and a3 of an unbounded least-squares fit that starts from (1, 1, 1).

    With three samples the fit is exact where they decay convexly. Where they do not, it ends
    wherever the search stops.

    Raises
    ------
    RuntimeError
        If the fit does not converge.
    """
    # Imported late: devices, too, check the settings of a search, and fit nothing.
    from scipy.optimize import OptimizeWarning, curve_fit

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", OptimizeWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        found, _ = curve_fit(
            decay,
            np.asarray(times, np.float64),
            np.asarray(losses, np.float64),
            p0=(1.0, 1.0, 1.0),
            maxfev=_MAX_EVALUATIONS,
        )
    a1, a2, a3 = (float(value) for value in found)
    return a1, a2, a3


def reward_as_published(
    times: Sequence[float], losses: Sequence[float], target_loss: float
) -> float:
    """Return r = a1² / (1/(ℓ* − a3) − a2) of the first, the middle and the last sample.

    Parameters
    ----------
    times : Sequence[float]
        Seconds since the run began; three or more, ascending.
    losses : Sequence[float]
        The loss at each.
    target_loss : float
        ℓ*, the same for all windows.

    Returns
    -------
    float
        1/s; negative where the target is below the fitted asymptote, and NaN where the fit did
        not converge or a loss is not finite.
    """
    chosen = [0, len(times) // 2, len(times) - 1]
    if not np.isfinite([losses[i] for i in chosen]).all():
        return float("nan")
    try:
        a1, a2, a3 = fit_as_published([times[i] for i in chosen], [losses[i] for i in chosen])
    except RuntimeError:
        return float("nan")
    if target_loss == a3:
        return _AT_THE_ASYMPTOTE
    denominator = 1 / (target_loss - a3) - a2
    return _NO_TIME if denominator == 0 else a1**2 / denominator


def robust_reward(times: Sequence[float], losses: Sequence[float], target_loss: float) -> float:
    """Return 1/t*, t* predicted by a bounded fit over a window, or by its slope.

    Differs from the published reward in this: all samples of the window count, smoothed; time is
    scaled to the window; a1² ≥ 0, a2 > 0 and 0 ≤ a3 ≤ the least loss; the fit starts from several
    points; and where the target is not above the fitted asymptote, or the fit is no better than
    a straight line, t* is where that line reaches ℓ*. A window in which the loss does not fall,
    or is beyond 10⁹ in size, as of a model that diverges, has a reward of 0.

    Parameters
    ----------
    times : Sequence[float]
        Seconds since the run began; two or more, ascending.
    losses : Sequence[float]
        The loss at each.
    target_loss : float
        ℓ*, the same for all windows.

    Returns
    -------
    float
        1/s, at least 0.
    """
    if not (np.abs(losses) < 1 / _LEAST_OFFSET).all():  # NaN, too
        return 0.0
    begin, length = times[0], times[-1] - times[0]
    scaled = (np.asarray(times, np.float64) - begin) / length
    smooth = smoothed(losses)
    slope, level = (float(value) for value in np.polyfit(scaled, smooth, 1))
    line_error = float(np.square(slope * scaled + level - smooth).sum())
    reached = None
    rate, offset, floor, error = _bounded_fit(scaled, smooth)
    if rate > 0 and target_loss > floor and error <= line_error:
        reached = (1 / (target_loss - floor) - offset) / rate
    elif slope < -1e-9 * abs(level):
        reached = (target_loss - level) / slope
    if reached is None:
        return 0.0
    return 1 / max(begin + length * reached, 1e-9)


def slope_reward(times: Sequence[float], losses: Sequence[float], dropped: float = 15.0) -> float:
    """Return how fast 1/ℓ grows: the slope of a line fitted to 1/ℓ over a window.

    Not published. Where ℓ = 1/(a1² t + a2), the published fit with an asymptote of 0, it is a1².

    Parameters
    ----------
    times : Sequence[float]
        Seconds since the run began; ascending.
    losses : Sequence[float]
        The loss at each.
    dropped : float (default: 15.0)
        Seconds at the window's start that do not count, in which the rate before still acts; all
        count where fewer than two samples would be left.

    Returns
    -------
    float
        Of 1/ℓ per second; NaN where a loss is not finite or not above 0.
    """
    kept = [i for i, time in enumerate(times) if time >= times[0] + dropped]
    chosen = kept if len(kept) > 1 else range(len(times))
    if not all(0 < losses[i] < np.inf for i in chosen):
        return float("nan")
    inverse = [1 / losses[i] for i in chosen]
    return float(np.polyfit([times[i] for i in chosen], inverse, 1)[0])


def loss_ratio(losses: Sequence[float], first: float) -> float:
    """Return the last loss as a part of a first one; of a first one of 0, 1 or infinity."""
    if first == 0:
        return 1.0 if losses[-1] == 0 else float("inf")
    return losses[-1] / first


def smoothed(losses: Sequence[float]) -> NDArray[np.float64]:
    """Return the losses with each inner one replaced by the median of itself and its neighbours."""
    values = np.asarray(losses, np.float64)
    if len(values) < 5:
        return values
    inner = np.median([values[:-2], values[1:-1], values[2:]], axis=0)
    return np.concatenate([values[:1], inner, values[-1:]])


def _bounded_fit(
    scaled: NDArray[np.float64], losses: NDArray[np.float64]
) -> tuple[float, float, float, float]:
    """Return a1², a2, a3 and the squared error of the best of several bounded fits."""
    from scipy.optimize import least_squares

    least, first = float(losses.min()), float(losses[0])
    lowest = min(0.0, least)
    lowest -= 1e-12 * max(1.0, -lowest)  # the bounds must differ
    best: tuple[float, float, float, float] | None = None
    for share in (0.0, 0.5, 0.9, 0.99):
        floor = min(max(share * least, 0.0), least)
        offset = max(1 / max(first - floor, 1e-9), _LEAST_OFFSET)
        drop = 1 / max(float(losses[-1]) - floor, 1e-9) - offset
        result = least_squares(
            lambda p: 1 / (p[0] * scaled + p[1]) + p[2] - losses,
            x0=(max(drop, 1e-6), offset, floor),
            bounds=([0, _LEAST_OFFSET, lowest], [np.inf, np.inf, least]),
            x_scale="jac",
        )
        error = float(2 * result.cost)
        if best is None or error < best[3]:
            best = (float(result.x[0]), float(result.x[1]), float(result.x[2]), error)
    assert best is not None
    return best
