"""FedCompass: local steps in proportion to speed, so that groups of devices arrive together.

Li et al., "FedCompass: Efficient Cross-Silo Federated Learning on Heterogeneous Client Devices
Using a Computing Power-Aware Scheduler", ICLR 2024, https://arxiv.org/abs/2309.14675.
"""

from dataclasses import dataclass, field

from flower_adsp.strategies.base import CommitStrategy
from flower_adsp.strategies.coverage import mean_over_trainers
from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.state import Work, Worker

from flower_adsp.arrays import add_scaled, mix_buffers
from flower_adsp.clock import MICROSECONDS
from flower_adsp.errors import require
from flower_adsp.messages import Commit


@dataclass
class ArrivalGroup:
    """Workers that are to arrive together.

    Parameters
    ----------
    id : int
        Its number.
    expected, latest : float
        Seconds of the run at which they should, and must, arrive.
    fastest : float
        Seconds per step of its fastest worker.
    open : set[int]
        Workers still to arrive.
    arrived : list[tuple[int, float, Commit]]
        Worker, weight and commit of those that have.
    """

    id: int
    expected: float
    latest: float
    fastest: float
    open: set[int] = field(default_factory=set)
    arrived: list[tuple[int, float, Commit]] = field(default_factory=list)


class FedCompass(CommitStrategy):
    """Computing-power-aware scheduling.

    A worker that is to start joins the group in which it can take the most steps, from q_min to
    q_max, and still arrive when the group is expected. If there is none it opens one: it takes as
    many steps, up to q_max, as let it arrive with the next round of the fastest of a group that is
    under way, or q_max. Updates of a group are added up once all have arrived or its latest time
    has come, W ← W + Σ p_i (1 + τ)^−a δ_i with p_i = 1/M or the share of examples; until then those
    who have arrived wait. An update that comes later is added with the next group's. The first
    assignment of each worker has q_min steps and no group. Speeds and communication are those of
    the profile and of the last commit.

    Parameters
    ----------
    min_local_steps : int (default: 5)
        q_min.
    max_local_steps : int (default: 40)
        q_max.
    latest_time_factor : float (default: 1.2)
        λ: the latest time is λ times the time to the expected one.
    staleness_exponent : float (default: 0.5)
        a.
    check_period : float (default: 60.0)
        Seconds by which `num_rounds` counts.
    loop : LoopOptions | None (default: None)
        Options of the event loop.
    """

    stored: tuple[str, ...] = ("groups", "_of", "_late", "_blocked", "_opened")
    stored_kinds: tuple[type, ...] = (ArrivalGroup,)

    def __init__(
        self,
        min_local_steps: int = 5,
        max_local_steps: int = 40,
        latest_time_factor: float = 1.2,
        staleness_exponent: float = 0.5,
        check_period: float = 60.0,
        loop: LoopOptions | None = None,
    ) -> None:
        super().__init__(loop)
        require(min_local_steps >= 1, "min_local_steps", min_local_steps, "at least 1")
        require(
            max_local_steps >= min_local_steps,
            "max_local_steps",
            max_local_steps,
            f"at least min_local_steps = {min_local_steps}",
        )
        require(latest_time_factor >= 1, "latest_time_factor", latest_time_factor, "at least 1")
        require(staleness_exponent >= 0, "staleness_exponent", staleness_exponent, "at least 0")
        require(check_period > 0, "check_period", check_period, "above 0 seconds")
        self.min_local_steps = min_local_steps
        self.max_local_steps = max_local_steps
        self.latest_time_factor = latest_time_factor
        self.staleness_exponent = staleness_exponent
        self.check_period: float = check_period
        self.groups: dict[int, ArrivalGroup] = {}
        self._of: dict[int, int | None] = {}
        self._late: list[tuple[float, Commit]] = []
        self._blocked: set[int] = set()
        self._opened = 0

    def begin(self) -> None:
        """Forget the groups of an earlier run."""
        self.groups, self._of, self._late, self._blocked = {}, {}, [], set()
        self._opened = 0

    def assign(self, worker: Worker) -> Work:
        """Put the worker into a group, and let it take as many steps as fit."""
        if worker.id not in self._of:
            self._of[worker.id] = None
            return Work(steps=self.min_local_steps)
        group, steps = self._join(worker)
        group.open.add(worker.id)
        group.fastest = min(group.fastest, 1 / worker.speed)
        self._of[worker.id] = group.id
        return Work(steps=steps)

    def _join(self, worker: Worker) -> tuple[ArrivalGroup, int]:
        now, step = self.state.seconds + worker.overhead_seconds, 1 / worker.speed
        best, most, aligned = None, 0, -1
        for group in self.groups.values():
            if group.expected <= now:
                continue
            steps = int((group.expected - now) / step)
            if self.min_local_steps <= steps <= self.max_local_steps and steps > most:
                best, most = group, steps
            after = group.expected + self.max_local_steps * group.fastest
            steps = int((after - now) / step)
            if steps <= self.max_local_steps:
                aligned = max(aligned, steps)
        if best is not None:
            return best, most
        steps = self.max_local_steps if aligned < 0 else max(aligned, self.min_local_steps)
        duration = worker.overhead_seconds + steps * step
        begin = self.state.seconds
        group = ArrivalGroup(
            self._opened, begin + duration, begin + duration * self.latest_time_factor, step
        )
        self._opened += 1
        self.groups[group.id] = group
        self.state.alarms.append((round(group.latest * MICROSECONDS), group.id))
        return group, steps

    def may_start(self, worker: Worker) -> bool:
        """Let those wait whose group is not complete."""
        return worker.id not in self._blocked

    def apply(self, worker: Worker, commit: Commit) -> bool:
        """Take the update in with its group."""
        staleness = self.state.version - commit.version
        share = self.state.share(worker, commit.num_examples)
        weight = share * (1.0 + staleness) ** -self.staleness_exponent
        number = self._of[worker.id]
        if number is None:
            return self._add([(weight, commit)])
        group = self.groups.get(number)
        if group is None:  # it has been aggregated
            self._late.append((weight, commit))
            return False
        group.open.discard(worker.id)
        group.arrived.append((worker.id, weight, commit))
        self._blocked.add(worker.id)
        return False if group.open else self._close(group)

    def refuse(self, worker: Worker) -> bool:
        """Go on without the worker's update."""
        number = self._of[worker.id]
        group = None if number is None else self.groups.get(number)
        if group is None:
            return False
        group.open.discard(worker.id)
        return False if group.open else self._close(group)

    def alarm(self, subject: int) -> bool:
        """Aggregate a group at its latest time."""
        group = self.groups.get(subject)
        return group is not None and self._close(group)

    def _close(self, group: ArrivalGroup) -> bool:
        del self.groups[group.id]
        self._blocked -= {worker for worker, _, _ in group.arrived}
        return self._add([(weight, commit) for _, weight, commit in group.arrived])

    def _add(self, updates: list[tuple[float, Commit]]) -> bool:
        updates += self._late
        self._late = []
        if not updates:
            return False
        for weight, commit in updates:
            add_scaled(self.state.model, self.state.per_trainer(commit), weight)
        total = sum(weight for weight, _ in updates)
        shares = [weight / total for weight, _ in updates]
        buffers = mean_over_trainers([commit for _, commit in updates], shares, "buffers")
        mix_buffers(self.state.model, buffers, min(total, 1.0))
        return True

    def status(self) -> dict[str, float | int | list[int]]:
        """Return how many groups are under way."""
        return {"groups": len(self.groups)}

    def describe(self) -> dict[str, object]:
        """Return the settings by name."""
        return {
            "min_local_steps": self.min_local_steps,
            "max_local_steps": self.max_local_steps,
            "latest_time_factor": self.latest_time_factor,
            "staleness_exponent": self.staleness_exponent,
            "check_period": self.check_period,
        }
