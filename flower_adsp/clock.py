"""Clocks: where the next event of a run comes from.

Time is an integer number of microseconds since the run began. A `VirtualClock` simulates time:
its events are those that were scheduled, in (time, kind, sequence) order, whatever the order in
which replies arrive. A `WallClock` is real: its events are replies as they arrive, and alarms.
"""

import heapq
import time as host_time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from itertools import count

MICROSECONDS = 1_000_000


class EventKind(IntEnum):
    """Kinds of event; of those at the same time, the smaller comes first."""

    TRANSFER = 0
    START = 1
    TRAINED = 2
    ARRIVAL = 3
    ALARM = 4
    RELEASE = 5
    PRESENCE = 6
    EVALUATION = 7
    CHECKPOINT = 8
    DEADLINE = 9
    MEMBERS = 10
    STOP = 11


@dataclass(frozen=True)
class Event:
    """Something that happens.

    Parameters
    ----------
    time : int
        Microseconds since the run began.
    kind : EventKind
        What happens.
    subject : int | str
        What it happens to: a worker, an assignment, the index of a check period, or, where a reply
        has arrived in real time, its message.
    """

    time: int
    kind: EventKind
    subject: int | str = 0


class Clock(ABC):
    """The interface of the clocks."""

    is_virtual: bool

    def __init__(self) -> None:
        self._queue: list[tuple[int, int, int, Event]] = []
        self._sequence = count()

    def schedule(self, event: Event) -> None:
        """Have `event` happen at its time."""
        heapq.heappush(self._queue, (event.time, event.kind, next(self._sequence), event))

    @abstractmethod
    def now(self) -> int:
        """Return the microseconds since the run began."""

    @abstractmethod
    def set(self, time: int) -> None:
        """Go on from a time of an earlier run."""

    def scheduled(self) -> list[Event]:
        """Return the events to come, in order."""
        return [entry[-1] for entry in sorted(self._queue, key=lambda entry: entry[:3])]

    @abstractmethod
    def next(self, poll: Callable[[], list[str]]) -> Event | None:
        """Wait for the next event.

        Parameters
        ----------
        poll : Callable[[], list[str]]
            Returns the ids of the messages whose replies have just arrived.

        Returns
        -------
        Event | None
            The event, or None when there will be no more.
        """


class VirtualClock(Clock):
    """A deterministic simulation of time."""

    is_virtual = True

    def __init__(self) -> None:
        super().__init__()
        self._now = 0

    def now(self) -> int:
        """Return the time of the latest event."""
        return self._now

    def set(self, time: int) -> None:
        """Go on from a time of an earlier run."""
        self._now = time

    def next(self, poll: Callable[[], list[str]]) -> Event | None:
        """Return the earliest scheduled event; the first scheduled of equal ones."""
        if not self._queue:
            return None
        event = heapq.heappop(self._queue)[-1]
        if event.time < self._now:
            raise RuntimeError(f"time ran backwards: {event} at {self._now}")
        self._now = event.time
        return event


class WallClock(Clock):
    """Real, monotonic time.

    Parameters
    ----------
    poll_interval : float (default: 0.05)
        Longest time in seconds between two looks for replies.
    """

    is_virtual = False

    def __init__(self, poll_interval: float = 0.05) -> None:
        super().__init__()
        self._origin = host_time.monotonic_ns()
        self._poll_interval = poll_interval
        self._arrivals: list[str] = []

    def now(self) -> int:
        """Return the microseconds since this clock was made."""
        return (host_time.monotonic_ns() - self._origin) // 1000

    def set(self, time: int) -> None:
        """Go on from a time of an earlier run."""
        self._origin = host_time.monotonic_ns() - time * 1000

    def next(self, poll: Callable[[], list[str]]) -> Event:
        """Return the next reply that arrives or the next alarm, whichever comes first."""
        while True:
            if not self._arrivals:
                self._arrivals = poll()
            if self._arrivals:
                return Event(self.now(), EventKind.ARRIVAL, self._arrivals.pop(0))
            wait = self._poll_interval
            if self._queue:
                remaining = (self._queue[0][0] - self.now()) / MICROSECONDS
                if remaining <= 0:
                    due = heapq.heappop(self._queue)[-1]
                    return Event(self.now(), due.kind, due.subject)
                wait = min(wait, remaining)
            host_time.sleep(wait)
