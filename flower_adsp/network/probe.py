"""The rates of a link, from how much longer a payload takes than a message without one.

Through Flower a message takes some seconds whatever is in it: a node looks for work now and then,
and starts a process for what it finds. So payloads grow until they take long enough, and of several
round trips the shortest counts, which met with the least waiting.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

_FIRST, _GROWTH = 1_000_000, 4

RoundTrip = Callable[[int, int], float]


@dataclass(frozen=True)
class MeasuredLink:
    """What a link was found to be.

    Attributes
    ----------
    round_trip_s : float
        Seconds of a message without a payload, there and back; Flower's own share included.
    up_mbps, down_mbps : float
        Megabits per second from and to the server.
    up_is_least, down_is_least : bool
        Whether the largest payload took no longer than messages differ by themselves, so that the
        rate may be any above this one.
    """

    round_trip_s: float
    up_mbps: float
    down_mbps: float
    up_is_least: bool = False
    down_is_least: bool = False


def measure_link(
    round_trip: RoundTrip, seconds: float = 5.0, largest: int = 64_000_000, repeats: int = 3
) -> MeasuredLink:
    """Measure a link.

    Parameters
    ----------
    round_trip : Callable[[int, int], float]
        Sends so many bytes and receives so many; returns the seconds it took.
    seconds : float (default: 5.0)
        How much longer than a message without one a payload is to take.
    largest : int (default: 64,000,000)
        Bytes of the largest payload to try.
    repeats : int (default: 3)
        Round trips of which the shortest counts.
    """
    empty = [round_trip(0, 0) for _ in range(repeats)]
    base, spread = min(empty), median(empty) - min(empty)

    def rate(send: Callable[[int], float]) -> tuple[float, bool]:
        size = _FIRST
        while True:
            size = min(size, largest)
            extra = send(size) - base
            for _ in range(repeats - 1):
                if extra < seconds and size < largest:
                    break
                extra = min(extra, send(size) - base)
            if extra >= seconds or size == largest:
                return size * 8 / 1e6 / max(extra, spread, 1e-6), extra <= spread
            size *= _GROWTH

    down, down_is_least = rate(lambda size: round_trip(size, 0))
    up, up_is_least = rate(lambda size: round_trip(0, size))
    return MeasuredLink(base, up, down, up_is_least, down_is_least)
