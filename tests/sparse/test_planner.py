from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_adsp.errors import ConfigError
from flower_adsp.sparse.planner import (
    Capacity,
    best_response,
    objective,
    plan_alone,
    plan_cover,
    plan_everything,
    plan_head,
    plan_suffix,
)
from flower_adsp.sparse.profile import ModelProfile, UnitProfile

RATIOS = (1.0, 0.5)


def unit(trained: int, frozen: int, parameters: int, macs: int = 10, rest: int = 0) -> UnitProfile:
    part = {1.0: parameters, 0.5: parameters // 2}
    saved = {1.0: trained, 0.5: (trained + frozen) // 2, 0.0: frozen, -1.0: 0}
    return UnitProfile(
        "u", macs, part, saved, dict.fromkeys(saved, rest), dict.fromkeys(saved, rest)
    )


def profile_of(units: list[UnitProfile]) -> ModelProfile:
    nothing = dict.fromkeys((1.0, 0.5, 0.0, -1.0), 0)
    loss = UnitProfile("loss", 0, {1.0: 0, 0.5: 0}, nothing, nothing, nothing)
    return ModelProfile((*units, loss), 10, 2, False, True)


UNITS = st.builds(
    unit,
    st.integers(3, 40),
    st.integers(0, 3),
    st.integers(0, 8),
    st.integers(1, 20),
    st.integers(0, 5),
)
PROFILES = st.lists(UNITS, min_size=2, max_size=4).map(profile_of)


def choices_of(profile: ModelProfile, ratios: tuple[float, ...] = RATIOS) -> list[dict[int, float]]:
    """Return all choices of one device that train the last unit whole."""
    head = profile.num_units - 1
    return [
        {u: r for u, r in enumerate((*picked, 1.0)) if r}
        for picked in product((0.0, *ratios), repeat=head)
    ]


@settings(max_examples=150, deadline=None)
@given(PROFILES, st.integers(20, 150), st.lists(st.floats(0.01, 1), min_size=4, max_size=4))
def test_the_best_response_is_close_to_the_best_there_is(
    profile: ModelProfile, memory: int, values: list[float]
) -> None:
    capacity = Capacity(memory)
    head = {profile.num_units - 1: 1.0}

    def gain(index: int, ratio: float) -> float:
        return values[index] * ratio

    def worth(choice: dict[int, float]) -> float:
        return sum(gain(*item) for item in choice.items())

    found = best_response(profile, capacity, gain, head, RATIOS)
    fitting = [choice for choice in choices_of(profile) if capacity.fits(profile, choice)]
    if found is None:
        assert not fitting
        return
    assert capacity.fits(profile, found)
    assert head.items() <= found.items()
    assert worth(found) >= 0.75 * max(worth(choice) for choice in fitting)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(3, 40), st.integers(0, 3)), min_size=2, max_size=5),
    st.integers(20, 200),
    st.lists(st.floats(0.01, 1), min_size=5, max_size=5),
)
def test_where_the_peak_is_a_sum_it_is_the_best(
    sizes: list[tuple[int, int]], memory: int, values: list[float]
) -> None:
    # Without parameters and temporaries the peak is what is kept, and the knapsack exact.
    profile = profile_of([unit(trained, frozen, 0) for trained, frozen in sizes])
    capacity = Capacity(memory)
    found = best_response(
        profile, capacity, lambda u, r: values[u] * r, {len(sizes) - 1: 1.0}, RATIOS
    )
    fitting = [choice for choice in choices_of(profile) if capacity.fits(profile, choice)]
    if found is None:
        assert not fitting
        return
    best = max(sum(values[u] * r for u, r in choice.items()) for choice in fitting)
    assert sum(values[u] * r for u, r in found.items()) == pytest.approx(best)


def reachable(profile: ModelProfile, capacities: list[Capacity]) -> tuple[bool, float]:
    """Return whether all units can be covered, and the best objective of a cover."""
    options = [
        [choice for choice in choices_of(profile, (1.0,)) if capacity.fits(profile, choice)]
        for capacity in capacities
    ]
    values = [1 / profile.num_units] * profile.num_units
    best, covered = 0.0, False
    for choices in product(*options):
        if set().union(*choices) == set(range(profile.num_units)):
            covered = True
            best = max(best, objective(values, capacities, choices))
    return covered, best


