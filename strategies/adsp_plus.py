"""ADSP+: no timers, but a number of local steps for each worker, found by trials beforehand.

A variant that Hu, Wang and Wu, AAAI 2020, https://arxiv.org/abs/1911.06949, compare with to see how
near to the best ADSP is. Which steps were tried follows their released code.
"""

from collections.abc import Sequence
from itertools import product

from flower_adsp.strategies.adsp import Adsp
from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.state import Work, Worker

from flower_adsp.errors import require


class AdspPlus(Adsp):
    """Local steps by speed, scaled between those of the slowest worker and those of no waiting.

    Worker i takes τ_i = τ_min + share·(n_i − τ_min) steps between commits, rounded, where n_i are
    the steps it would fit between two commits under ADSP, and τ_min the least of them. With
    share = 1 it is ADSP with steps in place of timers, with share = 0 all take as many steps.

    Parameters
    ----------
    check_period : float (default: 60.0)
        Γ, seconds between checkpoints.
    commit_rate : int (default: 4)
        Commits in a check period, from which n_i follows.
    share : float (default: 1.0)
        Where τ_i is between its bounds, from 0 to 1.
    server_learning_rate, server_momentum
        As for `Adsp`.
    loop : LoopOptions | None (default: None)
        Options of the event loop.
    """

    stored: tuple[str, ...] = (*Adsp.stored, "local_steps")

    def __init__(
        self,
        check_period: float = 60.0,
        commit_rate: int = 4,
        share: float = 1.0,
        server_learning_rate: float | None = None,
        server_momentum: float = 0.0,
        loop: LoopOptions | None = None,
    ) -> None:
        super().__init__(
            check_period, commit_rate, server_learning_rate, server_momentum, loop=loop
        )
        require(0 <= share <= 1, "share", share, "from 0 to 1")
        self.share = share
        self.local_steps: dict[int, int] = {}

    def begin(self) -> None:
        """Set each worker's local steps."""
        super().begin()
        self._set_local_steps()

    def joined(self, worker: Worker) -> None:
        """Set all workers' local steps anew, now that there is one more."""
        super().joined(worker)
        self._set_local_steps()

    def _set_local_steps(self) -> None:
        fitting = {
            worker.id: max(
                1.0, (self.check_period / self.rate - worker.overhead_seconds) * worker.speed
            )
            for worker in self.state.workers.values()
        }
        least = min(fitting.values())
        self.local_steps = {
            id_: max(1, round(least + self.share * (steps - least)))
            for id_, steps in fitting.items()
        }

    def assign(self, worker: Worker) -> Work:
        """Take the worker's local steps."""
        return Work(steps=self.local_steps[worker.id])

    def describe(self) -> dict[str, object]:
        """Return the settings by name."""
        return super().describe() | {"share": self.share}


def plus_candidates(
    shares: Sequence[float] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    momenta: Sequence[float] = (0.0, 0.3, 0.6, 0.9),
) -> list[dict[str, float]]:
    """Return the settings of `AdspPlus` that the search for ADSP+ tries."""
    return [{"share": s, "server_momentum": m} for s, m in product(shares, momenta)]


def plus_plus_candidates(
    num_workers: int,
    rates: Sequence[int] = (1, 2, 3, 4, 6, 8, 10),
    momenta: Sequence[float] = (0.0, 0.3, 0.6, 0.9),
) -> list[dict[str, float | int]]:
    """Return the settings of `Adsp` that the search for ADSP++ tries.

    η is 1/M or a tenth of it. The published search is over C_target, μ and η, each by itself; here
    it is over their product.
    """
    return [
        {"commit_rate": rate, "server_momentum": momentum, "server_learning_rate": eta}
        for rate, momentum, eta in product(rates, momenta, (1 / num_workers, 0.1 / num_workers))
    ]
