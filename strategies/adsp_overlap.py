"""ADSP whose workers train on while their commits travel."""

from flower_adsp.strategies.adsp import Adsp, step_size
from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.state import Work, Worker

from flower_adsp.arrays import add_scaled
from flower_adsp.errors import require
from flower_adsp.messages import Commit


def hidden_rate(check_period: float, step: float, overhead: float) -> int:
    """Return ⌊Γ / max(step, O)⌋, at least 1: as many commits as can be hidden.

    Where the communication costs no time, more commits only help, down to one for each step of
    the slowest worker, as long as one is through when the next begins.
    """
    return max(1, int(check_period / max(step, overhead)))


class AdspOverlap(Adsp):
    """ADSP that hides the communication, and takes larger steps at the server.

    Not published. A worker goes on training on its own model while its commit travels to the
    server and the new model to it; then it moves the new model by as much as these steps had moved
    its own, and goes on from there. The commit that follows contains them. The commit rate is not
    searched: it follows from Γ and the slowest worker's step and O_i (`hidden_rate`). On a wall
    clock a node has one open message at a time, so that there nothing overlaps.

    Parameters
    ----------
    check_period : float (default: 60.0)
        Γ, seconds between checkpoints.
    commit_rate : int | None (default: None)
        Commits of each worker in a check period; None for `hidden_rate`.
    step_factor : float (default: 1.0)
        η = step_factor/M; with weights by examples it scales the share in the same way.
    overlap : bool (default: True)
        Whether workers train on while they communicate.
    catch_up : bool (default: True)
        As for `Adsp`.
    loop : LoopOptions | None (default: None)
        Options of the event loop.
    """

    stored: tuple[str, ...] = (*Adsp.stored, "commit_rate")

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
            self.commit_rate = min(
                hidden_rate(self.check_period, 1 / worker.speed, worker.overhead_seconds)
                for worker in self.state.workers.values()
            )
        super().begin()

    def least_period(self, worker: Worker) -> float:
        """Return the seconds of a step, or of a commit where it takes longer."""
        if not self.overlap:
            return super().least_period(worker)
        return max(1 / worker.speed, worker.overhead_seconds)

    def assign(self, worker: Worker) -> Work:
        """Train until the timer runs out, and on."""
        work = super().assign(worker)
        return Work(seconds=work.seconds, overlaps=self.overlap and not worker.is_stock)

    def apply(self, worker: Worker, commit: Commit) -> bool:
        """Do W ← W + η·δ at once."""
        rate = self.step_factor * step_size(self.state, worker, commit, None)
        add_scaled(self.state.model, self.state.per_trainer(commit), rate)
        self.state.mix_in(commit, min(rate, 1.0))
        return True

    def describe(self) -> dict[str, object]:
        """Return the settings by name."""
        return super().describe() | {
            "commit_rate": "as many as can be hidden" if self.chooses_rate else self.commit_rate,
            "server_learning_rate": f"{self.step_factor}/M",
            "overlap": self.overlap,
        }
