"""Slices of parameters sent by priority, so that computing starts before the transfer ends.

Jayarajan, Wei, Gibson, Fedorova and Pekhimenko, "Priority-based Parameter Propagation for
Distributed DNN Training", MLSys 2019, https://arxiv.org/abs/1905.03960. Backward gives gradients
from the last layer to the first, and the next forward needs parameters from the first to the last.
So each layer is cut into slices, of which the one whose layer comes first in forward is always sent
next; the server sends a slice back as soon as all workers' gradients for it are there.

Flower delivers whole messages, and a device sees a model only when all of it has come. So this is
a model of what a transport that delivers slices would do: exact in virtual time, and nothing that a
SuperNode does.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from flower_adsp.errors import require, unknown

WHOLE = "whole"
SCHEDULES = (WHOLE, "fifo", "p3", "reverse")
SLICE_SIZE = 40_000  # parameters; the default of the authors' code
_BITS = 32


@dataclass(frozen=True)
class Layer:
    """A layer of a chain, in forward order.

    Attributes
    ----------
    parameters : int
        Its number of parameters.
    forward_s, backward_s : float
        Seconds to compute it.
    """

    parameters: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class ParameterSlice:
    """Parameters `start` to `stop` of a layer, by its place in forward order."""

    layer: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Return the number of parameters."""
        return self.stop - self.start


def slice_layers(sizes: Sequence[int], slice_size: int | None = SLICE_SIZE) -> list[ParameterSlice]:
    """Cut layers into slices of `slice_size` parameters, the last of each layer shorter.

    Parameters
    ----------
    sizes : Sequence[int]
        Parameters of each layer, in forward order.
    slice_size : int | None (default: 40,000)
        Parameters in a slice; None leaves layers whole.
    """
    require(slice_size is None or slice_size > 0, "slice_size", slice_size, "None or at least 1")
    return [
        ParameterSlice(layer, start, min(start + (slice_size or size), size))
        for layer, size in enumerate(sizes)
        for start in range(0, size, slice_size or max(size, 1))
    ]


def send(
    ready: Sequence[float],
    layers: Sequence[int],
    seconds: Sequence[float],
    schedule: str = "p3",
    window: int = 1,
) -> list[float]:
    """Return when each slice has gone over a link.

    Parameters
    ----------
    ready : Sequence[float]
        Seconds at which each slice can be sent; those that are ready together are taken in the
        order given.
    layers : Sequence[int]
        The layer of each, by its place in forward order.
    seconds : Sequence[float]
        How long each occupies the link.
    schedule : str (default: "p3")
        ``p3`` sends the first layer in forward order first, ``reverse`` the last, and ``fifo`` what
        was ready first; among equals goes first what was ready first.
    window : int (default: 1)
        How many slices, the one under way included, have been given to the link and can no longer
        be overtaken (the authors' high-water mark).
    """
    if schedule not in SCHEDULES[1:]:
        raise unknown("schedule", schedule, SCHEDULES[1:])
    require(window >= 1, "window", window, "at least 1")
    sign = {"fifo": 0, "p3": 1, "reverse": -1}[schedule]
    coming = deque(sorted(range(len(ready)), key=lambda index: (ready[index], index)))
    places = {index: place for place, index in enumerate(coming)}
    queue: list[tuple[int, int, int]] = []
    given: deque[int] = deque()
    arrivals = [0.0] * len(ready)

    def look(now: float) -> None:
        """Take in what is ready by now, and give to the link what it has room for."""
        while coming and ready[coming[0]] <= now:
            index = coming.popleft()
            heapq.heappush(queue, (sign * layers[index], places[index], index))
        while queue and len(given) < window:
            given.append(heapq.heappop(queue)[-1])

    now = 0.0
    while coming or queue or given:
        look(now)
        if not given:
            now = ready[coming[0]]
            continue
        end = now + seconds[given[0]]
        while coming and ready[coming[0]] < end:
            look(ready[coming[0]])
        arrivals[given.popleft()] = now = end
    return arrivals


def forward_end(arrivals: Sequence[float], forward_s: Sequence[float]) -> float:
    """Return when forward is done: f_l = max(f_{l−1}, a_l) + c_l.

    Parameters
    ----------
    arrivals : Sequence[float]
        Seconds at which all of each layer is there.
    forward_s : Sequence[float]
        Seconds to compute each.
    """
    done = 0.0
    for arrival, seconds in zip(arrivals, forward_s, strict=True):
        done = max(done, arrival) + seconds
    return done


@dataclass(frozen=True)
class Link:
    """A worker's link to the server.

    Attributes
    ----------
    up_mbps, down_mbps : float
        Megabits per second.
    latency_s : float (default: 0.0)
        Seconds that the first bit takes, each way.
    slice_s : float (default: 0.0)
        Seconds that each slice occupies the link besides its bits.
    """

    up_mbps: float
    down_mbps: float
    latency_s: float = 0.0
    slice_s: float = 0.0

    def seconds(self, slices: Sequence[ParameterSlice], *, upload: bool) -> list[float]:
        """Return how long each slice occupies the link, at four bytes a parameter."""
        rate = (self.up_mbps if upload else self.down_mbps) * 1e6
        return [self.slice_s + each.size * _BITS / rate for each in slices]


