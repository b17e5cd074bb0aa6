"""FedAsync: each model that arrives is mixed into the global one, less so the staler it is.

Xie, Koyejo and Gupta, "Asynchronous Federated Optimization", 2019,
https://arxiv.org/abs/1903.03934.
"""

import numpy as np
from flower_adsp.strategies.base import CommitStrategy
from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.state import Work, Worker

from flower_adsp.arrays import decode, mix_buffers
from flower_adsp.errors import require, unknown
from flower_adsp.messages import Commit
from flower_adsp.sparse.portions import WHOLE

FUNCTIONS = ("constant", "polynomial", "hinge")


def staleness_weight(function: str, staleness: int, a: float, b: int) -> float:
    """Return s(t − τ), section 5.2 of the paper; 1 for a fresh model.

    ``constant`` 1; ``polynomial`` (t − τ + 1)^−a; ``hinge`` 1 if t − τ ≤ b, else
    1/(a(t − τ − b) + 1).
    """
    if function == "polynomial":
        return float((staleness + 1) ** -a)
    if function == "hinge" and staleness > b:
        return 1 / (a * (staleness - b) + 1)
    return 1.0


class FedAsync(CommitStrategy):
    """Asynchronous federated optimization.

    W ← (1 − α_t) W + α_t W_i with α_t = α·s(t − τ), where W_i is the worker's model after its local
    steps, τ the version it started from and t the present one.

    Parameters
    ----------
    local_steps : int (default: 10)
        Steps of each worker between commits.
    mixing : float (default: 0.6)
        α, in (0, 1].
    staleness_function : str (default: "polynomial")
        s: ``constant``, ``polynomial`` or ``hinge``.
    a : float (default: 0.5)
        Exponent or slope of s.
    b : int (default: 4)
        Staleness up to which ``hinge`` does not damp.
    check_period : float (default: 60.0)
        Seconds by which `num_rounds` counts.
    loop : LoopOptions | None (default: None)
        Options of the event loop.
    """

    needs_start = True

    def __init__(
        self,
        local_steps: int = 10,
        mixing: float = 0.6,
        staleness_function: str = "polynomial",
        a: float = 0.5,
        b: int = 4,
        check_period: float = 60.0,
        loop: LoopOptions | None = None,
    ) -> None:
        super().__init__(loop)
        require(local_steps >= 1, "local_steps", local_steps, "at least 1")
        require(0 < mixing <= 1, "mixing", mixing, "above 0 and at most 1")
        require(a > 0, "a", a, "above 0")
        require(b >= 0, "b", b, "at least 0")
        require(check_period > 0, "check_period", check_period, "above 0 seconds")
        if staleness_function not in FUNCTIONS:
            raise unknown("staleness_function", staleness_function, FUNCTIONS)
        self.local_steps = local_steps
        self.mixing = mixing
        self.staleness_function = staleness_function
        self.a = a
        self.b = b
        self.check_period: float = check_period

    def assign(self, worker: Worker) -> Work:
        """Take the local steps."""
        return Work(steps=self.local_steps)

    def apply(self, worker: Worker, commit: Commit) -> bool:
        """Mix the worker's model in."""
        staleness = self.state.version - commit.version
        rate = self.mixing * staleness_weight(self.staleness_function, staleness, self.a, self.b)
        assert worker.trained_from is not None
        start = decode(worker.trained_from)
        for name, update in commit.update.items():
            target = self.state.model[name]
            np.add(start[name], update, out=update)
            np.subtract(update, target, out=update)
            part = commit.slices.get(name, WHOLE)
            if part.axis is None:
                target += target.dtype.type(rate) * update
            else:
                trained = (slice(None),) * part.axis + (part.channels,)
                target[trained] += target.dtype.type(rate) * update[trained]
        mix_buffers(self.state.model, commit.buffers, rate)
        return True

    def status(self) -> dict[str, float | int | list[int]]:
        """Return how many versions are in flight."""
        flights = [worker.flight for worker in self.state.workers.values()]
        return {"versions_in_flight": len({f.assignment.version for f in flights if f})}

    def describe(self) -> dict[str, object]:
        """Return the settings by name."""
        return {
            "local_steps": self.local_steps,
            "mixing": self.mixing,
            "staleness_function": self.staleness_function,
            "a": self.a,
            "b": self.b,
            "check_period": self.check_period,
        }
