"""BSP: bulk synchronous parallel, a barrier after each step (or few) of every worker.

Valiant, "A bridging model for parallel computation", CACM 33(8), 1990,
https://doi.org/10.1145/79173.79181.
"""

from flower_adsp.strategies.base import CommitStrategy
from flower_adsp.strategies.coverage import apply_mean
from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.state import Work, Worker

from flower_adsp.errors import require
from flower_adsp.messages import Commit
from flower_adsp.sparse.plan import LayerPlanner


class Bsp(CommitStrategy):
    """Bulk synchronous parallel.

    Every worker takes `local_steps` steps from the same model; when all have committed, the model
    moves by the weighted mean of their updates, and all start again. A worker whose commit was
    refused has arrived without a contribution; one that has no assignment is not waited for.

    Parameters
    ----------
    local_steps : int (default: 1)
        τ, steps of each worker between barriers.
    loop : LoopOptions | None (default: None)
        Options of the event loop.
    plan : LayerPlanner | None (default: None)
        Plans which worker trains which layers; in place of the options' `planner`.
    """

    has_barriers = True
    stored: tuple[str, ...] = ("_arrived", "_is_open")

    def __init__(
        self,
        local_steps: int = 1,
        loop: LoopOptions | None = None,
        plan: LayerPlanner | None = None,
    ) -> None:
        super().__init__(loop, plan)
        require(local_steps >= 1, "local_steps", local_steps, "at least 1")
        self.local_steps = local_steps
        self._arrived: dict[int, Commit | None] = {}
        self._is_open = True

    def begin(self) -> None:
        """Open the first barrier."""
        self._arrived = {}
        self._is_open = True

    def assign(self, worker: Worker) -> Work:
        """Take the local steps."""
        return Work(steps=self.local_steps)

    def may_start(self, worker: Worker) -> bool:
        """Let workers go only once all have arrived."""
        return self._is_open

    def apply(self, worker: Worker, commit: Commit) -> bool:
        """Keep the commit until the barrier."""
        return self._arrive(worker, commit)

    def refuse(self, worker: Worker) -> bool:
        """Count the worker as arrived without a contribution."""
        return self._arrive(worker, None)

    def _arrive(self, worker: Worker, commit: Commit | None) -> bool:
        self._arrived[worker.id] = commit
        self._is_open = all(other.flight is None for other in self.state.workers.values())
        if not self._is_open:
            return False
        commits = [self._arrived[id_] for id_ in sorted(self._arrived)]
        self._arrived = {}
        self.state.index += 1
        return self._average([commit for commit in commits if commit is not None])

    def _average(self, commits: list[Commit]) -> bool:
        if not commits:
            return False
        equal = self.state.weighting == "equal"
        weights = [1.0 if equal else float(commit.num_examples) for commit in commits]
        apply_mean(self.state.model, commits, weights)
        return True

    def describe(self) -> dict[str, object]:
        """Return the settings by name."""
        return {"local_steps": self.local_steps}
