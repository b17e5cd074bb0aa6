import json
import math

import pytest
from flower_adsp.strategies.commit_rate import CommitRateSearch, GuardedSearch, balanced_rate
from hypothesis import given
from hypothesis import strategies as st

from flower_adsp.errors import ConfigError


def run(search: CommitRateSearch, rewards: list[float]) -> list[int]:
    """Return the rate of each window."""
    rates = []
    for reward in rewards:
        rates.append(search.rate)
        search.end_window(reward)
    return rates


def test_the_search_stops_at_the_first_that_is_not_better() -> None:
    search = CommitRateSearch()
    assert run(search, [1, 2, 3, 2.5, 9, 9]) == [1, 2, 3, 4, 3, 3]
    assert not search.is_searching


def test_equal_is_not_better() -> None:
    assert run(CommitRateSearch(), [1, 1, 5, 5]) == [1, 2, 1, 1]


def test_nan_is_not_better() -> None:
    assert run(CommitRateSearch(), [1, float("nan"), 5]) == [1, 2, 1]


def test_with_reevaluation_a_better_candidate_is_tried_once_more() -> None:
    assert run(CommitRateSearch(reevaluate=True), [1, 2, 3, 2.5, 9]) == [1, 2, 2, 3, 2]


def test_each_epoch_searches_anew_from_1() -> None:
    search = CommitRateSearch(epoch_windows=5)
    assert run(search, [1, 2, 1, 0, 0, 1, 0, 0]) == [1, 2, 3, 2, 2, 1, 2, 1]


def test_a_jump_of_the_loss_searches_anew_only_where_asked() -> None:
    for jump, rates in ((None, [1, 1]), (0.3, [1, 2])):
        search = CommitRateSearch(loss_jump=jump)
        run(search, [2, 1])
        assert not search.is_searching
        search.end_window(1, loss_change=0.31)
        assert run(search, [1, 1]) == rates


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30), st.booleans(), st.integers(3, 12))
def test_it_goes_on_from_its_state_as_if_nothing_had_been(
    rewards: list[float], reevaluate: bool, epoch: int
) -> None:
    whole = run(CommitRateSearch(epoch, reevaluate), rewards)
    for cut in range(len(rewards) + 1):
        first, second = CommitRateSearch(epoch, reevaluate), CommitRateSearch(epoch, reevaluate)
        head = run(first, rewards[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert head + run(second, rewards[cut:]) == whole


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40))
def test_against_the_recursion_written_out(rewards: list[float]) -> None:
    rates, rate, reference = [1], 1, rewards[0]
    for reward in rewards[1:]:
        rates.append(rate + 1)
        if not reward > reference:
            break
        rate, reference = rate + 1, reward
    else:
        rate = rates[-1]
    rates += [rate] * (len(rewards) - len(rates))
    assert run(CommitRateSearch(epoch_windows=1000), rewards) == rates


def test_bad_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="epoch_windows = 2"):
        CommitRateSearch(epoch_windows=2)
    with pytest.raises(ConfigError, match="loss_jump = 0"):
        CommitRateSearch(loss_jump=0)


# ---------------------------------------------------------------------------------------- guarded


def climb(search: GuardedSearch, windows: list[tuple[float, float]]) -> list[int]:
    """Return the rate of each window, of which the reward and the loss at its end are given."""
    rates = []
    for reward, level in windows:
        rates.append(search.rate)
        search.end_window(reward, level)
    return [*rates, search.rate]


def at(*rewards: float) -> list[tuple[float, float]]:
    """Return windows after the loss has halved, and the one in which it has."""
    return [(9.0, 0.5), *((reward, 0.4) for reward in rewards)]


def test_the_balanced_rate_is_where_both_losses_are_least() -> None:
    assert balanced_rate(60, 5.0, 0.4) == 2  # 2.19
    assert balanced_rate(60, 0.5, 0.4) == 7  # 6.93
    assert balanced_rate(60, 1000.0, 0.4) == 1
    assert balanced_rate(60, 0.0, 0.4) > 1000  # commits that cost nothing may be frequent


@given(st.floats(1, 600), st.floats(0.01, 20), st.floats(0.1, 5))
def test_no_whole_rate_beside_it_loses_less(period: float, overhead: float, drift: float) -> None:
    def lost(rate: int) -> float:
        return overhead * rate / period + drift / rate

    rate, best = balanced_rate(period, overhead, drift), (drift * period / overhead) ** 0.5
    # Rounding is not quite where whole rates are equally good: that is at their geometric mean.
    assert rate == 1 or abs(rate - best) <= 0.5
    least = min(range(1, 2 * rate + 2), key=lost)
    assert lost(rate) <= 1.1 * lost(least)


def test_nothing_is_judged_until_the_loss_has_halved() -> None:
    search = GuardedSearch(4)
    assert climb(search, [(1, 0.9), (5, 0.7), (9, 0.51)]) == [4, 4, 4, 4]
    assert not search.is_searching
    # The window in which it gets there is not the reference either.
    assert climb(search, [(9, 0.5), (1, 0.4), (2, 0.3)]) == [4, 4, 8, 16]


@pytest.mark.parametrize(
    ("rewards", "rates"),
    [
        ([1, 2, 4, 4], [4, 4, 8, 16, 32, 16]),  # up, up, and back from one that is no better
        ([1, 1.1, 2, 2.1, 9], [4, 4, 8, 2, 1, 2, 2]),  # 10 % more is not clear; down
        ([1, 0.9, 1.0, 9], [4, 4, 8, 2, 4, 4]),  # neither
        ([1, float("nan"), 1.5, 3.0], [4, 4, 8, 2, 1, 1]),  # down to the end
        ([-1.0, -0.9, 0.1], [4, 4, 8, 2, 1]),  # -0.9 is 10 % better, 0.1 more than 20 %
    ],
)
def test_the_climb_by_hand(rewards: list[float], rates: list[int]) -> None:
    assert climb(GuardedSearch(4), at(*rewards)) == rates


@given(st.integers(1, 40), st.floats(0.3, 40), st.integers(2, 12))
def test_it_ends_within_a_step_of_the_best_of_a_single_peak(
    first: int, peak: float, windows: int
) -> None:
    search = GuardedSearch(first)

    def reward(rate: int) -> float:
        return 2.0 ** -abs(math.log2(rate / peak))

    search.end_window(0, 0.4)
    for _ in range(20):
        search.end_window(reward(search.rate), 0.4)
    assert not search.is_searching
    for other in (2 * search.rate, search.rate // 2):
        assert other < 1 or reward(other) <= 1.2 * reward(search.rate)


@given(
    st.lists(st.tuples(st.floats(-1, 10), st.floats(0.3, 0.9)), min_size=1, max_size=15),
    st.integers(1, 9),
)
def test_a_guarded_search_goes_on_from_its_state(
    windows: list[tuple[float, float]], first: int
) -> None:
    whole = climb(GuardedSearch(first), windows)
    for cut in range(len(windows) + 1):
        one, two = GuardedSearch(first), GuardedSearch(1)
        head = climb(one, windows[:cut])[:-1]
        two.load_state_dict(json.loads(json.dumps(one.state_dict())))
        assert head + climb(two, windows[cut:]) == whole


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"rate": 0}, "rate = 0"), ({"gain": 0.9}, "gain = 0.9"), ({"guard": 0.0}, "guard = 0.0")],
)
def test_bad_settings_of_a_guarded_search_are_named(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        GuardedSearch(**settings)
