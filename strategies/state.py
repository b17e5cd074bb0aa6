"""What the event loop and the strategies know: the model, the workers and their assignments."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flower_adsp.strategies.coverage import Coverage
from flwr.app import ArrayRecord

from flower_adsp.arrays import Weights, encode, is_buffer_name, mix_buffers, num_bytes
from flower_adsp.clock import MICROSECONDS
from flower_adsp.codec import AS_IT_IS, travelling_bytes
from flower_adsp.devices import ALWAYS, DeviceProfile, Presence
from flower_adsp.messages import Assignment, Commit
from flower_adsp.network.rings import Hop
from flower_adsp.sparse.plan import LayerPlan, WorkerPlan

_STORED = (
    "model", "workers", "version", "index", "now", "alarms", "plan",
    "_trained", "_commits", "_statistics", "_statistics_version", "_changes",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """A strategy's answer to what a worker does next: a number of steps, or seconds.

    With `overlaps` it has gone on training while its last commit and the model travelled, and
    does so after this one. In virtual time, one that `keeps` its model may go on from it, where the
    next work does not pull the server's (`pulls`). `batch_size` is None for the task's. With an
    `fp32_share`, so much of each mini-batch is trained in FP32, the rest in INT8 on an NPU.
    """

    steps: int | None = None
    seconds: float | None = None
    overlaps: bool = False
    keeps: bool = False
    pulls: bool = True
    batch_size: int | None = None
    fp32_share: float | None = None


@dataclass
class Flight:
    """An open assignment. All times are in microseconds of the run's clock.

    Parameters
    ----------
    assignment : Assignment
        What was asked.
    work : Work
        What the strategy wanted, from which the assignment was made.
    released : int
        t_r, when the worker's pull began.
    message_id : str | None
        Id of the message; None if it could not be sent, or has not been.
    start : int | None
        t3, when it starts training; None while the model is under way over shared links.
    end : int | None
        t1, when its training ends; None while unknown.
    arrival : int | None
        t2, when its commit arrives; None while unknown. In real time it is what is expected.
    step : int
        Microseconds a step takes.
    overlapped : int
        Microseconds it trained between its last commit's t1 and t3.
    unblocked : int
        Microseconds it trained before `released`, booked as blocked and taken back.
    away : int
        Microseconds of the time from `start` to `end` that it is away.
    plan : WorkerPlan | None
        What it trains; None for all.
    sent : ArrayRecord | None
        The model that went with it, kept where somebody will ask for it.
    missed : tuple[str, str] | None
        Kind and detail of why no answer will come, where that is known before its time is up.
    """

    assignment: Assignment
    work: Work
    released: int
    message_id: str | None = None
    start: int | None = None
    end: int | None = None
    arrival: int | None = None
    step: int = 0
    overlapped: int = 0
    unblocked: int = 0
    away: int = 0
    plan: WorkerPlan | None = None
    sent: ArrayRecord | None = None
    missed: tuple[str, str] | None = None

    def limit(self, factor: float) -> int:
        """Return the time after which it is given up: so many times as long as it should take."""
        assert self.arrival is not None
        return self.released + round(factor * (self.arrival - self.released))


@dataclass
class Worker:
    """A device that takes part.

    Parameters
    ----------
    id : int
        Its partition id, by which it is known all through a run.
    node_id : int
        Flower's id of the node it is now.
    profile : DeviceProfile
        Its speed, link and memory.
    num_examples : int
        Training examples it has; 0 while unknown.
    batch_size : int
        Size of its mini-batches.
    is_stock : bool
        Whether its ClientApp only knows Flower's own messages.
    overhead : int
        O_i, microseconds that its last commit spent communicating.
    idle_since : int | None
        When its last commit arrived, while it has no new assignment.
    trained_until : int | None
        t1 of its last commit, if it kept its model and may train on from there.
    version : int
        Version of the model that it pulled last; −1 before the first.
    plan : WorkerPlan | None
        What it trains; None for all.
    presence : Presence
        When it is there.
    is_away : bool
        Whether it is not there at present.
    is_resting : bool
        Whether it gets nothing to do for a while, since it failed several times in a row.
    trained_from : ArrayRecord | None
        The model that its last commit started from, kept where the strategy needs it.
    device_state : dict[str, ArrayRecord]
        What the device keeps from one commit to the next, where checkpoints hold it.
    joined : int
        When it joined the run, in microseconds.
    counted_before : int
        Commits that count for ADSP's targets without having been made, since it was away.
    """

    id: int
    node_id: int
    profile: DeviceProfile
    num_examples: int = 0
    batch_size: int = 32
    is_stock: bool = False
    overhead: int = 0
    commits: int = 0
    steps: int = 0
    computing: int = 0
    communicating: int = 0
    blocked: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failures_in_a_row: int = 0
    flight: Flight | None = None
    idle_since: int | None = 0
    trained_until: int | None = None
    version: int = -1
    plan: WorkerPlan | None = None
    presence: Presence = ALWAYS
    is_away: bool = False
    is_resting: bool = False
    joined: int = 0
    counted_before: int = 0
    trained_from: ArrayRecord | None = None
    device_state: dict[str, ArrayRecord] = field(default_factory=dict)

    @property
    def is_present(self) -> bool:
        """Tell whether it takes part at present."""
        return not (self.is_away or self.is_resting)

    @property
    def count(self) -> int:
        """Return c_i, the commits that count for ADSP's targets."""
        return self.commits + self.counted_before

    @property
    def speed(self) -> float:
        """Return v_i, steps per second."""
        return self.profile.speed(self.batch_size) / self.step_share

    @property
    def step_share(self) -> float:
        """Return the time of its steps as a part of those that train all."""
        return 1.0 if self.plan is None else self.plan.time_share

    @property
    def overhead_seconds(self) -> float:
        """Return O_i in seconds."""
        return self.overhead / MICROSECONDS

    def spent(self, now: int) -> tuple[int, int, int]:
        """Return the microseconds computing, communicating and blocked until `now`."""
        computing, communicating, blocked = self.computing, self.communicating, self.blocked
        if self.flight is not None:
            end = self.flight.end
            until = min(now, now if end is None else end)
            start = until if self.flight.start is None else self.flight.start
            trained = max(until - start - self.presence.away_between(start, until), 0)
            computing += trained
            released = self.flight.released
            away = self.presence.away_between(released, now)
            communicating += now - released - away - trained
        elif self.idle_since is not None:
            blocked += now - self.idle_since
        return computing, communicating, blocked


