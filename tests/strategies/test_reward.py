from math import isfinite

import numpy as np
import pytest
from flower_adsp.strategies.reward import (
    decay,
    fit_as_published,
    reward_as_published,
    robust_reward,
    slope_reward,
    smoothed,
)
from hypothesis import given, settings
from hypothesis import strategies as st

# Losses at the beginning, middle and end of windows in the authors' log of a run.
CONCAVE = [(1.480, 1.506, 1.435), (4.200, 3.920, 1.554), (1.554, 1.448, 1.166)]


# The samples of their windows were a little over 60 s apart; what a failed fit ends at hangs on it.
SPACINGS = (55.0, 60.0, 61.0, 61.5, 62.0, 65.0, 70.0, 90.0)


@pytest.mark.parametrize(("a1", "a2", "a3"), [(0.1, 0.5, 0.2), (0.05, 0.9, 0.0), (0.2, 0.4, 0.5)])
def test_convex_decay_is_recovered(a1: float, a2: float, a3: float) -> None:
    times = np.linspace(30, 90, 5)
    losses = decay(times, a1, a2, a3)
    target = a3 + 0.05
    reached = (1 / 0.05 - a2) / a1**2
    assert robust_reward(times, losses, target) == pytest.approx(1 / reached, rel=1e-2)
    published = reward_as_published(times, losses, target)
    if a1 < 0.2:
        assert published == pytest.approx(1 / reached, rel=1e-4)
    else:  # from its starting point (1, 1, 1) the unbounded fit runs into a pole even here
        assert published != pytest.approx(1 / reached, rel=1)


def window(spacing: float) -> list[float]:
    return [602.5 - spacing, 602.5, 602.5 + spacing]


@pytest.mark.parametrize("losses", CONCAVE[1:])
def test_concave_windows_defeat_the_published_fit(losses: tuple[float, ...]) -> None:
    blind = 0
    for spacing in SPACINGS:
        fitted = decay(np.asarray(window(spacing)), *fit_as_published(window(spacing), losses))
        assert np.abs(fitted - losses).max() > 0.01  # it does not pass through its three points
        near, far = (reward_as_published(window(spacing), losses, loss) for loss in (1.0, 0.7))
        blind += far == pytest.approx(near, rel=1e-3)
    assert blind >= len(SPACINGS) / 2  # it does not even depend on the loss to be reached


@pytest.mark.parametrize("losses", CONCAVE)
def test_the_robust_reward_depends_on_the_loss_to_be_reached(losses: tuple[float, ...]) -> None:
    for spacing in SPACINGS:
        near, far = (robust_reward(window(spacing), losses, loss) for loss in (1.0, 0.7))
        assert 0 < far < 0.99 * near


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32) | st.sampled_from([0.0, 1e10, 2.3]), min_size=3, max_size=6))
def test_no_losses_of_a_window_stop_a_run(losses: list[float]) -> None:
    times = [15.0 * i for i in range(len(losses))]
    with np.errstate(all="ignore"):
        assert robust_reward(times, losses, 0.3) >= 0
        if not all(map(isfinite, losses)):
            assert robust_reward(times, losses, 0.3) == 0
        for reward in (reward_as_published(times, losses, 0.3), slope_reward(times, losses, 0.0)):
            assert isinstance(reward, float)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e12])
def test_a_model_that_diverged_is_no_improvement(bad: float) -> None:
    times, losses = [0.0, 15.0, 30.0, 45.0, 60.0], [2.3, 2.0, 5.0, bad, bad]
    assert robust_reward(times, losses, 0.3) == 0
    assert not slope_reward(times, losses) > 0
    if not isfinite(bad):
        assert not isfinite(reward_as_published(times, losses, 0.3))


def test_on_a_pole_the_published_reward_says_the_time_and_not_the_pace() -> None:
    # 1/602.5 s, the middle sample's time stamp, as in the authors' log.
    rewards = [reward_as_published(window(spacing), CONCAVE[1], 1.0) for spacing in SPACINGS]
    assert any(reward == pytest.approx(0.001660, abs=1e-6) for reward in rewards)


def test_the_robust_reward_orders_concave_windows_by_their_pace() -> None:
    times = [0.0, 60.0, 120.0]
    paces = [robust_reward(times, losses, 1.0) for losses in CONCAVE]
    assert paces[0] < paces[2] < paces[1]
    assert all(isfinite(pace) and pace > 0 for pace in paces)


def test_a_window_without_progress_is_worth_nothing() -> None:
    times = [0.0, 15.0, 30.0, 45.0, 60.0]
    assert robust_reward(times, [1.0, 1.1, 1.2, 1.3, 1.5], 0.5) == 0
    assert robust_reward(times, [1.0] * 5, 0.5) == 0


def test_one_outlier_does_not_decide() -> None:
    times = [0.0, 15.0, 30.0, 45.0, 60.0]
    clean = robust_reward(times, [1.0, 0.9, 0.8, 0.72, 0.66], 0.3)
    spoilt = robust_reward(times, [1.0, 0.9, 3.0, 0.72, 0.66], 0.3)
    assert clean / 3 < spoilt < clean * 3
    assert list(smoothed([1.0, 9.0, 1.0, 1.0, 1.0])) == [1.0] * 5


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.01, 10), min_size=2, max_size=8),
    st.floats(0.0, 5.0),
    st.floats(0.0, 1e5),
)
def test_the_robust_reward_is_never_negative_nor_undefined(
    losses: list[float], target: float, begin: float
) -> None:
    times = [begin + 15.0 * number for number in range(len(losses))]
    reward = robust_reward(times, losses, target)
    assert isfinite(reward)
    assert reward >= 0


@given(st.floats(0.05, 3), st.floats(0.2, 2), st.floats(0, 1000))
def test_the_slope_is_that_of_a_decay_to_zero(a1: float, a2: float, begin: float) -> None:
    times = [begin + 15.0 * i for i in range(5)]
    losses = [1 / (a1**2 * (t - begin) + a2) for t in times]
    assert slope_reward(times, losses) == pytest.approx(a1**2)
    # The first 15 s do not count, unless nothing would be left.
    assert slope_reward(times, [9.0, *losses[1:]]) == pytest.approx(a1**2)
    assert slope_reward(times[:2], losses[:2]) == pytest.approx(a1**2)
