import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_adsp.errors import ConfigError
from flower_adsp.network.collectives import (
    CHUNK,
    COLLECTIVES,
    Card,
    binary_trees,
    plan_collective,
)
from tests.network.test_trees import is_spanning

EQUAL = (Card(100.0, 100.0),) * 5


def rates(kind: str, cards: tuple[Card, ...]) -> tuple[float, float]:
    plan = plan_collective(kind, cards)
    return plan.reduce_mbps, plan.broadcast_mbps


def test_of_five_equal_cards() -> None:
    # The server has to send to four, and to receive from four.
    assert rates("star", EQUAL) == (25, 25)
    # Each of five steps less one carries a fifth.
    assert rates("ring", EQUAL) == (125, 125)
    # A chain loads each card once each way.
    assert rates("packed-trees", EQUAL) == pytest.approx((100, 100), rel=0.05)
    # An inner node sends half the data twice.
    assert rates("binary-trees", EQUAL) == (100, 100)


def test_seconds_of_so_many_bytes() -> None:
    cards = tuple(Card(8.0, 8.0, 0.25) for _ in range(3))
    star = plan_collective("star", cards)
    # 1 MB at 4 Mbit/s, after the latency of both ends.
    assert star.seconds(1_000_000, upload=True) == pytest.approx(0.5 + 2.0)
    assert star.seconds(0, upload=True) == 0
    ring = plan_collective("ring", cards)
    assert ring.seconds(1_000_000, upload=False) == pytest.approx(2 * 0.5 + 2 / 3)


def test_a_chunk_is_forwarded_once_it_has_come() -> None:
    cards = (Card(8.0, 8.0, 0.25),) * 4
    plan = plan_collective("binary-trees", cards)
    chunk = CHUNK * 8 / 8e6
    # Server, its child, and that one's children: two hops, the first without waiting for a chunk.
    assert plan.start_s == pytest.approx(2 * 0.5 + chunk)


@given(st.integers(2, 40))
def test_two_binary_trees_span_and_share_no_inner_node(nodes: int) -> None:
    first, second = binary_trees(nodes)
    inner = []
    for tree in (first, second):
        assert is_spanning(tree, 0, nodes)
        senders = [a for a, _ in tree]
        assert max(senders.count(node) for node in set(senders)) <= 2
        inner.append({a for a in senders if a})
    # The middle one may be both where the number of nodes is even.
    assert len(inner[0] & inner[1]) <= 1


@settings(deadline=None, max_examples=15)
@given(st.lists(st.tuples(*[st.sampled_from([10.0, 50.0, 100.0])] * 2), min_size=2, max_size=6))
def test_no_single_tree_beats_the_packed_ones_where_cards_are_alike_both_ways(
    pairs: list[tuple[float, float]],
) -> None:
    cards = tuple(Card(up, up) for up, _ in pairs)
    packed, best, star = (min(rates(kind, cards)) for kind in ("packed-trees", "best-tree", "star"))
    assert packed >= 0.94 * best
    assert best >= star * (1 - 1e-9)


def test_trees_carry_all_of_the_data() -> None:
    cards = (Card(100.0, 100.0), Card(50.0, 20.0), Card(10.0, 10.0), Card(100.0, 50.0))
    for kind, upload in itertools.product(COLLECTIVES, (True, False)):
        plan = plan_collective(kind, cards)
        assert plan.seconds(1_000_000, upload=upload) > 0
        if plan.trees:
            assert sum(part for _, part in plan.trees) == pytest.approx(1)
            assert all(is_spanning(tree, 0, 4) for tree, _ in plan.trees)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"network\.collective.*tree-of-life"):
        plan_collective("tree-of-life", EQUAL)
    with pytest.raises(ConfigError, match="at least 2"):
        plan_collective("star", EQUAL[:1])
