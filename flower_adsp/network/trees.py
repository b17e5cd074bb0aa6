"""Spanning trees packed into a network, so that a collective uses all its links.

Wang, Venkataraman, Phanishayee, Thelin, Devanur and Stoica, "Blink: Fast and Generic Collectives
for Distributed ML", MLSys 2020, https://arxiv.org/abs/1910.04940: many trees found by
multiplicative weights, then few of them chosen by an integer programme.

Blink's links are private to a pair of nodes. Here a tree takes from *resources*, each with a
capacity and the edges that share it: a link, a node's network card, a site's uplink. With one
resource an edge the two are the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from flower_adsp.errors import ConfigError, require, unknown

Edge = tuple[int, int]
Tree = frozenset[Edge]
CANDIDATES = ("mwu", "both")
_HALVINGS = 8  # of the unit, before weights are taken as they come


@dataclass(frozen=True)
class Resource:
    """What several edges share.

    Attributes
    ----------
    name : str
        For messages and plans.
    capacity : float
        Mbit/s, or any other unit that all resources have.
    edges : frozenset[Edge]
        The directed edges that take from it.
    """

    name: str
    capacity: float
    edges: frozenset[Edge]

    def __post_init__(self) -> None:
        """Check the capacity."""
        ok = isfinite(self.capacity) and self.capacity > 0
        require(ok, f"capacity of {self.name}", self.capacity, "above 0")


@dataclass(frozen=True)
class LinkGraph:
    """Nodes, the directed edges between them, and what the edges share.

    Attributes
    ----------
    num_nodes : int
        Nodes are numbered from 0.
    resources : tuple[Resource, ...]
        Each edge is in at least one.
    """

    num_nodes: int
    resources: tuple[Resource, ...]

    def __post_init__(self) -> None:
        """Check that edges join two different nodes that there are."""
        require(self.num_nodes >= 1, "num_nodes", self.num_nodes, "at least 1")
        for edge in self.edges:
            ok = edge[0] != edge[1] and all(0 <= node < self.num_nodes for node in edge)
            require(ok, "edge", edge, f"two different nodes below {self.num_nodes}")

    @cached_property
    def edges(self) -> list[Edge]:
        """All edges, sorted."""
        return sorted(set().union(*(resource.edges for resource in self.resources)))

    @cached_property
    def shares(self) -> NDArray[Any]:
        """Whether an edge takes from a resource, of shape (resources, edges)."""
        return np.array(
            [[edge in resource.edges for edge in self.edges] for resource in self.resources], float
        )

    @cached_property
    def capacities(self) -> NDArray[Any]:
        """The capacity of each resource."""
        return np.array([resource.capacity for resource in self.resources])

    def reversed(self) -> "LinkGraph":
        """Return the graph with each edge the other way round, as a reduction sees it."""
        return LinkGraph(
            self.num_nodes,
            tuple(
                Resource(r.name, r.capacity, frozenset((b, a) for a, b in r.edges))
                for r in self.resources
            ),
        )

    def use(self, tree: Iterable[Edge]) -> NDArray[Any]:
        """Return u_ρ, how many edges of a tree each resource has."""
        index = {edge: position for position, edge in enumerate(self.edges)}
        return np.asarray(self.shares[:, [index[edge] for edge in sorted(tree)]].sum(axis=1))


def private_links(num_nodes: int, capacities: Mapping[Edge, float]) -> LinkGraph:
    """Return a graph whose directed edges each have a capacity of their own."""
    resources = [
        Resource(f"{a}->{b}", capacity, frozenset({(a, b)}))
        for (a, b), capacity in sorted(capacities.items())
    ]
    return LinkGraph(num_nodes, tuple(resources))


def shared_cards(up: Sequence[float], down: Sequence[float]) -> LinkGraph:
    """Return a full mesh in which all edges out of a node share its card, and all into it.

    Parameters
    ----------
    up, down : Sequence[float]
        Capacity of each node's card, each way.
    """
    nodes = range(len(up))
    require(len(up) == len(down), "down", len(down), f"one capacity for each of {len(up)} nodes")
    resources = []
    for node in nodes:
        others = [other for other in nodes if other != node]
        resources.append(Resource(f"up {node}", up[node], frozenset((node, o) for o in others)))
        resources.append(Resource(f"down {node}", down[node], frozenset((o, node) for o in others)))
    return LinkGraph(len(up), tuple(resources))


@dataclass(frozen=True)
class Packing:
    """Trees from one root, and the rate of each.

    Attributes
    ----------
    root : int
        Where the trees begin.
    trees : tuple[tuple[Tree, float], ...]
        Each a spanning tree by its edges, with its rate in the unit of the capacities.
    bound : float
        The rate of all candidates taken together, in fractions.
    """

    root: int
    trees: tuple[tuple[Tree, float], ...]
    bound: float

    @property
    def rate(self) -> float:
        """The rate of all trees together."""
        return sum(rate for _, rate in self.trees)

    def describe(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return {
            "root": self.root,
            "rate": self.rate,
            "bound": self.bound,
            "trees": [{"rate": rate, "edges": sorted(tree)} for tree, rate in self.trees],
        }


def candidate_trees(graph: LinkGraph, root: int, epsilon: float = 0.2) -> list[tuple[Tree, float]]:
    """Return trees and weights that fill the network, by multiplicative weights.

    Maximises Σ w_T under Σ_T u_ρ(T) w_T <= c_ρ for each resource ρ (Blink, equations 1 to 3, where
    ρ is an edge). Every resource has a price; the cheapest arborescence gets as much weight as one
    of its resources has capacity for, and the prices of what it uses rise. In the form of Garg and
    Könemann, 2007, https://doi.org/10.1137/S0097539704446232; Blink's ε could not be found.

    Parameters
    ----------
    graph : LinkGraph
        The network.
    root : int
        Where the trees begin.
    epsilon : float (default: 0.2)
        ε: smaller is closer to the optimum, and slower by 1/ε².

    Returns
    -------
    list[tuple[Tree, float]]
        Trees with feasible weights.

    Raises
    ------
    ConfigError
        If some node cannot be reached from the root.
    """
    require(0 < epsilon < 1, "epsilon", epsilon, "above 0 and below 1")
    _check_reach(graph, root)
    capacities, shares = graph.capacities, graph.shares
    count = len(capacities)
    start = (1 + epsilon) * ((1 + epsilon) * count) ** (-1 / epsilon)
    prices = start / capacities
    weights: dict[Tree, float] = {}
    while prices @ capacities < 1:
        tree = cheapest_tree(graph, root, shares.T @ prices)
        use = graph.use(tree)
        used = use > 0
        flow = float(np.min(capacities[used] / use[used]))
        weights[tree] = weights.get(tree, 0.0) + flow
        prices = prices * (1 + epsilon * flow * use / capacities)
    if not weights:
        return []
    load = sum(weight * graph.use(tree) for tree, weight in weights.items())
    scale = float(np.max(load / capacities))
    return [(tree, weight / scale) for tree, weight in weights.items()]


def cheapest_tree(graph: LinkGraph, root: int, lengths: NDArray[Any]) -> Tree:
    """Return the spanning arborescence from `root` with the least sum of lengths.

    Parameters
    ----------
    graph : LinkGraph
        The network.
    root : int
        Where it begins.
    lengths : NDArray
        One for each of ``graph.edges``.
    """
    # networkx loses lengths that are tiny, so they are taken relative to the largest.
    relative = lengths / lengths.max()
    directed = nx.DiGraph()
    directed.add_nodes_from(range(graph.num_nodes))
    directed.add_weighted_edges_from(
        (a, b, float(length))
        for (a, b), length in zip(graph.edges, relative, strict=True)
        if b != root
    )
    return frozenset(nx.minimum_spanning_arborescence(directed).edges)


def pack_trees(
    graph: LinkGraph,
    root: int,
    epsilon: float = 0.2,
    threshold: float = 0.05,
    most_trees: int | None = None,
    candidates: str = "both",
) -> Packing:
    """Return few trees whose rates together come close to the best there is.

    Blink takes trees of rate 1 from the candidates, by an integer programme (equations 4 to 7), and
    relaxes that where it falls short by more than a threshold; how, could not be found. Here rates
    are whole multiples of a unit, first the least capacity; if the best falls short, the unit is
    halved, up to eight times, and after that rates may be anything.

    Parameters
    ----------
    graph : LinkGraph
        The network.
    root : int
        Where the trees begin.
    epsilon : float (default: 0.2)
        As for `candidate_trees`.
    threshold : float (default: 0.05)
        The part of the candidates' rate that may be given up.
    most_trees : int or None (default: None)
        The most trees; None: as many as there are nodes.
    candidates : str (default: "both")
        ``mwu`` chooses among the trees that multiplicative weights found, as Blink does; ``both``
        among `disjoint_trees`, too, where links are private and one tree a node will do.

    Returns
    -------
    Packing
        The trees, the one with the highest rate first.

    Raises
    ------
    ConfigError
        If some node cannot be reached from the root.
    """
    require(0 <= threshold < 1, "threshold", threshold, "at least 0 and below 1")
    if graph.num_nodes == 1:
        return Packing(root, (), 0.0)
    if candidates not in CANDIDATES:
        raise unknown("candidates", candidates, CANDIDATES)
    trees = [tree for tree, _ in candidate_trees(graph, root, epsilon)]
    least = float(graph.capacities.min())
    is_private = all(len(resource.edges) == 1 for resource in graph.resources)
    if candidates == "both" and is_private:
        found = disjoint_trees(graph, root, least)
        trees = list(dict.fromkeys([*trees, *found])) if len(found) <= graph.num_nodes else trees
    uses = np.array([graph.use(tree) for tree in trees]).T
    most = graph.num_nodes if most_trees is None else most_trees
    require(most >= 1, "most_trees", most, "at least 1")
    bound = _choose(uses, graph.capacities, None, len(trees)).sum()
    chosen = np.zeros(len(trees))
    for unit in (*(least / 2**halving for halving in range(_HALVINGS)), None):
        rates = _choose(uses, graph.capacities, unit, most)
        if rates.sum() > chosen.sum():
            chosen = rates
        if chosen.sum() >= (1 - threshold) * bound:
            break
    packed = sorted(
        ((trees[i], float(rate)) for i, rate in enumerate(chosen) if rate > 0),
        key=lambda item: (-item[1], sorted(item[0])),
    )
    return Packing(root, tuple(packed), float(bound))


def _choose(
    uses: NDArray[Any], capacities: NDArray[Any], unit: float | None, most: int
) -> NDArray[Any]:
    """Return the rates of at most so many trees that come to the most, within the capacities.

    With a `unit`, rates are whole multiples of it.
    """
    count = uses.shape[1]
    step = 1.0 if unit is None else unit
    top = np.floor(np.min(_ratio(capacities[:, None] / step, uses), axis=0) + 1e-9)
    if unit is None:
        top = np.min(_ratio(capacities[:, None], uses), axis=0)
    limited = most < count
    # Variables: how many units each tree has, and, where their number is limited, whether it has.
    size = 2 * count if limited else count
    gain = np.zeros(size)
    gain[:count] = -1.0
    scale = capacities.max()
    rows = [LinearConstraint(np.pad(uses * step / scale, ((0, 0), (0, size - count))),
                             ub=capacities / scale)]  # fmt: skip
    whole = np.zeros(size)
    whole[:count] = unit is not None
    upper = np.concatenate([top, np.ones(size - count)])
    if limited:
        whole[count:] = 1
        linked = np.hstack([np.eye(count), -np.diag(top)])
        rows.append(LinearConstraint(linked, ub=np.zeros(count)))
        rows.append(LinearConstraint(np.concatenate([np.zeros(count), np.ones(count)]), ub=most))
        gain[count:] = 1e-6  # of two that come to the same, the one with fewer trees
    found = milp(
        gain, constraints=rows, bounds=Bounds(0, upper), integrality=whole,
        options={"time_limit": 20.0, "mip_rel_gap": 1e-3},
    )  # fmt: skip
    if found.x is None:
        return np.zeros(count)
    values = found.x[:count]
    values = np.round(values) if unit is not None else np.where(values > 1e-9 * scale, values, 0.0)
    rates = np.asarray(values * step)
    load = np.max(uses @ rates / capacities)
    return rates / load if load > 1 else rates  # the solver's own tolerance


def _ratio(above: NDArray[Any], below: NDArray[Any]) -> NDArray[Any]:
    ratio = np.full(below.shape, np.inf)
    np.divide(above, below, out=ratio, where=below > 0)
    return ratio


def disjoint_trees(graph: LinkGraph, root: int, unit: float) -> list[Tree]:
    """Return as many trees of rate `unit` as private links hold, one after another.

    There are as many as the smallest cut has units (Edmonds, 1973). Each is grown edge by edge, by
    edges without which what is left still has a cut for the trees to come (Lovász, 1976,
    https://doi.org/10.1016/0095-8956(76)90049-6).

    Parameters
    ----------
    graph : LinkGraph
        A network in which no two edges share anything.
    root : int
        Where the trees begin.
    unit : float
        The rate of each tree.
    """
    left = nx.DiGraph()
    left.add_nodes_from(range(graph.num_nodes))
    for resource in graph.resources:
        (edge,) = resource.edges
        before = left.get_edge_data(*edge, {"capacity": np.inf})["capacity"]
        left.add_edge(*edge, capacity=min(int(resource.capacity / unit + 1e-9), before))
    others = [node for node in range(graph.num_nodes) if node != root]
    count = min((int(nx.maximum_flow_value(left, root, node)) for node in others), default=0)
    trees = []
    for to_come in range(count - 1, -1, -1):
        inside, tree = {root}, set()
        while len(inside) < graph.num_nodes:
            for a, b in sorted(left.edges):
                if a not in inside or b in inside or left[a][b]["capacity"] < 1:
                    continue
                left[a][b]["capacity"] -= 1
                if not to_come or nx.maximum_flow_value(left, root, b) >= to_come:
                    inside.add(b)
                    tree.add((a, b))
                    break
                left[a][b]["capacity"] += 1
        trees.append(frozenset(tree))
    return trees


def best_rate(graph: LinkGraph, root: int) -> float:
    """Return the highest rate that any packing of trees has, exactly.

    Solves the linear programme of `candidate_trees` by column generation: the trees so far give
    prices; the cheapest tree at these prices is added, until none costs less than 1.
    """
    _check_reach(graph, root)
    if graph.num_nodes == 1:
        return 0.0
    trees = [cheapest_tree(graph, root, graph.shares.T @ (1 / graph.capacities))]
    while True:
        uses = np.array([graph.use(tree) for tree in trees]).T
        solved = linprog(-np.ones(len(trees)), A_ub=uses, b_ub=graph.capacities, method="highs")
        prices = -solved.ineqlin.marginals
        lengths = graph.shares.T @ prices
        if lengths.max() <= 0:
            return float(-solved.fun)
        tree = cheapest_tree(graph, root, lengths)
        if graph.use(tree) @ prices >= 1 - 1e-9 or tree in trees:
            return float(-solved.fun)
        trees.append(tree)


def _check_reach(graph: LinkGraph, root: int) -> None:
    require(0 <= root < graph.num_nodes, "root", root, f"a node below {graph.num_nodes}")
    directed = nx.DiGraph(graph.edges)
    directed.add_nodes_from(range(graph.num_nodes))
    missing = set(range(graph.num_nodes)) - nx.descendants(directed, root) - {root}
    if missing:
        raise ConfigError(
            f"root = {root} does not reach the nodes {sorted(missing)}; a tree needs a path to each"
        )
