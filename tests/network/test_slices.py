import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_adsp.errors import ConfigError
from flower_adsp.network.slices import (
    Layer,
    Link,
    forward_end,
    gradients_ready,
    hidden_seconds,
    iteration_seconds,
    send,
    slice_layers,
)

FREE = Link(32e-6, 32e-6)  # one parameter a second each way

layer = st.builds(Layer, st.integers(0, 12), st.integers(0, 9), st.integers(0, 9))
chains = st.lists(layer, min_size=1, max_size=6)
schedules = st.sampled_from(["fifo", "p3", "reverse"])


@given(st.lists(st.integers(0, 200), max_size=8), st.integers(1, 60))
def test_slices_hold_each_parameter_once_and_only_the_last_of_a_layer_is_shorter(
    sizes: list[int], size: int
) -> None:
    found = slice_layers(sizes, size)
    held = [(each.layer, at) for each in found for at in range(each.start, each.stop)]
    assert held == [(layer, at) for layer, count in enumerate(sizes) for at in range(count)]
    for each, following in itertools.pairwise(found):
        assert each.size == size or each.layer != following.layer


def test_whole_layers() -> None:
    assert [(each.layer, each.size) for each in slice_layers([5, 0, 7], None)] == [(0, 5), (2, 7)]


def test_a_late_slice_of_high_priority_overtakes_what_the_link_has_not_been_given() -> None:
    ready = [0, 0, 0, 0.5]
    places = [3, 2, 1, 0]
    one = send(ready, places, [1] * 4, "p3", window=1)
    # The first of layer 1 is under way when the one of layer 0 comes.
    assert one == [4, 3, 1, 2]
    two = send(ready, places, [1] * 4, "p3", window=2)
    assert two == [4, 2, 1, 3]
    assert send(ready, places, [1] * 4, "fifo") == [1, 2, 3, 4]
    assert send(ready, places, [1] * 4, "reverse") == [1, 2, 3, 4]
    assert send([0, 0, 0], [0, 1, 2], [1] * 3, "reverse") == [3, 2, 1]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5), st.integers(0, 5)), max_size=12),
    schedules,
    st.integers(1, 4),
)
def test_a_link_is_never_idle_while_something_is_ready(
    items: list[tuple[int, int, int]], schedule: str, window: int
) -> None:
    ready = [float(item[0]) for item in items]
    seconds = [float(item[2]) for item in items]
    found = send(ready, [item[1] for item in items], seconds, schedule, window)
    assert all(a >= r + s for a, r, s in zip(found, ready, seconds, strict=True))
    # The last end of any order that keeps the link busy is the same.
    now = 0.0
    for at, length in sorted(zip(ready, seconds, strict=True)):
        now = max(now, at) + length
    assert max(found, default=0.0) == now


def test_equal_priorities_keep_their_order() -> None:
    assert send([0, 0, 0], [1, 1, 1], [1, 1, 1], "p3") == [1, 2, 3]


@given(chains)
def test_the_cost_view_of_a_download_in_forward_order(layers: list[Layer]) -> None:
    # a_l = Σ_{j ≤ l} s_j / B, f_l = max(f_{l−1}, a_l) + c_l.
    sizes = [each.parameters for each in layers]
    arrivals = [float(sum(sizes[: place + 1])) for place in range(len(sizes))]
    done = 0.0
    for arrival, each in zip(arrivals, layers, strict=True):
        done = max(done, arrival if each.parameters else 0.0) + each.forward_s
    down, _ = hidden_seconds(layers, FREE, "p3", slice_size=1)
    assert down == pytest.approx(sum(sizes) + sum(each.forward_s for each in layers) - done)


def test_forward_waits_for_each_layer() -> None:
    assert forward_end([1, 2, 10], [3, 3, 3]) == 13
    assert forward_end([1, 2, 3], [3, 3, 3]) == 10
    assert gradients_ready([Layer(1, 1, 5), Layer(1, 1, 2)]) == [7, 2]


def test_an_iteration_worked_by_hand() -> None:
    layers = [Layer(2, 1, 1), Layer(4, 1, 1)]
    # Backward: layer 1 at 1, layer 0 at 2. Whole: 2 + 6 + 6 + 2.
    assert iteration_seconds(layers, FREE, "whole") == 16
    # FIFO, whole layers: up 1..5, 5..7; down 5..9, 9..11; forward 11..12..13.
    assert iteration_seconds(layers, FREE, "fifo", None) == 13
    # P3, slices of 1: up layer 1 at 2, then layer 0 at 3, 4, then layer 1 at 5, 6, 7; down one
    # later each: layer 0 at 5, layer 1 at 8; forward 5..6, 8..9.
    assert iteration_seconds(layers, FREE, "p3", 1) == 9
    assert iteration_seconds(layers, FREE, "fifo", 1) == 10
    assert iteration_seconds(layers, FREE, "reverse", 1) == 10


@settings(max_examples=300)
@given(chains, st.integers(1, 4), st.integers(1, 3))
def test_priority_is_never_slower_than_fifo_where_slices_cost_nothing(
    layers: list[Layer], size: int, ratio: int
) -> None:
    # All slices alike; a shorter one that FIFO happens to send may end just in time for another.
    layers = [Layer(size * each.parameters, each.forward_s, each.backward_s) for each in layers]
    link = Link(32e-6, 32e-6 * ratio)
    p3, fifo, reverse = (
        iteration_seconds(layers, link, schedule, size) for schedule in ("p3", "fifo", "reverse")
    )
    assert p3 <= fifo + 1e-9
    assert p3 <= reverse + 1e-9
    assert fifo <= iteration_seconds(layers, link, "whole") + 1e-9


@given(chains, st.integers(1, 4), st.integers(1, 4), schedules)
def test_no_more_is_hidden_than_computing_or_transfer_lasts(
    layers: list[Layer], size: int, window: int, schedule: str
) -> None:
    down, up = hidden_seconds(layers, FREE, schedule, size, window)
    transfer = sum(each.parameters for each in layers)
    assert 0 <= down <= min(sum(each.forward_s for each in layers), transfer) + 1e-9
    assert 0 <= up <= min(sum(each.backward_s for each in layers), transfer) + 1e-9


def test_hidden_behind_one_step() -> None:
    layers = [Layer(2, 1, 1), Layer(4, 1, 1)]
    # Down in forward order: layer 0 at 2, layer 1 at 6: forward ends at 7 and not at 6 + 2.
    # Up: layer 1 may leave when layer 0 is still computed.
    assert hidden_seconds(layers, FREE, "p3", 1) == (1, 1)
    assert hidden_seconds(layers, FREE, "fifo", 1) == (0, 1)
    assert hidden_seconds(layers, FREE, "reverse", 1) == (0, 1)
    assert hidden_seconds(layers, FREE, "whole", 1) == (0, 0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: slice_layers([3], 0), "slice_size = 0"),
        (lambda: send([0], [0], [1], "lifo"), "schedule.*lifo"),
        (lambda: send([0], [0], [1], window=0), "window = 0"),
    ],
)
def test_what_cannot_be_is_refused(call: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call()
