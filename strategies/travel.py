"""When what of an assignment happens in virtual time: its transfers and its training."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.sliced import SlicedTransfers
from flower_adsp.strategies.state import FederationState, Flight, Worker

from flower_adsp.clock import MICROSECONDS, Clock, Event, EventKind
from flower_adsp.network.collectives import STAR
from flower_adsp.network.sharing import SharedLinks
from flower_adsp.network.slices import WHOLE


class Travel:
    """The way of models and commits between the server and workers, on a virtual clock.

    Parameters
    ----------
    options : LoopOptions
        For the network.
    clock : Clock
        Gets the events.
    has_rings : bool (default: False)
        Whether workers exchange in the rings that `state.hops` has, where they do not with the
        server.

    has_barriers : bool (default: False)
        Whether all workers wait for each other.

    Attributes
    ----------
    state : FederationState
        The run's; by `begin`.
    links : SharedLinks | None
        What is under way, where links are shared.
    sliced : SlicedTransfers | None
        The slices under way, where transfers are cut into slices.
    number : int
        Of the event that is due when the next transfer ends; earlier ones are out of date.
    """

    def __init__(
        self,
        options: LoopOptions,
        clock: Clock,
        has_rings: bool = False,
        has_barriers: bool = False,
    ) -> None:
        self.options = options
        self.clock = clock
        self.state: FederationState
        network = options.network
        shares = network.has_limits if has_rings else network.is_shared
        shares = shares and clock.is_virtual
        self.links = SharedLinks(network.capacity) if shares else None
        self.number = 0
        self.sliced = None if network.schedule == WHOLE else SlicedTransfers(options, has_barriers)

    def begin(self, state: FederationState) -> None:
        """Take the state of a run."""
        self.state = state
        if self.sliced is not None:
            self.sliced.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return what is under way."""
        links = None if self.links is None else self.links.state_dict()
        sliced = None if self.sliced is None else self.sliced.state_dict()
        return {"links": links, "sliced": sliced, "number": self.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.number = state["number"]
        if self.links is not None:
            self.links.load_state_dict(state["links"])
        if self.sliced is not None:
            self.sliced.load_state_dict(state["sliced"])

    def estimate_overhead(self, worker: Worker) -> None:
        """Set O_i to what it should be; it is measured with the first commit."""
        network, up = self.options.network, self.state.upload_bytes(worker)
        worker.overhead = network.upload(worker.profile, up) + network.download(
            worker.profile, self.state.num_bytes
        )

    def download(self, worker: Worker, flight: Flight, size: int) -> int | None:
        """Begin a download; return when training starts, or None where only its end will tell.

        With slices it can start before the worker is released.
        """
        if self.links is not None:
            self._begin(worker, size, upload=False)
            return None
        download = self._carried(worker, size, upload=False)
        if self.sliced is not None:
            start = self.sliced.start(worker, flight)
            if start is not None:
                return start
            download -= self.sliced.hidden_download(worker, flight)
        return worker.presence.advance(self.state.now, download)

    def pause(self, worker: Worker) -> None:
        """Hold the transfer of a worker that has left, or let it go on when it is back."""
        if self.links is not None and worker.flight is not None:
            self.links.pause(self.state.now, worker.flight.assignment.id, worker.is_away)
            self._changed()

    def time_training(self, worker: Worker, flight: Flight, start: int) -> None:
        """Say, of training that starts at a time, what steps it has and when it ends."""
        work, step, present = flight.work, flight.step, worker.presence
        begin, overlap = start, 0
        if (
            work.overlaps
            and worker.trained_until is not None
            and not present.away_between(worker.trained_until, start)
        ):
            # The step in progress when the model comes is finished first.
            overlap = ceil((start - worker.trained_until) / step)
            begin = worker.trained_until + overlap * step
            flight.overlapped = start - worker.trained_until
        if work.steps is None:
            assert work.seconds is not None
            left = start + _microseconds(work.seconds) - begin
            steps = max(1, ceil(left / step)) + overlap
        else:
            steps = work.steps + overlap
        flight.assignment = replace(
            flight.assignment, steps=steps, seconds=None, overlap_steps=overlap
        )
        if not worker.is_stock:  # how much a stock ClientApp does, only its reply tells
            flight.end = present.advance(begin, (steps - overlap) * step)
            flight.away = present.away_between(begin, flight.end)

    def train_until(self, worker: Worker, flight: Flight, end: int) -> None:
        """Have a commit leave when training ends, and arrive."""
        number = flight.assignment.id
        if self.links is not None:
            self.clock.schedule(Event(end, EventKind.TRAINED, number))
            return
        upload = self._carried(worker, self.state.upload_bytes(worker), upload=True)
        if self.sliced is not None:
            upload -= self.sliced.hidden_upload(worker, flight)
        flight.arrival = worker.presence.advance(end, upload)
        if self.sliced is not None:
            self.sliced.sent(worker, flight, end)
        self.clock.schedule(Event(flight.arrival, EventKind.ARRIVAL, number))

    def arrived(self, worker: Worker, *, is_taken: bool) -> None:
        """Note that a worker's commit has been taken in, or that it will bring none."""
        if self.sliced is not None:
            self.sliced.arrived(worker, is_taken=is_taken)

    def pass_barrier(self) -> None:
        """Note that a barrier is passed now."""
        if self.sliced is not None:
            self.sliced.pass_barrier()

    def _carried(self, worker: Worker, size: int, *, upload: bool) -> int:
        """Return the microseconds of a transfer by a worker's own link, or of all together."""
        network, hop = self.options.network, self.state.hops.get(worker.id)
        if hop is not None:
            return _microseconds(hop.latency_s + size * hop.part * 8 / (hop.mbps * 1e6))
        if network.collective != STAR:
            if upload and worker.plan is not None:
                return self._reduced(worker)
            profiles = (other.profile for other in self.state.present)
            return network.together(profiles, size, upload=upload)
        transfer = network.upload if upload else network.download
        return transfer(worker.profile, size)

    def _reduced(self, worker: Worker) -> int:
        """Return the microseconds in which all that a worker trained is added up, under a plan.

        What the same workers have trained is one reduction, among these and the server. A
        worker's are one after another, and others are taken not to hold them up.
        """
        others = [each for each in self.state.present if each is not worker]
        groups: Counter[tuple[int, ...]] = Counter()
        for name, size in self.state.upload_sizes(worker).items():
            trainers = (each.id for each in others if each.plan is None or each.plan.sends(name))
            groups[tuple(sorted((worker.id, *trainers)))] += size
        return sum(
            self.options.network.together(
                [self.state.workers[id_].profile for id_ in ids], size, upload=True
            )
            for ids, size in groups.items()
        )

    def _begin(self, worker: Worker, size: float, *, upload: bool) -> None:
        """Have a worker's flight take its part of the shared links."""
        assert self.links is not None
        assert worker.flight is not None
        profile, hop = worker.profile, self.state.hops.get(worker.id)
        if hop is None:
            mbps = profile.up_mbps if upload else profile.down_mbps
            path = self.options.network.path(profile, upload=upload)
        else:
            size, mbps, path = size * hop.part, hop.mbps, hop.path
        number, turn = worker.flight.assignment.id, self.state.turns.get(worker.id)
        self.links.begin(
            self.state.now, number, size, mbps, path, worker.is_away, turn, is_last=not upload
        )
        self._changed()

    def _changed(self) -> None:
        """Look at the links again when the next transfer ends, as things are now."""
        assert self.links is not None
        self.number += 1
        at = self.links.next_end()
        if at is not None:
            self.clock.schedule(Event(at, EventKind.TRANSFER, self.number))

    def end_transfers(self, carried: Mapping[int, Worker]) -> None:
        """Go on with the flights, by the number of their assignment, whose transfer has ended."""
        assert self.links is not None
        for number in self.links.ended(self.state.now):
            worker = carried[number]
            flight = worker.flight
            assert flight is not None
            hop = self.state.hops.get(worker.id)
            latency = _microseconds((worker.profile if hop is None else hop).latency_s)
            at = worker.presence.advance(self.state.now, latency)
            if flight.start is None:
                self.clock.schedule(Event(at, EventKind.START, number))
            else:
                flight.arrival = at
                self.clock.schedule(Event(at, EventKind.ARRIVAL, number))
        self._changed()

    def upload(self, worker: Worker) -> None:
        """Have a worker that has trained send its commit over shared links."""
        self._begin(worker, self.state.upload_bytes(worker), upload=True)


def _microseconds(seconds: float) -> int:
    return round(seconds * MICROSECONDS)
