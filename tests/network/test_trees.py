"""Packed spanning trees, against the figures of Blink's paper and exact optima."""

import itertools

import networkx as nx
import numpy as np
import pytest
from scipy.optimize import linprog

from benchmarks.network import DGX_1V, both_ways, random_links
from flower_adsp.errors import ConfigError
from flower_adsp.network.trees import (
    LinkGraph,
    Resource,
    best_rate,
    candidate_trees,
    disjoint_trees,
    pack_trees,
    private_links,
    shared_cards,
)


def is_spanning(tree: frozenset[tuple[int, int]], root: int, nodes: int) -> bool:
    graph = nx.DiGraph(list(tree))
    graph.add_nodes_from(range(nodes))
    return nx.is_arborescence(graph) and graph.in_degree(root) == 0


def check(graph: LinkGraph, root: int, optimum: float) -> int:
    packing = pack_trees(graph, root)
    load = sum(rate * graph.use(tree) for tree, rate in packing.trees)
    assert np.all(load <= graph.capacities * (1 + 1e-9))
    assert all(is_spanning(tree, root, graph.num_nodes) for tree, _ in packing.trees)
    assert len(packing.trees) <= graph.num_nodes
    assert packing.rate <= optimum * (1 + 1e-6)
    assert packing.rate >= 0.95 * optimum * (1 - 1e-9)
    return len(packing.trees)


def max_flow_bound(links: dict[tuple[int, int], float], root: int, nodes: int) -> float:
    directed = nx.DiGraph()
    directed.add_weighted_edges_from(((a, b, c) for (a, b), c in links.items()), weight="capacity")
    flows = [nx.maximum_flow_value(directed, root, node) for node in range(nodes) if node != root]
    return float(min(flows))


def test_a_dgx_1v_has_six_trees_of_rate_one() -> None:
    packing = pack_trees(private_links(8, both_ways(DGX_1V)), 0)
    assert packing.rate == pytest.approx(6)
    assert [rate for _, rate in packing.trees] == [1.0] * 6


def test_a_dgx_1p_has_four() -> None:
    graph = private_links(8, both_ways(dict.fromkeys(DGX_1V, 1)))
    packing = pack_trees(graph, 0)
    assert best_rate(graph, 0) == pytest.approx(4)
    assert [rate for _, rate in packing.trees] == [1.0] * 4
    # Among the few trees that multiplicative weights find, there are no four that are disjoint.
    assert pack_trees(graph, 0, candidates="mwu").rate < 4


@pytest.mark.parametrize("seed", range(20))
def test_there_are_as_many_disjoint_trees_as_the_smallest_cut(seed: int) -> None:
    root, links = random_links(200 + seed)
    nodes = 1 + max(max(edge) for edge in links)
    trees = disjoint_trees(private_links(nodes, links), root, 1.0)
    assert len(trees) == max_flow_bound(links, root, nodes)
    assert all(is_spanning(tree, root, nodes) for tree in trees)
    for edge, capacity in links.items():
        assert sum(edge in tree for tree in trees) <= capacity


@pytest.mark.parametrize("seed", range(25))
def test_private_links_come_within_a_twentieth_of_the_cut(seed: int) -> None:
    root, links = random_links(seed)
    nodes = 1 + max(max(edge) for edge in links)
    check(private_links(nodes, links), root, max_flow_bound(links, root, nodes))


@pytest.mark.parametrize("seed", range(15))
def test_shared_cards_come_within_a_twentieth_of_the_programme(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    nodes = int(numbers.integers(2, 8))
    up, down = (numbers.choice([10.0, 50.0, 100.0], nodes).tolist() for _ in range(2))
    graph = shared_cards(up, down)
    check(graph, 0, best_rate(graph, 0))


@pytest.mark.parametrize("seed", range(5))
def test_the_best_rate_is_that_over_all_trees(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    graph = shared_cards(*(numbers.choice([10.0, 30.0, 70.0], (2, 4)).tolist()))
    trees = [
        frozenset(edges)
        for edges in itertools.combinations(graph.edges, 3)
        if is_spanning(frozenset(edges), 0, 4)
    ]
    assert len(trees) == 4**2
    uses = np.array([graph.use(tree) for tree in trees]).T
    exact = -linprog(-np.ones(len(trees)), A_ub=uses, b_ub=graph.capacities).fun
    assert best_rate(graph, 0) == pytest.approx(exact, rel=1e-6)


def test_the_best_rate_of_private_links_is_the_smallest_cut() -> None:
    for seed in range(10):
        root, links = random_links(100 + seed)
        nodes = 1 + max(max(edge) for edge in links)
        assert best_rate(private_links(nodes, links), root) == pytest.approx(
            max_flow_bound(links, root, nodes)
        )


def star(relays: int) -> LinkGraph:
    """Return a server with a card of 100 and four devices, so many of which can forward."""
    edges = {(0, device) for device in range(1, 5)}
    resources = [Resource("server", 100.0, frozenset(edges))]
    resources += [Resource(f"down {d}", 100.0, frozenset({(0, d)})) for d in range(1, 5)]
    for relay in range(1, 1 + relays):
        others = frozenset((relay, device) for device in range(1, 5) if device != relay)
        resources.append(Resource(f"relay {relay}", 100.0, others))
    return LinkGraph(5, tuple(resources))


def test_a_star_has_nothing_to_choose_and_a_relay_doubles_it() -> None:
    assert pack_trees(star(0), 0).rate == pytest.approx(25)
    assert len(pack_trees(star(0), 0).trees) == 1
    assert best_rate(star(1), 0) == pytest.approx(50)
    assert pack_trees(star(1), 0).rate >= 0.95 * 50


def test_more_weight_for_smaller_epsilon() -> None:
    graph = private_links(8, both_ways(DGX_1V))
    rates = [
        sum(weight for _, weight in candidate_trees(graph, 0, epsilon)) for epsilon in (0.5, 0.15)
    ]
    assert rates[0] < rates[1] <= 6 + 1e-9
    assert rates[1] > 0.9 * 6


def test_reversing_twice_changes_nothing() -> None:
    graph = shared_cards([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    assert graph.reversed().reversed() == graph
    assert best_rate(graph.reversed(), 0) == pytest.approx(
        best_rate(shared_cards([4.0, 5.0, 6.0], [1.0, 2.0, 3.0]), 0)
    )


def test_wrong_graphs_are_named() -> None:
    with pytest.raises(ConfigError, match=r"does not reach the nodes \[2\]"):
        pack_trees(private_links(3, {(0, 1): 1.0}), 0)
    with pytest.raises(ConfigError, match="root = 5"):
        pack_trees(private_links(2, {(0, 1): 1.0}), 5)
    with pytest.raises(ConfigError, match=r"capacity of 0->1 = -1"):
        private_links(2, {(0, 1): -1.0})
    with pytest.raises(ConfigError, match="two different nodes"):
        private_links(2, {(0, 7): 1.0})
    with pytest.raises(ConfigError, match="epsilon = 1"):
        candidate_trees(private_links(2, {(0, 1): 1.0}), 0, 1.0)
    with pytest.raises(ConfigError, match=r"candidates.*all"):
        pack_trees(private_links(2, {(0, 1): 1.0}), 0, candidates="all")
    assert pack_trees(LinkGraph(1, ()), 0).rate == 0