def gradients_ready(layers: Sequence[Layer]) -> list[float]:
    """Return, from the start of backward, when each layer's gradients are there."""
    return list(accumulate(layer.backward_s for layer in reversed(layers)))[::-1]


def queued(layers: Sequence[Layer], slice_size: int | None = SLICE_SIZE) -> list[ParameterSlice]:
    """Return the slices in the order in which backward gives them: the last layer first."""
    slices = slice_layers([layer.parameters for layer in layers], slice_size)
    return sorted(slices, key=lambda each: (-each.layer, each.start))


def uploaded(
    layers: Sequence[Layer],
    link: Link,
    schedule: str = "p3",
    slice_size: int | None = SLICE_SIZE,
    window: int = 1,
) -> list[float]:
    """Return, from the start of backward, when the server has each slice, as `queued` has them.

    Parameters
    ----------
    layers, link, schedule, slice_size, window
        As for `iteration_seconds`; the schedule is one of slices.
    """
    slices = queued(layers, slice_size)
    places, gradients = [each.layer for each in slices], gradients_ready(layers)
    ready = [gradients[layer] for layer in places]
    sent = send(ready, places, link.seconds(slices, upload=True), schedule, window)
    return [end + link.latency_s for end in sent]


def next_forward_end(
    layers: Sequence[Layer],
    link: Link,
    ready: Sequence[float],
    idle: float,
    schedule: str = "p3",
    slice_size: int | None = SLICE_SIZE,
    window: int = 1,
) -> float:
    """Return when a worker's next forward pass is done, each slice being sent once it is ready.

    Parameters
    ----------
    layers, link, schedule, slice_size, window
        As for `iteration_seconds`; the schedule is one of slices.
    ready : Sequence[float]
        Seconds at which the server has each slice of all that it waits for, as `queued` has them.
    idle : float
        Seconds at which the worker can compute again.
    """
    slices = queued(layers, slice_size)
    order = sorted(range(len(slices)), key=lambda index: (ready[index], index))
    chosen = [slices[index] for index in order]
    down = send(
        [ready[index] for index in order],
        [each.layer for each in chosen],
        link.seconds(chosen, upload=False),
        schedule,
        window,
    )
    there = [idle] * len(layers)  # layers without parameters wait only for those before them
    for each, arrival in zip(chosen, down, strict=True):
        there[each.layer] = max(there[each.layer], arrival + link.latency_s)
    return forward_end(there, [layer.forward_s for layer in layers])


def iteration_seconds(
    layers: Sequence[Layer],
    link: Link,
    schedule: str = "p3",
    slice_size: int | None = SLICE_SIZE,
    window: int = 1,
) -> float:
    """Return the time of an iteration of synchronous SGD with equal workers and links.

    It lasts from the start of a backward pass to the end of the next forward pass. As all workers
    are equal, a slice is there from all at the same time, and is sent back at once.

    Parameters
    ----------
    layers : Sequence[Layer]
        In forward order.
    link : Link
        Each worker's; the server keeps up with all.
    schedule : str (default: "p3")
        ``whole`` sends all gradients in one message when backward has ended, and all parameters in
        another; for the others see `send`.
    slice_size : int | None (default: 40,000)
        Parameters in a slice; None sends layers whole.
    window : int (default: 1)
        See `send`.
    """
    backward = sum(layer.backward_s for layer in layers)
    if schedule == WHOLE:
        everything = [ParameterSlice(0, 0, sum(layer.parameters for layer in layers))]
        transfers = sum(sum(link.seconds(everything, upload=way)) for way in (True, False))
        forward = sum(layer.forward_s for layer in layers)
        return backward + 2 * link.latency_s + transfers + forward
    how = schedule, slice_size, window
    return next_forward_end(layers, link, uploaded(layers, link, *how), backward, *how)


def hidden_seconds(
    layers: Sequence[Layer],
    link: Link,
    schedule: str = "p3",
    slice_size: int | None = SLICE_SIZE,
    window: int = 1,
) -> tuple[float, float]:
    """Return what of a download and of an upload is hidden behind an assignment's computing.

    Of an assignment, only the forward pass of its first step can start before all of the model is
    there, and only in the backward pass of its last step can an update leave. So at most

        min(T_fwd, T_down) + min(T_bwd, T_up)

    is hidden. The server has the whole model when the download begins, queued as its slices came
    from backward: the last layer first.

    Returns
    -------
    tuple[float, float]
        Seconds of the download and of the upload.
    """
    if schedule == WHOLE:
        return 0.0, 0.0
    how = schedule, slice_size, window
    slices = queued(layers, slice_size)
    forward = sum(layer.forward_s for layer in layers)
    backward = sum(layer.backward_s for layer in layers)
    done = next_forward_end(layers, link, [0.0] * len(slices), 0.0, *how)
    hidden_down = link.latency_s + sum(link.seconds(slices, upload=False)) + forward - done
    there = max([backward + link.latency_s, *uploaded(layers, link, *how)])
    hidden_up = link.latency_s + backward + sum(link.seconds(slices, upload=True)) - there
    return max(hidden_down, 0.0), max(hidden_up, 0.0)
