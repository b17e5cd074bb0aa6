"""How long it takes to add up what all nodes have, and to give all of them the sum.

A collective reduces along trees to a root and broadcasts along the same trees, as Blink has it
(Wang and others, MLSys 2020, https://arxiv.org/abs/1910.04940); its rivals are other trees, and the
ring. Data are sent in chunks that are forwarded as they come, so that what counts is the rate of
the fullest network card, and the depth of the trees only for the first chunk.

Flower's nodes send to the server only. These collectives are those of a transport of one's own,
in virtual time, but for the star.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from flower_adsp.errors import require, unknown
from flower_adsp.network.trees import Edge, LinkGraph, Tree, pack_trees, shared_cards

STAR, RING = "star", "ring"
COLLECTIVES = (STAR, RING, "binary-trees", "best-tree", "packed-trees")
CHUNK = 1_000_000  # bytes; what Blink begins with


@dataclass(frozen=True)
class Card:
    """A node's network card: megabits per second out and in, and seconds for the first bit."""

    up_mbps: float
    down_mbps: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Collective:
    """How a reduction and a broadcast go.

    Attributes
    ----------
    kind : str
        One of `COLLECTIVES`.
    trees : tuple[tuple[Tree, float], ...]
        For the broadcast: the trees, and the part of the data that each carries; empty for a ring.
    reduce_mbps, broadcast_mbps : float
        Rates at which all data pass, once all links are busy.
    start_s : float
        Seconds, each way, until the first chunk has come to the last node.
    """

    kind: str
    trees: tuple[tuple[Tree, float], ...]
    reduce_mbps: float
    broadcast_mbps: float
    start_s: float

    def seconds(self, num_bytes: int, *, upload: bool) -> float:
        """Return how long it takes to add up so many bytes of each node, or to give them to all."""
        rate = self.reduce_mbps if upload else self.broadcast_mbps
        return self.start_s + num_bytes * 8 / (rate * 1e6) if num_bytes else 0.0

    def describe(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return {
            "reduce_mbps": self.reduce_mbps,
            "broadcast_mbps": self.broadcast_mbps,
            "start_s": self.start_s,
            "trees": [{"part": part, "edges": sorted(tree)} for tree, part in self.trees],
        }


@lru_cache(maxsize=64)
def plan_collective(kind: str, cards: tuple[Card, ...]) -> Collective:
    """Plan a collective between nodes of which each can send to each.

    Parameters
    ----------
    kind : str
        ``star``: the root, node 0, exchanges everything with each; ``ring``: all pass on buckets in
        a ring; ``binary-trees``: two binary trees, in each of which the other's inner nodes are
        leaves, carry half of the data each (Sanders, Speck and Träff, 2009,
        https://doi.org/10.1016/j.parco.2009.09.001); ``best-tree``: the tree of the highest rate
        among those that were packed and the star; ``packed-trees``: Blink's.
    cards : tuple[Card, ...]
        Each node's; node 0 is the server.
    """
    if kind not in COLLECTIVES:
        raise unknown("network.collective", kind, COLLECTIVES)
    require(len(cards) >= 2, "cards", len(cards), "at least 2, of the server and a device")
    if kind == RING:
        return _ring(cards)
    graph = shared_cards([card.up_mbps for card in cards], [card.down_mbps for card in cards])
    star: Tree = frozenset((0, node) for node in range(1, len(cards)))
    if kind == STAR:
        return _along([(star, 1.0)], graph, cards, kind)
    if kind == "binary-trees":
        return _along([(tree, 0.5) for tree in binary_trees(len(cards))], graph, cards, kind)
    packed = pack_trees(_slower_way(cards), 0)
    if kind == "packed-trees":
        parts = [(tree, rate / packed.rate) for tree, rate in packed.trees]
        return _along(parts, graph, cards, kind)
    singles = [
        _along([(tree, 1.0)], graph, cards, kind)
        for tree in (star, *(tree for tree, _ in packed.trees))
    ]
    return max(singles, key=lambda single: min(single.reduce_mbps, single.broadcast_mbps))


def binary_trees(num_nodes: int) -> tuple[Tree, Tree]:
    """Return two binary trees from node 0, such that no other node is an inner one of both."""
    others = list(range(1, num_nodes))
    return _binary(others), _binary(others[::-1])


def _binary(others: Sequence[int]) -> Tree:
    """Return a binary tree whose inner nodes are the first half, and that node 0 hangs from."""
    edges: set[Edge] = {(0, others[0])}
    for place in range(1, len(others)):
        edges.add((others[(place - 1) // 2], others[place]))
    return frozenset(edges)


def _slower_way(cards: Sequence[Card]) -> LinkGraph:
    """Return the mesh with each card as fast as its slower way, as trees are used both ways."""
    both = [min(card.up_mbps, card.down_mbps) for card in cards]
    return shared_cards(both, both)


def _along(
    parts: Sequence[tuple[Tree, float]], graph: LinkGraph, cards: Sequence[Card], kind: str
) -> Collective:
    """Return the collective along trees that each carry a part of the data."""
    back = [(frozenset((b, a) for a, b in tree), part) for tree, part in parts]
    deepest = max(_latest(tree, cards) for tree, _ in parts)
    return Collective(kind, tuple(parts), _rate(back, graph), _rate(parts, graph), deepest)


def _rate(parts: Sequence[tuple[Tree, float]], graph: LinkGraph) -> float:
    load = sum(part * graph.use(tree) for tree, part in parts)
    assert isinstance(load, np.ndarray)
    used = load > 0
    return float(np.min(graph.capacities[used] / load[used]))


def _latest(tree: Tree, cards: Sequence[Card]) -> float:
    """Return when the first chunk is everywhere: latencies, and its time over each hop but one."""
    after = {0: 0.0}
    waiting = sorted(tree)
    while waiting:
        for edge in list(waiting):
            a, b = edge
            if a in after:
                rate = min(cards[a].up_mbps, cards[b].down_mbps) * 1e6
                chunk = CHUNK * 8 / rate if a else 0.0
                after[b] = after[a] + cards[a].latency_s + cards[b].latency_s + chunk
                waiting.remove(edge)
    return max(after.values())


def _ring(cards: Sequence[Card]) -> Collective:
    """Return the bucketed ring: n − 1 steps each way, of the n-th part of the data each."""
    count = len(cards)
    slowest = min(min(card.up_mbps, card.down_mbps) for card in cards)
    rate = slowest * count / (count - 1)
    following = [*cards[1:], cards[0]]
    latency = max(a.latency_s + b.latency_s for a, b in zip(cards, following, strict=True))
    return Collective(RING, (), rate, rate, (count - 1) * latency)
