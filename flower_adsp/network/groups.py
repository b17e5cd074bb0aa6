"""Logical groups of devices over the sites where they stand, and who of them gets in whose way.

Devices of a group exchange often. A group within one site keeps its traffic there; one that is
split over sites takes part of their uplinks, and slows the other split groups that do. This is the
group mapping and the communication planning of SoCFlow (Xu and others, "SoCFlow: Efficient and
Scalable DNN Training on SoC-Clustered Edge Servers", ASPLOS 2024,
https://doi.org/10.1145/3617232.3624847), sections 3.1.2 and 3.1.3, where sites are the boards of a
server. Devices are known by their place in the sequence of sites.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from flower_adsp.errors import require, unknown

SEQUENTIAL, GREEDY, PACKED = "sequential", "integrity-greedy", "packed"
MAPPINGS = (SEQUENTIAL, GREEDY, PACKED)

Groups = list[list[int]]


def group_sizes(num_devices: int, num_groups: int) -> list[int]:
    """Return the sizes of groups, largest first, which differ by one at most.

    Raises
    ------
    ConfigError
        If there are more groups than devices, or none.
    """
    require(
        1 <= num_groups <= num_devices,
        "num_groups",
        num_groups,
        f"from 1 to {num_devices}, the number of devices",
    )
    least, more = divmod(num_devices, num_groups)
    return [least + 1] * more + [least] * (num_groups - more)


def map_groups(sites: Sequence[str], num_groups: int, mapping: str = PACKED) -> Groups:
    """Put devices into groups, so that few groups that are split over sites meet at any site.

    Parameters
    ----------
    sites : Sequence[str]
        Where each device stands.
    num_groups : int
        N, of as equal a size as may be.
    mapping : str (default: "packed")
        ``sequential``: the devices in order are cut into groups; ``integrity-greedy``: as
        published, each site is filled with as many whole groups as fit, and what is left over,
        site by site, is cut into groups; ``packed``: the same, but what is left over is first put
        together to whole groups where it can be. The published order is claimed to give the
        smallest conflict number C, which holds for sites of equal size, not for others: for four
        sites of 1, 1, 2 and 2 devices and groups of 3 it has C = 2, and C = 1 can be had.

    Returns
    -------
    list[list[int]]
        The devices of each group, in order; groups in order of their first device.
    """
    if mapping not in MAPPINGS:
        raise unknown("mapping", mapping, MAPPINGS)
    sizes = group_sizes(len(sites), num_groups)
    if mapping == SEQUENTIAL:
        return _cut(range(len(sites)), sizes)
    groups, left = _whole_groups(sites, sizes)
    if mapping == PACKED:
        left = _pack(left, sizes)
    rest = [device for devices in left for device in devices]
    return sorted(sorted(group) for group in (*groups, *_cut(rest, sizes)))


def _whole_groups(sites: Sequence[str], sizes: list[int]) -> tuple[Groups, Groups]:
    """Take as many whole groups as fit from each site; return them and what is left of each.

    The sizes that were used are taken out of `sizes`, which has the largest first.
    """
    groups: Groups = []
    left: Groups = []
    for site in dict.fromkeys(sites):
        free = [device for device, name in enumerate(sites) if name == site]
        while size := next((size for size in sizes if size <= len(free)), 0):
            sizes.remove(size)
            groups.append(free[:size])
            free = free[size:]
        left.append(free)
    return groups, left


def _cut(devices: Sequence[int], sizes: Sequence[int]) -> Groups:
    """Cut a sequence into runs of given sizes."""
    starts = np.cumsum([0, *sizes])
    return [list(devices[a:b]) for a, b in pairwise(starts)]


def _pack(left: Groups, sizes: list[int]) -> Groups:
    """Order what is left of sites, and the sizes, so that each site is within one group.

    Where that cannot be, as they came: a site is then cut once at most, and C is 2.
    """
    counts = Counter(len(devices) for devices in left if devices)
    wanted = Counter(sizes)
    patterns = [pattern for size in wanted for pattern in _sums(size, sorted(counts), counts)]
    chosen = _choose(patterns, counts, wanted)
    if chosen is None:
        return left
    by_length: dict[int, deque[list[int]]] = {length: deque() for length in counts}
    for devices in left:
        if devices:
            by_length[len(devices)].append(devices)
    sizes[:] = [sum(pattern) for pattern in chosen]
    return [by_length[length].popleft() for pattern in chosen for length in pattern]


def _sums(
    total: int, lengths: Sequence[int], counts: Mapping[int, int]
) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write a total as a sum of lengths, each as often as it is there."""
    if total == 0:
        yield ()
        return
    if not lengths:
        return
    *shorter, longest = lengths
    for times in range(min(total // longest, counts[longest]), -1, -1):
        for rest in _sums(total - times * longest, shorter, counts):
            yield (longest,) * times + rest


def _choose(
    patterns: Sequence[tuple[int, ...]], counts: Mapping[int, int], wanted: Mapping[int, int]
) -> list[tuple[int, ...]] | None:
    """Return patterns that use each length and make each size exactly as often as given."""
    if not patterns:
        return None
    from scipy.optimize import Bounds, LinearConstraint, milp

    rows = [[pattern.count(length) for pattern in patterns] for length in counts]
    rows += [[sum(pattern) == size for pattern in patterns] for size in wanted]
    right = [*counts.values(), *wanted.values()]
    found = milp(
        np.zeros(len(patterns)),
        constraints=LinearConstraint(np.array(rows, dtype=float), right, right),
        integrality=np.ones(len(patterns)),
        bounds=Bounds(0, np.inf),
    )
    if not found.success:
        return None
    times = np.rint(found.x).astype(int)
    return [pattern for pattern, count in zip(patterns, times, strict=True) for _ in range(count)]


def same_speed(groups: Groups, sites: Sequence[str], speeds: Sequence[float]) -> Groups:
    """Have devices at a site change places, so that groups are about as fast as each other.

    Where the groups have their places stays as it is, and so do conflicts. The fastest device is
    placed first, each in the group that is furthest below the mean speed of its size (SoCFlow+,
    section 3.3, says what is wanted, not how); where that comes out no better, nothing changes.

    Parameters
    ----------
    groups : list[list[int]]
        The devices of each group.
    sites : Sequence[str]
        Where each device stands.
    speeds : Sequence[float]
        Of each device, in any unit.
    """
    free = [Counter(sites[device] for device in group) for group in groups]
    mean = sum(speeds) / len(speeds)
    lacking = [mean * len(group) for group in groups]
    placed: Groups = [[] for _ in groups]
    for device in sorted(range(len(sites)), key=lambda device: (-speeds[device], device)):
        open_ = [group for group, places in enumerate(free) if places[sites[device]]]
        slowest = max(open_, key=lambda group: (lacking[group], -group))
        free[slowest][sites[device]] -= 1
        lacking[slowest] -= speeds[device]
        placed[slowest].append(device)
    better = _spread(placed, speeds) < _spread(groups, speeds)
    return [sorted(group) for group in placed] if better else groups


def _spread(groups: Groups, speeds: Sequence[float]) -> float:
    """Return how much more the fastest group does than the slowest, a device."""
    means = [sum(speeds[device] for device in group) / len(group) for group in groups]
    return max(means) - min(means)


def split_sites(groups: Sequence[Sequence[int]], sites: Sequence[str]) -> list[set[str]]:
    """Return the sites over which each group is split; none for a group within one site."""
    found = [{sites[device] for device in group} for group in groups]
    return [names if len(names) > 1 else set() for names in found]


def conflict_number(groups: Sequence[Sequence[int]], sites: Sequence[str]) -> int:
    """Return C, the most split groups that any site has a part of (SoCFlow's equation 3)."""
    meeting = Counter(site for names in split_sites(groups, sites) for site in names)
    return max(meeting.values(), default=0)


def conflicts(groups: Sequence[Sequence[int]], sites: Sequence[str]) -> list[set[int]]:
    """Return for each group those that are split and have a part at the same site, as it is."""
    split = split_sites(groups, sites)
    return [
        {other for other, theirs in enumerate(split) if other != mine and theirs & names}
        for mine, names in enumerate(split)
    ]


def communication_groups(groups: Sequence[Sequence[int]], sites: Sequence[str]) -> list[int]:
    """Return a colour of each group, such that none has that of a group in conflict with it.

    Two colours serve where conflicts have no odd cycle, as with the integrity-greedy mapping; a
    group takes the first colour that is free where they have. Groups without conflicts have
    colour 0.
    """
    near = conflicts(groups, sites)
    colours = [-1] * len(groups)
    for first in range(len(groups)):
        queue = deque([first] if colours[first] < 0 else [])
        while queue:
            group = queue.popleft()
            if colours[group] >= 0:
                continue
            taken = {colours[other] for other in near[group]}
            colours[group] = next(c for c in range(len(groups)) if c not in taken)
            queue.extend(sorted(other for other in near[group] if colours[other] < 0))
    return colours


def ring_order(group: Sequence[int], sites: Sequence[str]) -> list[int]:
    """Return a group's devices in an order in which a ring enters and leaves each site once."""
    return sorted(group, key=lambda device: (sites[device], device))