class FederationState:
    """The global model and the workers.

    Parameters
    ----------
    model : Weights
        The initial model; it is changed in place.
    workers : list[Worker]
        Those who take part, in order of id.
    weighting : str
        ``equal`` or ``examples``.
    codec : str (default: "float32")
        What updates travel as.

    Attributes
    ----------
    is_evaluated : bool
        Whether the model is evaluated at the server.
    alarms : list[tuple[int, int]]
        Microseconds and subject of the alarms that the strategy asks for; the loop takes them.
    hops : dict[int, Hop]
        Whom a worker exchanges with, for those that do so in a ring and not with the server.
    turns : dict[int, int]
        The group of each worker whose group takes turns with others at what they share.
    """

    def __init__(
        self,
        model: Weights,
        workers: list[Worker],
        weighting: str = "equal",
        codec: str = AS_IT_IS,
    ) -> None:
        self.model = model
        self.workers = {worker.id: worker for worker in workers}
        self.weighting = weighting
        self.codec = codec
        self.version = 0
        self.index = 0
        self.now = 0
        self.num_bytes = num_bytes(model)
        self.is_evaluated = False
        self.alarms: list[tuple[int, int]] = []
        self.hops: dict[int, Hop] = {}
        self.turns: dict[int, int] = {}
        self.plan: LayerPlan | None = None
        self._coverage: Coverage | None = None
        self._trained: dict[str, set[int]] = {}
        self._statistics: frozenset[str] = frozenset()
        self._statistics_version = 0
        self._changes: dict[str, tuple[int, int | None]] = {}
        self._encoded: ArrayRecord | None = None
        self._present: list[Worker] | None = None
        self._commits = 0

    @property
    def num_workers(self) -> int:
        """Return M, the number of workers that are there."""
        return len(self.present)

    @property
    def present(self) -> list[Worker]:
        """Return the workers that are there, or all while none is."""
        if self._present is None:
            workers = list(self.workers.values())
            self._present = [worker for worker in workers if worker.is_present] or workers
        return self._present

    @property
    def seconds(self) -> float:
        """Return the time of the run's clock in seconds."""
        return self.now / MICROSECONDS

    @property
    def commits(self) -> int:
        """Return the number of commits applied."""
        return self._commits

    def share(self, worker: Worker, num_examples: int) -> float:
        """Return the worker's share of a full round: 1/M, or its examples over all examples."""
        if self.weighting == "equal":
            return 1.0 / self.num_workers
        total = sum(
            num_examples if other is worker else other.num_examples or num_examples
            for other in self.present
        )
        return num_examples / total

    def set_plan(self, plan: LayerPlan) -> None:
        """Set what each worker that is there trains from its next assignment on."""
        self.plan = plan
        for id_, mine in plan.workers.items():
            self.workers[id_].plan = mine
        self._coverage = None

    def add(self, worker: Worker) -> None:
        """Take in a worker that has joined."""
        self.workers[worker.id] = worker
        self.workers = dict(sorted(self.workers.items()))
        self.workers_changed()

    def workers_changed(self) -> None:
        """Note that a worker joined, left or came back."""
        self._coverage = None
        self._present = None

    def state_dict(self) -> dict[str, Any]:
        """Return all of it but what follows from the rest."""
        return {name: getattr(self, name) for name in _STORED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        for name in _STORED:
            setattr(self, name, state[name])

    def per_trainer(self, commit: Commit) -> Weights:
        """Return a commit's update scaled so that each slice counts over those that train it.

        A strategy adds it with the worker's share of all workers; where all train all, it is the
        update as it came. The commit's own arrays are changed.
        """
        if self.plan is None:
            return commit.update
        for name, update in commit.update.items():
            factor = self._covered.factor(name)
            if not (isinstance(factor, float) and factor == 1.0):
                update *= np.asarray(factor, update.dtype)
        return commit.update

    def mix_in(self, commit: Commit, rate: float) -> None:
        """Do buffer += rate · (value − buffer), at a rate over those that train it."""
        if self.plan is None:
            mix_buffers(self.model, commit.buffers, rate)
            return
        for name, value in commit.buffers.items():
            factor = self._covered.factor(name)
            assert isinstance(factor, float)
            mix_buffers(self.model, {name: value}, min(rate * factor, 1.0))

    @property
    def _covered(self) -> Coverage:
        if self._coverage is None:
            present = [worker for worker in self.present if worker.plan is not None]
            shares = [self.share(worker, worker.num_examples or 1) for worker in present]
            plans = [worker.plan for worker in present if worker.plan is not None]
            self._coverage = Coverage(zip(plans, shares, strict=True), self.model)
        return self._coverage

    def note_trained(self, worker: Worker, commit: Commit) -> None:
        """Note a commit that will be applied, and whose the next version of its units has in it."""
        worker.commits += 1
        self._commits += 1
        if self.plan is not None:
            for name in (*commit.update, *commit.buffers):
                self._trained.setdefault(self.plan.unit_of[name], set()).add(worker.id)

    def download_bytes(self, worker: Worker) -> int:
        """Return the bytes of what changed since a worker's last pull, but by itself alone.

        Without a plan that is the whole model.
        """
        if self.plan is None or worker.version < 0:
            return self.num_bytes
        return sum(self.model[name].nbytes for name in self.changed(worker))

    def changed(self, worker: Worker) -> set[str]:
        """Return the names of the arrays that a worker's next download holds."""
        if self.plan is None or worker.version < 0:
            return set(self.model)
        found: set[str] = set()
        for unit in self.plan.units:
            version, only = self._changes.get(unit.name, (0, None))
            names: Iterable[str] = ()
            if version > worker.version and only != worker.id:
                names = (*unit.parameters, *unit.buffers)
            elif self._statistics_version > worker.version:
                names = self._statistics.intersection(unit.buffers)
            found.update(name for name in names if name in self.model)
        return found

    @property
    def statistics(self) -> frozenset[str]:
        """Return the names of the buffers that are the server's own to set."""
        return self._statistics

    def set_statistics(self, statistics: Weights) -> None:
        """Set the statistics of normalisations, which go with the next version of the model."""
        self.model.update(statistics)
        self._statistics = frozenset(statistics)
        self._statistics_version = self.version + 1

    def upload_bytes(self, worker: Worker, plan: WorkerPlan | None = None) -> int:
        """Return the bytes of a worker's commit, by a plan or by its own at present."""
        plan = plan or worker.plan
        if plan is None and (worker.is_stock or self.codec == AS_IT_IS):
            return self.num_bytes
        return sum(self.upload_sizes(worker, plan).values())

    def upload_sizes(self, worker: Worker, plan: WorkerPlan | None = None) -> dict[str, int]:
        """Return the bytes of each array of a worker's commit.

        Without a plan, what is a buffer is told by BatchNorm's names.
        """
        plan = plan or worker.plan
        if plan is not None:
            return plan.upload_sizes(self.model, self.codec)
        codec = AS_IT_IS if worker.is_stock else self.codec
        return {
            name: array.nbytes if is_buffer_name(name) else travelling_bytes(array, codec)
            for name, array in self.model.items()
        }

    def model_changed(self) -> None:
        """Note that the model has a new version."""
        self.version += 1
        self._encoded = None
        for unit, trainers in self._trained.items():
            version, only = self._changes.get(unit, (0, None))
            sole = next(iter(trainers)) if len(trainers) == 1 else None
            # A worker has what it made itself, unless somebody else changed it since its last pull.
            if sole is not None and version > self.workers[sole].version and only != sole:
                sole = None
            self._changes[unit] = (self.version, sole)
        self._trained.clear()

    def encoded(self) -> ArrayRecord:
        """Return the model as a record; one record serves all who get the same version."""
        if self._encoded is None:
            self._encoded = encode(self.model)
        return self._encoded
