"""Transfers that share what carries them, each at its max-min fair rate.

A transfer may go no faster than its own link, and takes from the shared resources that it passes:
a site's uplink, the server's network card. What a transfer cannot use is left to the others, until
each is held back by its own link or by a resource that is full (Bertsekas and Gallager, "Data
Networks", 2nd edition 1992, section 6.5.2). Rates change only when a transfer begins or ends.

Groups of transfers may take turns instead: one waits while a group that began earlier, or is about
to end its exchange, is using something that it passes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

_ROUNDING = 1e-6  # microseconds: what is left of a transfer for less has been left by rounding


def max_min_rates(
    limits: Sequence[float], paths: Sequence[Sequence[str]], capacity: Callable[[str], float]
) -> list[float]:
    """Return the max-min fair rate of each transfer.

    Parameters
    ----------
    limits : Sequence[float]
        The most each can take, by its own link; any unit, the same for all.
    paths : Sequence[Sequence[str]]
        The shared resources that each passes.
    capacity : Callable[[str], float]
        Returns what a shared resource carries in all.

    Returns
    -------
    list[float]
        One rate a transfer, above 0.
    """
    left = {name: capacity(name) for path in paths for name in path}
    users = {name: [i for i, path in enumerate(paths) if name in path] for name in left}
    count = {name: len(mine) for name, mine in users.items()}
    rates = [0.0] * len(limits)

    def settle(index: int, rate: float) -> None:
        rates[index] = rate
        for name in set(paths[index]):
            left[name] -= rate
            count[name] -= 1

    # The smallest own limits are met first, until a resource is full before the next one.
    for index in sorted(range(len(limits)), key=lambda i: (limits[i], i)):
        while not rates[index]:
            share, full = min(
                ((left[name] / count[name], name) for name in left if count[name]),
                default=(limits[index], ""),
            )
            if limits[index] <= share:
                settle(index, limits[index])
            else:
                for other in users[full]:
                    if not rates[other]:
                        settle(other, share)
    return rates


@dataclass
class Transfer:
    """A transfer under way.

    Attributes
    ----------
    bits : float
        Left to carry.
    limit : float
        Mbit/s of its own link, which are bits per microsecond.
    path : tuple[str, ...]
        The shared resources that it passes.
    is_paused : bool
        Whether its device is away, so that nothing is carried.
    turn : int | None
        The group that it belongs to, where groups take turns at what they share.
    is_last : bool
        Whether it ends its group's exchange, which goes before others that begin one.
    rate : float
        Mbit/s at present.
    """

    bits: float
    limit: float
    path: tuple[str, ...]
    is_paused: bool = False
    turn: int | None = None
    is_last: bool = False
    rate: float = 0.0


class SharedLinks:
    """The transfers under way at a time, in microseconds.

    Parameters
    ----------
    capacity : Callable[[str], float]
        Returns the Mbit/s that a shared resource carries.
    """

    def __init__(self, capacity: Callable[[str], float]) -> None:
        self._capacity = capacity
        self._transfers: dict[int, Transfer] = {}
        self._now = 0

    def begin(
        self,
        now: int,
        key: int,
        num_bytes: float,
        limit: float,
        path: Sequence[str],
        paused: bool,
        turn: int | None = None,
        is_last: bool = False,
    ) -> None:
        """Begin a transfer of `num_bytes`, known by its key."""
        if key in self._transfers:
            raise ValueError(f"transfer {key} is under way")
        self._go_to(now)
        self._transfers[key] = Transfer(8.0 * num_bytes, limit, tuple(path), paused, turn, is_last)
        self._share()

    def pause(self, now: int, key: int, paused: bool) -> None:
        """Hold a transfer, or let it go on; of one that is not under way nothing is done."""
        if key in self._transfers:
            self._go_to(now)
            self._transfers[key].is_paused = paused
            self._share()

    def next_end(self) -> int | None:
        """Return the microsecond at which the next transfer ends, if nothing else happens."""
        ends = (
            self._now + ceil(transfer.bits / transfer.rate - _ROUNDING)
            for transfer in self._transfers.values()
            if transfer.rate
        )
        return min(ends, default=None)

    def ended(self, now: int) -> list[int]:
        """Take out the transfers that have ended by `now`, in the order in which they began."""
        self._go_to(now)
        done = [
            key
            for key, transfer in self._transfers.items()
            if transfer.bits <= _ROUNDING * transfer.rate
        ]
        for key in done:
            del self._transfers[key]
        if done:
            self._share()
        return done

    def state_dict(self) -> dict[str, object]:
        """Return the transfers under way."""
        return {"now": self._now, "transfers": dict(self._transfers)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from where `state_dict` was taken."""
        now, transfers = state["now"], state["transfers"]
        assert isinstance(now, int)
        assert isinstance(transfers, dict)
        self._now, self._transfers = now, dict(transfers)

    def _go_to(self, now: int) -> None:
        if now < self._now:
            raise ValueError(f"time ran backwards: {now} after {self._now}")
        for transfer in self._transfers.values():
            transfer.bits = max(transfer.bits - transfer.rate * (now - self._now), 0.0)
        self._now = now

    @staticmethod
    def _must_wait(transfer: Transfer, in_turn: Sequence[Transfer]) -> bool:
        """Tell whether a group whose turn is before is using what a transfer passes."""
        for other in in_turn if transfer.turn is not None else ():
            if other.turn == transfer.turn:
                return False
            if other.turn is not None and not set(transfer.path).isdisjoint(other.path):
                return True
        return False

    def _share(self) -> None:
        ready = [transfer for transfer in self._transfers.values() if not transfer.is_paused]
        in_turn = sorted(ready, key=lambda transfer: not transfer.is_last)
        moving = [transfer for transfer in ready if not self._must_wait(transfer, in_turn)]
        rates = max_min_rates(
            [transfer.limit for transfer in moving],
            [transfer.path for transfer in moving],
            self._capacity,
        )
        for transfer in self._transfers.values():
            transfer.rate = 0.0
        for transfer, rate in zip(moving, rates, strict=True):
            transfer.rate = rate
