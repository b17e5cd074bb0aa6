"""Rings of devices that exchange with each other, each hop over what it shares with others.

A ring all-reduce of n devices sends (n − 1)/n of the data over every hop to add up, and the same
again to give the sum to all (Patarasu and Yuan, 2009, https://doi.org/10.1016/j.jpdc.2008.09.002).
Flower's nodes send to the server only: these rings are those of a transport of one's own, in
virtual time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flower_adsp.devices import DeviceProfile
from flower_adsp.network import Network
from flower_adsp.network.sharing import max_min_rates


@dataclass(frozen=True)
class Hop:
    """From a device to the next one of its ring.

    Attributes
    ----------
    mbps : float
        Megabits per second of the two devices' own links; infinite in a ring of one.
    path : tuple[str, ...]
        The shared resources that it passes.
    latency_s : float
        Seconds that the first bit takes round the ring.
    part : float
        (n − 1)/n, the part of the data that passes it each way.
    """

    mbps: float
    path: tuple[str, ...]
    latency_s: float
    part: float


def ring_hops(
    ring: Sequence[int], profiles: Mapping[int, DeviceProfile], network: Network
) -> dict[int, Hop]:
    """Return the hop from each device of a ring, in the order of the ring."""
    count = len(ring)
    pairs = list(zip(ring, [*ring[1:], *ring[:1]], strict=True))
    slowest = max(profiles[a].latency_s + profiles[b].latency_s for a, b in pairs)
    latency = (count - 1) * slowest
    return {
        a: Hop(
            min(profiles[a].up_mbps, profiles[b].down_mbps) if count > 1 else float("inf"),
            network.between(profiles[a], profiles[b]),
            latency,
            (count - 1) / count,
        )
        for a, b in pairs
    }


def ring_seconds(
    rings: Sequence[Mapping[int, Hop]], network: Network, num_bytes: int, *, reduce: bool
) -> float:
    """Return how long the slowest of several rings takes, where all begin at once.

    Parameters
    ----------
    rings : Sequence[Mapping[int, Hop]]
        The hops of each ring.
    network : Network
        What they share.
    num_bytes : int
        Bytes that each device has.
    reduce : bool
        Whether they are added up and the sum is given to all, or what one has is given to all.
    """
    hops = [hop for ring in rings for hop in ring.values()]
    rates = iter(
        max_min_rates([hop.mbps for hop in hops], [hop.path for hop in hops], network.capacity)
    )
    seconds = 0.0
    for ring in rings:
        slowest = min((next(rates) for _ in ring), default=0.0)
        if len(ring) > 1:
            hop = next(iter(ring.values()))
            times = 2 * hop.part if reduce else 1.0
            start = (2 if reduce else 1) * hop.latency_s
            seconds = max(seconds, start + times * num_bytes * 8 / (slowest * 1e6))
    return seconds
