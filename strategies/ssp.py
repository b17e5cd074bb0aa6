"""SSP: nobody is more than s steps ahead of the slowest.

Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
NeurIPS 2013, https://papers.nips.cc/paper/4894.
"""

from flower_adsp.strategies.adsp import step_size
from flower_adsp.strategies.base import CommitStrategy
from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.state import Work, Worker

from flower_adsp.arrays import add_scaled
from flower_adsp.errors import require, unknown
from flower_adsp.messages import Commit

PULLS = ("each", "blocked")


class Ssp(CommitStrategy):
    """Stale synchronous parallel.

    A worker takes one step, commits it, and pulls the model. It may start its step k + 1 if it
    leads the slowest worker by at most s steps, k − min_j k_j ≤ s; else it waits. With s = 0 this
    is bulk synchronous parallel. A refused commit counts as a step, so that a device that fails
    does not hold the others, and a worker that was away goes on at the step of the slowest of those
    who were there. `num_rounds` counts the steps of the slowest worker
    that is there.

    Parameters
    ----------
    staleness : int (default: 40)
        s, the steps by which a worker may lead.
    server_learning_rate : float | None (default: None)
        η. None is 1/M, or the share of examples where commits weigh by them.
    pull : str (default: "each")
        When a worker pulls the model: ``each`` step, or only where it leads by s or more
        (``blocked``), as the ADSP authors' released code does; until then it goes on from its own.
        In real time the model comes with each step.
    loop : LoopOptions | None (default: None)
        Options of the event loop.
    """

    stored: tuple[str, ...] = ("finished", "_pulls")

    def __init__(
        self,
        staleness: int = 40,
        server_learning_rate: float | None = None,
        pull: str = "each",
        loop: LoopOptions | None = None,
    ) -> None:
        super().__init__(loop)
        require(staleness >= 0, "staleness", staleness, "at least 0")
        require(
            server_learning_rate is None or server_learning_rate > 0,
            "server_learning_rate",
            server_learning_rate,
            "None or above 0",
        )
        if pull not in PULLS:
            raise unknown("pull", pull, PULLS)
        self.staleness = staleness
        self.pull = pull
        self.server_learning_rate = server_learning_rate
        self.finished: dict[int, int] = {}
        self._pulls: dict[int, bool] = {}

    def begin(self) -> None:
        """Set all workers' steps to zero."""
        self.finished = dict.fromkeys(self.state.workers, 0)

    def assign(self, worker: Worker) -> Work:
        """Take one step."""
        if self.pull == "each":
            return Work(steps=1)
        return Work(steps=1, keeps=True, pulls=self._pulls.pop(worker.id, True))

    def may_start(self, worker: Worker) -> bool:
        """Let a worker go that leads by at most s."""
        return self._lead(worker) <= self.staleness

    def _lead(self, worker: Worker) -> int:
        return self.finished[worker.id] - min(self.finished[w.id] for w in self.state.present)

    def returned(self, worker: Worker) -> None:
        """Let it go on at the step of the slowest of those who were there."""
        others = [self.finished[w.id] for w in self.state.present if w is not worker]
        mine = self.finished.get(worker.id, 0)
        self.finished[worker.id] = max(mine, min(others, default=0))

    def apply(self, worker: Worker, commit: Commit) -> bool:
        """Do W ← W + η·δ at once."""
        rate = step_size(self.state, worker, commit, self.server_learning_rate)
        add_scaled(self.state.model, self.state.per_trainer(commit), rate)
        self.state.mix_in(commit, rate)
        self._finish(worker)
        self._pulls[worker.id] = self._lead(worker) >= self.staleness
        return True

    def refuse(self, worker: Worker) -> bool:
        """Count the step, without its update."""
        self._finish(worker)
        return False

    def _finish(self, worker: Worker) -> None:
        self.finished[worker.id] += 1
        slowest = min(self.finished[other.id] for other in self.state.present)
        self.state.index = max(self.state.index, slowest)

    def describe(self) -> dict[str, object]:
        """Return the settings by name."""
        return {
            "staleness": self.staleness,
            "server_learning_rate": self.server_learning_rate or "1/M",
            "pull": self.pull,
        }
