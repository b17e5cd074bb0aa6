import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_adsp.network.sharing import SharedLinks, max_min_rates

NAMES = ("a", "b", "c")


@st.composite
def shares(draw: st.DrawFn) -> tuple[list[float], list[list[str]], dict[str, float]]:
    number = draw(st.integers(1, 7))
    rate = st.integers(1, 40).map(float)
    limits = draw(st.lists(rate, min_size=number, max_size=number))
    path = st.lists(st.sampled_from(NAMES), unique=True, max_size=3)
    paths = draw(st.lists(path, min_size=number, max_size=number))
    return limits, paths, {name: draw(rate) for name in NAMES}


def raised_together(
    limits: list[float], paths: list[list[str]], capacity: dict[str, float], step: float
) -> list[float]:
    """Raise all rates bit by bit, until each is stopped by its link or by a full resource."""
    rates, moving = [0.0] * len(limits), set(range(len(limits)))
    while moving:
        for index in sorted(moving):
            rates[index] += step
        for index in sorted(moving):
            loads = (
                sum(r for r, path in zip(rates, paths, strict=True) if name in path)
                >= capacity[name]
                for name in paths[index]
            )
            if rates[index] >= limits[index] or any(loads):
                moving.discard(index)
    return rates


@settings(deadline=None, max_examples=60)
@given(shares())
def test_rates_are_those_of_raising_all_together(
    given_: tuple[list[float], list[list[str]], dict[str, float]],
) -> None:
    limits, paths, capacity = given_
    step = 0.005
    found = max_min_rates(limits, paths, capacity.__getitem__)
    slow = raised_together(limits, paths, capacity, step)
    # Each step may go over by itself, and what one took too much another has too little.
    assert found == pytest.approx(slow, abs=step * len(limits) * 4)


@given(shares())
def test_no_link_or_resource_carries_more_than_it_can_and_each_transfer_is_held_back(
    given_: tuple[list[float], list[list[str]], dict[str, float]],
) -> None:
    limits, paths, capacity = given_
    rates = max_min_rates(limits, paths, capacity.__getitem__)
    load = {
        name: sum(rate for rate, path in zip(rates, paths, strict=True) if name in path)
        for name in NAMES
    }
    for name in NAMES:
        assert load[name] <= capacity[name] * (1 + 1e-9)
    for rate, limit, path in zip(rates, limits, paths, strict=True):
        assert 0 < rate <= limit
        held = [
            name
            for name in path
            if load[name] >= capacity[name] * (1 - 1e-9)
            and rate
            >= max(r for r, other in zip(rates, paths, strict=True) if name in other) * (1 - 1e-9)
        ]
        assert rate == limit or held


def test_rates_worked_by_hand() -> None:
    # Three share 9: one can only take 1, and the others have 4 each.
    assert max_min_rates([1, 10, 10], [["card"]] * 3, {"card": 9}.__getitem__) == [1, 4, 4]
    # Bertsekas and Gallager's kind of case: a full resource frees what it denied to another.
    rates = max_min_rates(
        [10, 10, 10],
        [["site", "card"], ["site", "card"], ["card"]],
        {"site": 2, "card": 9}.__getitem__,
    )
    assert rates == [1, 1, 7]
    assert max_min_rates([5.0], [[]], {}.__getitem__) == [5.0]
    assert max_min_rates([], [], {}.__getitem__) == []


def ends(links: SharedLinks) -> list[tuple[int, list[int]]]:
    found = []
    while (at := links.next_end()) is not None:
        found.append((at, links.ended(at)))
    return found


def test_two_that_share_take_twice_as_long_and_the_second_speeds_up() -> None:
    links = SharedLinks({"card": 8.0}.__getitem__)  # Mbit/s, so 1 byte a microsecond
    links.begin(0, 1, 1000, 8.0, ["card"], paused=False)
    assert links.next_end() == 1000
    links.begin(500, 2, 1000, 8.0, ["card"], paused=False)
    # The first has 500 bytes left at half the rate; the second then has 500 at the whole one.
    assert ends(links) == [(1500, [1]), (2000, [2])]


