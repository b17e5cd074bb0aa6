"""Transfers in slices, in virtual time: what computing hides of them, and what goes on at once.

Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training", MLSys 2019,
https://arxiv.org/abs/1905.03960; see `flower_adsp.network.slices`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.state import FederationState, Flight, Worker

from flower_adsp.clock import MICROSECONDS
from flower_adsp.network.slices import Layer

Arrivals = list[list[int]]  # by layer, in forward order: when the server has each slice of it


class _Chain(NamedTuple):
    """The layers of a transfer, with what its device takes to compute them."""

    layers: list[Layer]
    num_bytes: int
    forward: int
    backward: int


class SlicedTransfers:
    """The slices between the server and workers.

    The first forward pass of an assignment can start before all of the model is there, and the
    update can begin to leave in its last backward pass. With barriers the server also sends a
    slice on as soon as all workers' are there, and does not wait for whole commits; not in a round
    in which one is refused or a worker leaves, which the server learns late.

    Parameters
    ----------
    options : LoopOptions
        For the network and the layers.
    has_barriers : bool
        Whether all workers wait for each other.

    Attributes
    ----------
    state : FederationState
        The run's; to be set before use.
    """

    def __init__(self, options: LoopOptions, has_barriers: bool) -> None:
        self.network = options.network
        self.layers = options.layers
        self.has_barriers = has_barriers
        self.state: FederationState
        self._under_way: dict[int, tuple[int, Arrivals]] = {}
        self._taken: dict[int, tuple[int, Arrivals]] = {}
        self._is_whole = False  # nothing goes on at once in this round
        self._passed: int | None = None  # when a barrier was passed that lets slices go on at once
        self._ready: Arrivals = []
        self._idle: dict[int, int] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return what is under way."""
        return {
            "under_way": self._under_way,
            "taken": self._taken,
            "is_whole": self._is_whole,
            "passed": self._passed,
            "ready": self._ready,
            "idle": self._idle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        for name, value in state.items():
            setattr(self, f"_{name}", value)

    # --------------------------------------------------------------------------- each by itself

    def hidden_download(self, worker: Worker, flight: Flight) -> int:
        """Return the microseconds of its download during which a worker computes already."""
        chain = self._download(worker, flight)
        return self.network.hidden(worker.profile, chain.layers, chain.num_bytes, upload=False)

    def hidden_upload(self, worker: Worker, flight: Flight) -> int:
        """Return the microseconds of its upload during which a worker still computes."""
        chain = self._upload(worker, flight)
        return self.network.hidden(worker.profile, chain.layers, chain.num_bytes, upload=True)

    def _download(self, worker: Worker, flight: Flight) -> _Chain:
        names = self.state.changed(worker)
        sizes = {name: self.state.model[name].nbytes for name in names}
        return self._chain(worker, flight, sizes)

    def _upload(self, worker: Worker, flight: Flight) -> _Chain:
        return self._chain(worker, flight, self.state.upload_sizes(worker))

    def _chain(self, worker: Worker, flight: Flight, sizes: Mapping[str, int]) -> _Chain:
        """Return the layers of a transfer; of a step, a third is forward.

        Under a plan, what is left of the step is backward through the layers that it trains.
        """
        step = flight.step / MICROSECONDS
        forward = min(step / worker.step_share / 3, step)
        plan = worker.plan
        trained = [
            layer.share if plan is None or plan.slices.keys() & set(layer.names) else 0.0
            for layer in self.layers
        ]
        total = sum(trained) or 1.0
        num_bytes = [sum(sizes.get(name, 0) for name in layer.names) for layer in self.layers]
        layers = [
            Layer(size // 4, forward * layer.share, (step - forward) * share / total)
            for size, layer, share in zip(num_bytes, self.layers, trained, strict=True)
        ]
        whole = round(forward * MICROSECONDS)
        return _Chain(layers, sum(num_bytes), whole, flight.step - whole)

    # ------------------------------------------------------------------------------ at a barrier

    def sent(self, worker: Worker, flight: Flight, end: int) -> None:
        """Note when each slice of a commit will be there; training ends at `end`."""
        arrival = flight.arrival
        assert arrival is not None
        if not self.has_barriers:
            return
        chain = self._upload(worker, flight)
        begin = end - chain.backward
        if worker.presence.away_between(begin, arrival):
            self._is_whole = True
            return
        found: Arrivals = [[] for _ in self.layers]
        for layer, after in self.network.uploaded(worker.profile, chain.layers, chain.num_bytes):
            found[layer].append(min(begin + after, arrival))
        self._under_way[worker.id] = (end, found)

    def arrived(self, worker: Worker, *, is_taken: bool) -> None:
        """Note that a worker's commit has been taken in, or that it will bring none."""
        sent = self._under_way.pop(worker.id, None)
        if sent is None or not is_taken:
            self._is_whole = True
        else:
            self._taken[worker.id] = sent

    def pass_barrier(self) -> None:
        """Note that a barrier is passed now."""
        everything = list(self._taken.values())
        self._passed = None if self._is_whole or not everything else self.state.now
        self._ready = [
            _latest([arrivals[layer] for _, arrivals in everything])
            for layer in range(len(self.layers))
        ]
        self._idle = {id_: end for id_, (end, _) in self._taken.items()}
        self._taken, self._is_whole = {}, False

    def start(self, worker: Worker, flight: Flight) -> int | None:
        """Return when a worker that is released at a barrier starts; it may be before.

        None where slices did not go on at once, so that its download begins with its release.
        """
        now = self.state.now
        if self._passed != now or worker.id not in self._idle:
            return None
        if worker.presence.away or worker.is_stock:
            return None
        chain, idle = self._download(worker, flight), self._idle[worker.id]
        base = min([idle, *(time for each in self._ready for time in each)])
        ready = [[time - base for time in each] for each in self._ready]
        end = self.network.next_forward_end(
            worker.profile, chain.layers, chain.num_bytes, ready, now - base, idle - base
        )
        return base + end - chain.forward


def _latest(arrivals: list[list[int]]) -> list[int]:
    """Return when all workers' slices are there: of each, or of all where they are cut unlike."""
    found = [each for each in arrivals if each]
    if len({len(each) for each in found}) == 1:
        return [max(times) for times in zip(*found, strict=True)]
    return [max(max(each) for each in found)] if found else []
