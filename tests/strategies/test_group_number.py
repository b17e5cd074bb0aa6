"""How many groups are tried, and which number is kept."""

import pytest
from flower_adsp.strategies.group_number import collapses, next_number
from hypothesis import given
from hypothesis import strategies as st

accuracy = st.floats(0.0, 1.0)


def found(by_number: dict[int, float], most: int, chance: float = 0.1) -> tuple[int, list[int]]:
    """Return the number kept, and those that were tried."""
    tried: list[int] = []
    while True:
        number, is_kept = next_number([by_number[n] for n in tried], chance, most)
        if is_kept:
            return number, tried
        tried.append(number)


def test_the_number_before_the_collapse_is_kept() -> None:
    """What the paper shows for VGG-11, of which its authors took four groups."""
    shown = {1: 0.62, 2: 0.27, 4: 0.28, 8: 0.15, 16: 0.5}
    assert found(shown, 32) == (4, [1, 2, 4, 8])


def test_all_numbers_up_to_the_devices_are_tried() -> None:
    always = dict.fromkeys((1, 2, 4, 8, 16, 32), 0.9)
    assert found(always, 32) == (32, [1, 2, 4, 8, 16, 32])
    assert found(always, 7) == (4, [1, 2, 4])
    assert found(always, 1) == (1, [])


def test_one_group_is_kept_where_nothing_learns() -> None:
    assert found({1: 0.1}, 32) == (1, [1])
    assert found({1: 0.5, 2: 0.11}, 32) == (1, [1, 2])


@pytest.mark.parametrize(
    ("value", "of_one", "chance", "expected"),
    [
        (0.149, 0.4, 0.1, True),
        (0.151, 0.4, 0.1, False),
        (0.199, 0.8, 0.1, True),
        (0.201, 0.8, 0.1, False),
        (0.74, 0.9, 0.5, True),
    ],
)
def test_a_collapse_is_near_chance_or_far_below_one_group(
    value: float, of_one: float, chance: float, expected: bool
) -> None:
    assert collapses(value, of_one, chance) is expected


@given(st.lists(accuracy, min_size=8, max_size=8), accuracy, st.integers(1, 128))
def test_what_is_kept_has_been_tried_and_has_not_collapsed(
    values: list[float], chance: float, most: int
) -> None:
    by_number = {2**index: value for index, value in enumerate(values)}
    kept, tried = found(by_number, most, chance)
    assert 1 <= kept <= most
    assert tried == [2**index for index in range(len(tried))]
    if kept > 1:
        assert not any(collapses(by_number[n], values[0], chance) for n in tried if n <= kept)
    if tried and tried[-1] != kept:
        assert tried[-1] == 2 * kept
        assert collapses(by_number[2 * kept], values[0], chance)
