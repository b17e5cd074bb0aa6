"""ADSP: each device commits on its own timer, and all commit equally often.

Hu, Wang and Wu, "Distributed Machine Learning through Heterogeneous Edge Systems", AAAI 2020,
https://arxiv.org/abs/1911.06949.
"""

from logging import WARNING

from flower_adsp.strategies.base import CommitStrategy
from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.state import FederationState, Work, Worker
from flwr.common.logger import log

from flower_adsp.arrays import add_scaled, mix_buffers
from flower_adsp.errors import require
from flower_adsp.messages import Commit


def commits_due(commit_target: int, commits: int) -> int:
    """Return ΔC_i = max(1, C_target − c_i), the commits a worker owes in the check period."""
    return max(1, commit_target - commits)


def commit_timer(check_period: float, due: int, overhead: float) -> float:
    """Return the seconds a worker trains between commits, Γ/ΔC_i − O_i, at least 0."""
    return max(0.0, check_period / due - overhead)


class Adsp(CommitStrategy):
    """Adaptive synchronous parallel, with a given commit rate.

    No worker waits for another. Worker i trains for Γ/ΔC_i − O_i seconds, commits its accumulated
    update U_i, and gets the new model at once; the server does W ← W + η·δ with δ = −U_i. At each
    checkpoint C_target grows by the commit rate and ΔC_i = C_target − c_i is set anew, so that a
    worker that fell behind gets a shorter timer; it hears of it with its next assignment.

    Parameters
    ----------
    check_period : float (default: 60.0)
        Γ, seconds between checkpoints.
    commit_rate : int (default: 4)
        Commits of each worker in a check period.
    server_learning_rate : float | None (default: None)
        η. None is the published 1/M, or the share of examples where commits weigh by them.
    catch_up : bool (default: True)
        Whether ΔC_i follows from c_i. If not, it is the commit rate for all, as in the authors'
        released code.
    timer_floor : float (default: 0.0)
        Least seconds of a timer. Zero as published; the authors' released code has 10.
    loop : LoopOptions | None (default: None)
        Options of the event loop.
    """

    def __init__(
        self,
        check_period: float = 60.0,
        commit_rate: int = 4,
        server_learning_rate: float | None = None,
        catch_up: bool = True,
        timer_floor: float = 0.0,
        loop: LoopOptions | None = None,
    ) -> None:
        super().__init__(loop)
        require(check_period > 0, "check_period", check_period, "above 0 seconds")
        require(commit_rate >= 1, "commit_rate", commit_rate, "at least 1 commit a check period")
        require(timer_floor >= 0, "timer_floor", timer_floor, "at least 0 seconds")
        require(
            server_learning_rate is None or server_learning_rate > 0,
            "server_learning_rate",
            server_learning_rate,
            "None or above 0",
        )
        self.check_period: float = check_period
        self.commit_rate = commit_rate
        self.server_learning_rate = server_learning_rate
        self.catch_up = catch_up
        self.timer_floor = timer_floor
        self.commit_target = commit_rate
        self.due: dict[int, int] = {}

    def begin(self) -> None:
        """Set the first target, and say which workers cannot keep up with it."""
        self.commit_target = self.commit_rate
        self._set_due()
        for worker in self.state.workers.values():
            needed = 2 * (1 / worker.speed + worker.overhead_seconds)
            if self.loop.clock == "virtual" and self.check_period / self.commit_rate < needed:
                log(
                    WARNING,
                    "worker %d (%s) cannot keep up: Γ/r = %.2f s is less than two steps and two "
                    "commits of its own (%.2f s); lower the commit rate or raise the check period",
                    worker.id,
                    worker.profile.name,
                    self.check_period / self.commit_rate,
                    needed,
                )

    def _set_due(self) -> None:
        for worker in self.state.workers.values():
            self.due[worker.id] = (
                commits_due(self.commit_target, worker.commits)
                if self.catch_up
                else self.commit_rate
            )

    def assign(self, worker: Worker) -> Work:
        """Train until the timer runs out."""
        timer = commit_timer(self.check_period, self.due[worker.id], worker.overhead_seconds)
        return Work(seconds=max(self.timer_floor, timer))

    def apply(self, worker: Worker, commit: Commit) -> bool:
        """Do W ← W + η·δ at once."""
        rate = step_size(self.state, worker, commit, self.server_learning_rate)
        add_scaled(self.state.model, commit.update, rate)
        mix_buffers(self.state.model, commit.buffers, rate)
        return True

    def checkpoint(self) -> None:
        """Let the target grow by the commit rate."""
        self.commit_target += self.commit_rate
        self._set_due()

    def status(self) -> dict[str, float | int | list[int]]:
        """Return C_target and each worker's ΔC_i."""
        return {
            "commit_target": self.commit_target,
            "commits_due": [self.due[id_] for id_ in sorted(self.due)],
        }

    def describe(self) -> dict[str, object]:
        """Return the settings by name."""
        return {
            "check_period": self.check_period,
            "commit_rate": self.commit_rate,
            "server_learning_rate": self.server_learning_rate or "1/M",
            "catch_up": self.catch_up,
            "timer_floor": self.timer_floor,
        }


def step_size(state: FederationState, worker: Worker, commit: Commit, given: float | None) -> float:
    """Return η for an asynchronous commit: as given, or the worker's share of a full round."""
    return state.share(worker, commit.num_examples) if given is None else given
