import json

import pytest
from flower_adsp.strategies.commit_rate import CommitRateSearch
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