@settings(max_examples=80, deadline=None)
@given(PROFILES, st.lists(st.integers(25, 120), min_size=2, max_size=3))
def test_a_cover_is_found_where_there_is_one_and_is_close_to_the_best(
    profile: ModelProfile, memories: list[int]
) -> None:
    capacities = [Capacity(memory) for memory in memories]
    head = {profile.num_units - 1: 1.0}
    if not all(capacity.fits(profile, head) for capacity in capacities):
        with pytest.raises(ConfigError, match="the memory of device"):
            plan_everything_that_fits(profile, capacities)
        return
    cover = plan_everything_that_fits(profile, capacities)
    assert cover == plan_everything_that_fits(profile, capacities)
    for capacity, choice in zip(capacities, cover.choices, strict=True):
        assert capacity.fits(profile, choice)
    possible, best = reachable(profile, capacities)
    assert (not cover.uncovered) == possible
    if possible:
        assert cover.value >= 0.75 * best


def plan_everything_that_fits(profile: ModelProfile, capacities: list[Capacity]):  # type: ignore[no-untyped-def]
    values = [1 / profile.num_units] * profile.num_units
    return plan_cover(profile, values, capacities)


@settings(max_examples=50, deadline=None)
@given(PROFILES, st.integers(25, 100), st.integers(1, 60))
def test_more_memory_never_makes_the_best_response_worse(
    profile: ModelProfile, memory: int, more: int
) -> None:
    head = {profile.num_units - 1: 1.0}

    def worth(memory: int) -> float:
        found = best_response(profile, Capacity(memory), lambda u, r: r, head, (1.0,))
        return -1.0 if found is None else sum(found.values())

    # Costs are rounded up to cells, none of which is below a byte here.
    assert worth(memory + more) >= worth(memory) - 1e-9


def test_each_device_alone_leaves_out_what_is_dear_and_the_cover_does_not() -> None:
    units = [unit(50, 2, 1), unit(30, 2, 1), unit(30, 1, 1), unit(2, 0, 1)]
    profile = profile_of(units)
    capacities = [Capacity(84), Capacity(84), Capacity(84)]
    values = [0.25] * 4
    alone = plan_alone(profile, values, capacities)
    cover = plan_cover(profile, values, capacities)
    assert alone.uncovered == (0,)
    assert cover.uncovered == ()
    assert 0 in cover.choices[0]


def test_the_time_of_a_step_is_kept_to() -> None:
    profile = profile_of([unit(5, 1, 1, macs=10) for _ in range(4)])
    for limit in (0.5, 0.6, 0.8, 1.0):
        cover = plan_cover(profile, [0.25] * 4, [Capacity(1000, time_share=limit)])
        assert profile.time_share(cover.choices[0]) <= limit
    assert len(cover.choices[0]) == 4


def test_controls() -> None:
    profile = profile_of([unit(20, 2, 1), unit(10, 1, 1), unit(2, 0, 1)])
    capacities = [Capacity(1000), Capacity(35)]
    assert plan_suffix(profile, capacities).choices == (
        {0: 1.0, 1: 1.0, 2: 1.0},
        {1: 1.0, 2: 1.0},
    )
    assert plan_head(profile, capacities).uncovered == (0, 1)
    assert plan_everything(profile, capacities).uncovered == ()


def test_too_little_memory_says_how_much_is_needed_and_which_batch_would_do() -> None:
    profile = profile_of([unit(20, 2, 1, rest=30), unit(2, 0, 1, rest=30)])
    with pytest.raises(ConfigError, match=r"need 0.0 MiB; a mini-batch of at most \d+% of the"):
        plan_cover(profile, [0.5, 0.5], [Capacity(25, name="tiny")])
    with pytest.raises(ConfigError, match="no mini-batch would fit"):
        plan_cover(profile, [0.5, 0.5], [Capacity(5, name="tiny")])


def test_a_boost_lets_a_device_turn_to_other_units() -> None:
    profile = profile_of([unit(10, 0, 0), unit(10, 0, 0), unit(2, 0, 0)])
    capacities = [Capacity(28), Capacity(28)]
    values = [0.4, 0.3, 0.3]
    first = plan_cover(profile, values, capacities)
    turned = plan_cover(
        profile,
        values,
        capacities,
        boost=lambda device, u: 1.0 if u in first.choices[device] else 3.0,
    )
    assert not first.uncovered
    assert not turned.uncovered
