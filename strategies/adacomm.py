"""ADACOMM: barriers after τ local steps, τ falling with the loss.

Wang and Joshi, "Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in
Local-Update SGD", MLSys 2019, https://arxiv.org/abs/1810.08313.
"""

from math import ceil, sqrt
from typing import cast

from flower_adsp.strategies.bsp import Bsp
from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.state import Worker
from flwr.app import MetricRecord

from flower_adsp.errors import require
from flower_adsp.messages import Commit


def next_local_steps(current: int, first: int, loss: float, first_loss: float) -> int:
    """Return τ for the next interval.

    τ' = √(F(t)/F(0))·τ0; the next τ is ⌈τ'⌉ if τ' < τ, else ⌈τ/2⌉: equations (17) and (18) with
    γ = 1/2, in the form of the ADSP authors' released code.
    """
    proposed = sqrt(max(loss / first_loss, 0.0)) * first
    return max(1, ceil(proposed if proposed < current else current / 2))


class FixedAdacomm(Bsp):
    """Periodic averaging: τ local steps, a barrier, the mean. τ stays.

    With weights by examples, or equal partitions, it is FedAvg with τ local steps.

    Parameters
    ----------
    local_steps : int (default: 40)
        τ.
    loop : LoopOptions | None (default: None)
        Options of the event loop.
    """

    def __init__(self, local_steps: int = 40, loop: LoopOptions | None = None) -> None:
        super().__init__(local_steps, loop)


class Adacomm(Bsp):
    """Adaptive periodic averaging.

    F is the loss of the server's evaluation where there is one, else the mean training loss of
    the barrier's commits.

    Parameters
    ----------
    local_steps : int (default: 40)
        τ0, steps between barriers at first.
    interval : float (default: 60.0)
        Seconds between changes of τ; one is made at the first barrier after them.
    loop : LoopOptions | None (default: None)
        Options of the event loop.
    """

    stored: tuple[str, ...] = (
        *Bsp.stored, "local_steps", "_first_loss", "_loss", "_changes", "_train_losses",
    )  # fmt: skip

    def __init__(
        self, local_steps: int = 40, interval: float = 60.0, loop: LoopOptions | None = None
    ) -> None:
        super().__init__(local_steps, loop)
        require(interval > 0, "interval", interval, "above 0 seconds")
        self.first_local_steps = local_steps
        self.interval = interval
        self._first_loss: float | None = None
        self._loss: float | None = None
        self._changes = 0
        self._train_losses: list[float] = []

    def begin(self) -> None:
        """Begin with τ0."""
        super().begin()
        self.local_steps = self.first_local_steps
        self._first_loss = self._loss = None
        self._changes = 0
        self._train_losses = []

    def evaluated(self, metrics: MetricRecord) -> None:
        """Keep the loss."""
        self._note(float(cast(float, metrics["loss"])))

    def _note(self, loss: float) -> None:
        self._loss = loss
        if self._first_loss is None:
            self._first_loss = loss

    def apply(self, worker: Worker, commit: Commit) -> bool:
        """Keep the commit until the barrier; there, see whether τ is to change."""
        self._train_losses.append(commit.train_loss)
        index = self.state.index
        changed = super().apply(worker, commit)
        if self.state.index > index:
            self._at_barrier()
        return changed

    def refuse(self, worker: Worker) -> bool:
        """Count the worker as arrived without a contribution."""
        index = self.state.index
        changed = super().refuse(worker)
        if self.state.index > index:
            self._at_barrier()
        return changed

    def _at_barrier(self) -> None:
        if not self.state.is_evaluated and self._train_losses:
            self._note(sum(self._train_losses) / len(self._train_losses))
        self._train_losses = []
        intervals = int(self.state.seconds / self.interval)
        if intervals > self._changes and self._loss is not None and self._first_loss:
            self._changes = intervals
            self.local_steps = next_local_steps(
                self.local_steps, self.first_local_steps, self._loss, self._first_loss
            )

    def status(self) -> dict[str, float | int | list[int]]:
        """Return τ."""
        return {"local_steps": self.local_steps}

    def describe(self) -> dict[str, object]:
        """Return the settings by name."""
        return {"local_steps": self.first_local_steps, "interval": self.interval}
