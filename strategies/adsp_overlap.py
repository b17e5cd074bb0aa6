"""ADSP whose workers train on while their commits travel."""

from math import sqrt

from flower_adsp.strategies.adsp import Adsp, step_size
from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.state import Work, Worker

from flower_adsp.arrays import add_scaled, mix_buffers
from flower_adsp.errors import require
from flower_adsp.messages import Commit


def square_root_rate(check_period: float, overhead: float) -> int:
    """Return ΔC = round(√(0.4 Γ/O)), at least 1: a fixed rate in place of a search.

    The time to a loss is roughly proportional to (1 + c₁/ΔC)/(1 − O·ΔC/Γ): more commits help
    less and less, and each costs O. Its minimum grows with √(Γ/O); 0.4 was fitted on runs.
    """
    return max(1, round(sqrt(0.4 * check_period / max(overhead, 1e-9))))


class AdspOverlap(Adsp):
    """ADSP that hides the communication, and takes larger steps at the server.

    Not published. A worker goes on training on its own model while its commit travels to the
    server and the new model to it; then it moves the new model by as much as these steps had moved
    its own, and goes on from there. The commit that follows contains them. The commit rate is not
    searched, unless asked for: it follows from Γ and the mean O_i (`square_root_rate`), and is at
    most such that the slowest worker has a step for each commit. On a wall clock a node has one
    open message at a time, so that there nothing overlaps.

    Parameters
    ----------
    check_period : float (default: 60.0)
        Γ, seconds between checkpoints.
    commit_rate : int | None (default: None)
        Commits of each worker in a check period; None for the square-root rule.
    step_factor : float (default: 1.0)
        η = step_factor/M; with weights by examples it scales the share in the same way.
    overlap : bool (default: True)
        Whether workers train on while they communicate.
    catch_up : bool (default: True)
        As for `Adsp`.
    loop : LoopOptions | None (default: None)
        Options of the event loop.
    """

    def __init__(
        self,
        check_period: float = 60.0,
        commit_rate: int | None = None,
        step_factor: float = 1.0,
        overlap: bool = True,
        catch_up: bool = True,
        loop: LoopOptions | None = None,
    ) -> None:
        super().__init__(
            check_period, 1 if commit_rate is None else commit_rate, catch_up=catch_up, loop=loop
        )
        require(step_factor > 0, "step_factor", step_factor, "above 0")
        self.chooses_rate = commit_rate is None
        self.step_factor = step_factor
        self.overlap = overlap

    def begin(self) -> None:
        """Choose the commit rate where none is given."""
        if self.chooses_rate:
            workers = self.state.workers.values()
            overhead = sum(worker.overhead_seconds for worker in workers) / len(workers)
            slowest = min(worker.speed for worker in workers)
            most = max(1, int(self.check_period * slowest / 2))
            self.commit_rate = min(square_root_rate(self.check_period, overhead), most)
        super().begin()

    def assign(self, worker: Worker) -> Work:
        """Train until the timer runs out, and on."""
        work = super().assign(worker)
        return Work(seconds=work.seconds, overlaps=self.overlap and not worker.is_stock)

    def apply(self, worker: Worker, commit: Commit) -> bool:
        """Do W ← W + η·δ at once."""
        rate = self.step_factor * step_size(self.state, worker, commit, None)
        add_scaled(self.state.model, commit.update, rate)
        mix_buffers(self.state.model, commit.buffers, min(rate, 1.0))
        return True

    def describe(self) -> dict[str, object]:
        """Return the settings by name."""
        return super().describe() | {
            "commit_rate": "by the square-root rule" if self.chooses_rate else self.commit_rate,
            "server_learning_rate": f"{self.step_factor}/M",
            "overlap": self.overlap,
        }
