"""Groups over sites: the published mapping, its correction, conflicts and colours."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_adsp.errors import ConfigError
from flower_adsp.network.groups import (
    GREEDY,
    MAPPINGS,
    PACKED,
    communication_groups,
    conflict_number,
    conflicts,
    group_sizes,
    map_groups,
    ring_order,
    same_speed,
    split_sites,
)


def boards(*free: int) -> list[str]:
    return [f"board-{board}" for board, count in enumerate(free) for _ in range(count)]


def layouts(most_boards: int, most_free: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, most_free), min_size=1, max_size=most_boards).map(tuple)


def test_the_published_example() -> None:
    sites = boards(5, 5, 5)
    groups = map_groups(sites, 5, GREEDY)
    # Three whole ones, and of the left-overs {4, 5 | 9} and {10 | 14, 15}, counted from 1.
    assert [3, 4, 8] in groups
    assert [9, 13, 14] in groups
    assert conflict_number(groups, sites) == 2
    assert Counter(bool(names) for names in split_sites(groups, sites)) == {False: 3, True: 2}


def test_where_the_published_mapping_is_not_the_best() -> None:
    sites = boards(1, 1, 2, 2)
    assert conflict_number(map_groups(sites, 2, GREEDY), sites) == 2
    assert conflict_number(map_groups(sites, 2, PACKED), sites) == 1


def test_the_papers_own_setting_has_no_conflict() -> None:
    sites = boards(5, 5, 5, 5, 5, 5, 2)  # 32 devices
    groups = map_groups(sites, 8, GREEDY)
    assert conflict_number(groups, sites) == 1
    assert set(communication_groups(groups, sites)) == {0}


@given(layouts(6, 6), st.integers(1, 8), st.sampled_from(MAPPINGS))
def test_all_are_in_one_group_of_the_right_size(
    free: tuple[int, ...], num_groups: int, mapping: str
) -> None:
    sites = boards(*free)
    if num_groups > len(sites):
        with pytest.raises(ConfigError, match="num_groups"):
            map_groups(sites, num_groups, mapping)
        return
    groups = map_groups(sites, num_groups, mapping)
    assert sorted(device for group in groups for device in group) == list(range(len(sites)))
    assert sorted(map(len, groups), reverse=True) == group_sizes(len(sites), num_groups)


@given(layouts(8, 7), st.integers(1, 10))
def test_published_or_packed_two_colours_do(free: tuple[int, ...], num_groups: int) -> None:
    sites = boards(*free)
    if num_groups > len(sites):
        return
    for mapping in (GREEDY, PACKED):
        groups = map_groups(sites, num_groups, mapping)
        colours, near = communication_groups(groups, sites), conflicts(groups, sites)
        assert conflict_number(groups, sites) <= 2
        assert set(colours) <= {0, 1}
        assert all(colours[a] != colours[b] for a in range(len(groups)) for b in near[a])
        assert all(len(others) <= 2 for others in near)


def partitions(devices: tuple[int, ...], size: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield the ways to cut site labels, as a sorted tuple, into groups of a size."""
    if not devices:
        yield []
        return
    first, rest = devices[0], devices[1:]
    for others in set(combinations(rest, size - 1)):
        left = list(rest)
        for other in others:
            left.remove(other)
        for more in partitions(tuple(left), size):
            yield [(first, *others), *more]


def best_conflict_number(sites: Sequence[int], size: int) -> int:
    found = len(sites)
    for groups in partitions(tuple(sites), size):
        split = [set(group) for group in groups if len(set(group)) > 1]
        meeting = Counter(site for names in split for site in names)
        found = min(found, max(meeting.values(), default=0))
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_packed_groups_of_equal_size_have_the_smallest_conflict_number(size: int) -> None:
    tried = 0
    for free in product(range(size + 1), repeat=4):
        sites = boards(*free)
        if not sites or len(sites) % size or len(sites) > 8:
            continue
        tried += 1
        best = best_conflict_number([int(site.split("-")[1]) for site in sites], size)
        groups = map_groups(sites, len(sites) // size, PACKED)
        assert conflict_number(groups, sites) == best, free
    assert tried > 30


@given(layouts(5, 6), st.integers(1, 6), st.randoms(use_true_random=False))
def test_changing_places_keeps_conflicts_and_evens_speeds(
    free: tuple[int, ...], num_groups: int, random: Random
) -> None:
    sites = boards(*free)
    if num_groups > len(sites):
        return
    speeds = [random.choice((0.5, 1.0, 3.9)) for _ in sites]
    groups = map_groups(sites, num_groups)
    changed = same_speed(groups, sites, speeds)
    for before, after in zip(groups, changed, strict=True):
        assert Counter(sites[device] for device in before) == Counter(
            sites[device] for device in after
        )

    def spread(groups: Sequence[Sequence[int]]) -> float:
        means = [sum(speeds[device] for device in group) / len(group) for group in groups]
        return max(means) - min(means)

    assert spread(changed) <= spread(groups)


def test_a_fast_and_a_slow_half_of_a_site_are_mixed() -> None:
    sites = boards(4)
    assert same_speed([[0, 1], [2, 3]], sites, [2.0, 2.0, 1.0, 1.0]) == [[0, 2], [1, 3]]


def test_three_that_all_meet_take_three_colours() -> None:
    sites = ["a", "b", "b", "c", "c", "a"]
    groups = [[0, 1], [2, 3], [4, 5]]
    assert sorted(communication_groups(groups, sites)) == [0, 1, 2]


def test_a_ring_passes_each_site_once() -> None:
    sites = ["b", "a", "b", "a"]
    assert ring_order([0, 1, 2, 3], sites) == [1, 3, 0, 2]


def test_an_unknown_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match="integrity-greedy"):
        map_groups(["a"], 1, "random")
