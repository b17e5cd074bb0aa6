"""What the event loop and the strategies know: the model, the workers and their assignments."""

from collections import Counter
from dataclasses import dataclass, field

from flwr.app import ArrayRecord

from flower_adsp.arrays import Weights, encode, num_bytes
from flower_adsp.clock import MICROSECONDS
from flower_adsp.devices import ALWAYS, DeviceProfile, Presence
from flower_adsp.messages import Assignment


@dataclass(frozen=True)
class Work:
    """A strategy's answer to what a worker does next: a number of steps, or seconds.

    With `overlaps` it has gone on training while its last commit and the model travelled, and
    does so after this one. In virtual time, one that `keeps` its model may go on from it, where the
    next work does not pull the server's (`pulls`). `batch_size` is None for the task's.
    """

    steps: int | None = None
    seconds: float | None = None
    overlaps: bool = False
    keeps: bool = False
    pulls: bool = True
    batch_size: int | None = None


@dataclass
class Flight:
    """An open assignment. All times are in microseconds of the run's clock.

    Parameters
    ----------
    assignment : Assignment
        What was asked.
    message_id : str | None
        Id of the message; None if it could not be sent.
    released : int
        t_r, when the worker's pull began.
    start : int
        t3, when it starts training.
    end : int | None
        t1, when its training ends; None while unknown.
    arrival : int | None
        t2, when its commit arrives; None while unknown.
    step : int
        Microseconds a step takes.
    overlapped : int
        Microseconds it trained between its last commit's t1 and t3.
    away : int
        Microseconds of the time from `start` to `end` that it is away.
    sent : ArrayRecord | None
        The model that went with it, kept only where the reply will be the full model.
    """

    assignment: Assignment
    message_id: str | None
    released: int
    start: int
    end: int | None
    arrival: int | None
    step: int
    overlapped: int = 0
    away: int = 0
    sent: ArrayRecord | None = None


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
        Version of the model that it pulled last.
    presence : Presence
        When it is there.
    is_away : bool
        Whether it is not there at present.
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
    version: int = 0
    presence: Presence = ALWAYS
    is_away: bool = False
    counted_before: int = 0

    @property
    def count(self) -> int:
        """Return c_i, the commits that count for ADSP's targets."""
        return self.commits + self.counted_before

    @property
    def speed(self) -> float:
        """Return v_i, steps per second."""
        return self.profile.speed(self.batch_size)

    @property
    def overhead_seconds(self) -> float:
        """Return O_i in seconds."""
        return self.overhead / MICROSECONDS

    def spent(self, now: int) -> tuple[int, int, int]:
        """Return the microseconds computing, communicating and blocked until `now`."""
        computing, communicating, blocked = self.computing, self.communicating, self.blocked
        if self.flight is not None:
            start, end = self.flight.start, self.flight.end
            until = min(now, now if end is None else end)
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

    Attributes
    ----------
    is_evaluated : bool
        Whether the model is evaluated at the server.
    alarms : list[tuple[int, int]]
        Microseconds and subject of the alarms that the strategy asks for; the loop takes them.
    """

    def __init__(self, model: Weights, workers: list[Worker], weighting: str = "equal") -> None:
        self.model = model
        self.workers = {worker.id: worker for worker in workers}
        self.weighting = weighting
        self.version = 0
        self.index = 0
        self.now = 0
        self.num_bytes = num_bytes(model)
        self.is_evaluated = False
        self.alarms: list[tuple[int, int]] = []
        self._encoded: ArrayRecord | None = None

    @property
    def num_workers(self) -> int:
        """Return M, the number of workers that are there."""
        return len(self.present)

    @property
    def present(self) -> list[Worker]:
        """Return the workers that are there, or all while none is."""
        workers = list(self.workers.values())
        return [worker for worker in workers if not worker.is_away] or workers

    @property
    def seconds(self) -> float:
        """Return the time of the run's clock in seconds."""
        return self.now / MICROSECONDS

    @property
    def commits(self) -> int:
        """Return the number of commits applied."""
        return sum(worker.commits for worker in self.workers.values())

    def share(self, worker: Worker, num_examples: int) -> float:
        """Return the worker's share of a full round: 1/M, or its examples over all examples."""
        if self.weighting == "equal":
            return 1.0 / self.num_workers
        total = sum(
            num_examples if other is worker else other.num_examples or num_examples
            for other in self.present
        )
        return num_examples / total

    def model_changed(self) -> None:
        """Note that the model has a new version."""
        self.version += 1
        self._encoded = None

    def encoded(self) -> ArrayRecord:
        """Return the model as a record; one record serves all who get the same version."""
        if self._encoded is None:
            self._encoded = encode(self.model)
        return self._encoded
