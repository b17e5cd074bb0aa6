"""SSP: nobody is more than s steps ahead of the slowest.

Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
NeurIPS 2013, https://papers.nips.cc/paper/4894.
"""

from flower_adsp.strategies.adsp import step_size
from flower_adsp.strategies.base import CommitStrategy
from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.state import Work, Worker

from flower_adsp.arrays import add_scaled, mix_buffers
from flower_adsp.errors import require
from flower_adsp.messages import Commit


class Ssp(CommitStrategy):
    """Stale synchronous parallel.

    A worker takes one step, commits it, and pulls the model. It may start its step k + 1 if it
    leads the slowest worker by at most s steps, k − min_j k_j ≤ s; else it waits. With s = 0 this
    is bulk synchronous parallel. A refused commit counts as a step, so that a device that fails
    does not hold the others. `num_rounds` counts the steps of the slowest worker.

    Parameters
    ----------
    staleness : int (default: 40)
        s, the steps by which a worker may lead.
    server_learning_rate : float | None (default: None)
        η. None is 1/M, or the share of examples where commits weigh by them.
    loop : LoopOptions | None (default: None)
        Options of the event loop.
    """

    def __init__(
        self,
        staleness: int = 40,
        server_learning_rate: float | None = None,
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
        self.staleness = staleness
        self.server_learning_rate = server_learning_rate
        self.finished: dict[int, int] = {}

    def begin(self) -> None:
        """Set all workers' steps to zero."""
        self.finished = dict.fromkeys(self.state.workers, 0)

    def assign(self, worker: Worker) -> Work:
        """Take one step."""
        return Work(steps=1)

    def may_start(self, worker: Worker) -> bool:
        """Let a worker go that leads by at most s."""
        return self.finished[worker.id] - min(self.finished.values()) <= self.staleness

    def apply(self, worker: Worker, commit: Commit) -> bool:
        """Do W ← W + η·δ at once."""
        rate = step_size(self.state, worker, commit, self.server_learning_rate)
        add_scaled(self.state.model, commit.update, rate)
        mix_buffers(self.state.model, commit.buffers, rate)
        self._finish(worker)
        return True

    def refuse(self, worker: Worker) -> bool:
        """Count the step, without its update."""
        self._finish(worker)
        return False

    def _finish(self, worker: Worker) -> None:
        self.finished[worker.id] += 1
        self.state.index = min(self.finished.values())

    def describe(self) -> dict[str, object]:
        """Return the settings by name."""
        return {
            "staleness": self.staleness,
            "server_learning_rate": self.server_learning_rate or "1/M",
        }