def test_what_ends_together_ends_in_the_order_in_which_it_began() -> None:
    links = SharedLinks({"card": 8.0}.__getitem__)
    for key in (3, 1, 2):
        links.begin(0, key, 100, 8.0, ["card"], paused=False)
    assert ends(links) == [(300, [3, 1, 2])]


def test_one_that_is_away_leaves_its_share_to_the_others() -> None:
    links = SharedLinks({"card": 8.0}.__getitem__)
    links.begin(0, 1, 1000, 8.0, ["card"], paused=False)
    links.begin(0, 2, 1000, 8.0, ["card"], paused=False)
    links.pause(200, 2, paused=True)  # each has 900 left
    assert links.next_end() == 1100
    assert links.ended(1100) == [1]
    assert links.next_end() is None
    links.pause(1500, 2, paused=False)
    assert ends(links) == [(2400, [2])]


def test_nothing_to_carry_takes_no_time() -> None:
    links = SharedLinks({}.__getitem__)
    links.begin(7, 1, 0, 8.0, [], paused=False)
    assert ends(links) == [(7, [1])]


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, int, float, list[str]]]:
    """Times in microseconds, bytes, own Mbit/s and path."""
    path = st.lists(st.sampled_from(NAMES[:2]), unique=True, max_size=2)
    one = st.tuples(st.integers(0, 3000), st.integers(1, 3000), st.integers(1, 20).map(float), path)
    return sorted(draw(st.lists(one, min_size=1, max_size=6)), key=lambda item: item[0])


def fluid(
    transfers: list[tuple[int, int, float, list[str]]], capacity: dict[str, float]
) -> dict[int, float]:
    """Carry everything microsecond by microsecond, at rates found anew for each."""
    left = {key: 8.0 * size for key, (_, size, _, _) in enumerate(transfers)}
    ended: dict[int, float] = {}
    now = 0
    while left:
        active = [key for key in left if transfers[key][0] <= now]
        rates = max_min_rates(
            [transfers[key][2] for key in active],
            [transfers[key][3] for key in active],
            capacity.__getitem__,
        )
        for key, rate in zip(active, rates, strict=True):
            left[key] -= rate
            if left[key] <= 1e-9:
                ended[key] = now + 1
                del left[key]
        now += 1
    return ended


@settings(deadline=None, max_examples=40)
@given(arrivals())
def test_ends_are_those_of_a_fluid_simulated_by_the_microsecond(
    transfers: list[tuple[int, int, float, list[str]]],
) -> None:
    capacity = {"a": 10.0, "b": 6.0}
    links = SharedLinks(capacity.__getitem__)
    found: dict[int, int] = {}
    waiting = list(enumerate(transfers))
    while waiting or links.next_end() is not None:
        at = links.next_end()
        if waiting and (at is None or waiting[0][1][0] < at):
            key, (now, size, limit, path) = waiting.pop(0)
            links.begin(now, key, size, limit, path, paused=False)
        else:
            assert at is not None
            found |= dict.fromkeys(links.ended(at), at)
    slow = fluid(transfers, capacity)
    assert found.keys() == slow.keys()
    # Each end is rounded up, by both, and moves those after it by as much.
    for key, at in found.items():
        assert abs(at - slow[key]) <= 2 * len(transfers)


def test_goes_on_from_its_state() -> None:
    def half() -> SharedLinks:
        links = SharedLinks({"card": 8.0}.__getitem__)
        links.begin(0, 1, 1000, 8.0, ["card"], paused=False)
        links.begin(300, 2, 700, 3.0, ["card"], paused=False)
        return links

    again = SharedLinks({"card": 8.0}.__getitem__)
    again.load_state_dict(half().state_dict())
    assert ends(again) == ends(half())
    assert json.dumps(list(half().state_dict()))


def test_misuse_is_refused() -> None:
    links = SharedLinks({}.__getitem__)
    links.begin(5, 1, 10, 8.0, [], paused=False)
    with pytest.raises(ValueError, match="transfer 1 is under way"):
        links.begin(5, 1, 10, 8.0, [], paused=False)
    with pytest.raises(ValueError, match="backwards"):
        links.ended(4)
