"""FedBuff: the model moves once K updates have come in, stale ones weighing less.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022,
https://arxiv.org/abs/2106.06639.
"""

from flower_adsp.strategies.base import CommitStrategy
from flower_adsp.strategies.coverage import mean_over_trainers
from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.state import Work, Worker

from flower_adsp.arrays import add_scaled, mix_buffers
from flower_adsp.errors import require, unknown
from flower_adsp.messages import Commit

NORMALISERS = ("K", "weights")


class FedBuff(CommitStrategy):
    """Buffered asynchronous aggregation.

    W ← W + η·(1/K)·Σ_k (1 + τ_k)^−a δ_k over a buffer of K updates; the version counts these steps,
    and τ is 0 for an update of the present version. Buffers such as BatchNorm's move by value
    towards the weighted mean of theirs, by as much as the weights add up to over the normaliser.

    Parameters
    ----------
    local_steps : int (default: 10)
        Steps of each worker between commits.
    buffer_size : int (default: 10)
        K.
    server_learning_rate : float (default: 1.0)
        η.
    staleness_exponent : float (default: 0.5)
        a.
    normaliser : str (default: "K")
        ``K`` as published, or ``weights`` to divide by the sum of the staleness weights.
    check_period : float (default: 60.0)
        Seconds by which `num_rounds` counts.
    loop : LoopOptions | None (default: None)
        Options of the event loop.
    """

    stored: tuple[str, ...] = ("_buffer",)

    def __init__(
        self,
        local_steps: int = 10,
        buffer_size: int = 10,
        server_learning_rate: float = 1.0,
        staleness_exponent: float = 0.5,
        normaliser: str = "K",
        check_period: float = 60.0,
        loop: LoopOptions | None = None,
    ) -> None:
        super().__init__(loop)
        require(local_steps >= 1, "local_steps", local_steps, "at least 1")
        require(buffer_size >= 1, "buffer_size", buffer_size, "at least 1")
        require(server_learning_rate > 0, "server_learning_rate", server_learning_rate, "above 0")
        require(staleness_exponent >= 0, "staleness_exponent", staleness_exponent, "at least 0")
        require(check_period > 0, "check_period", check_period, "above 0 seconds")
        if normaliser not in NORMALISERS:
            raise unknown("normaliser", normaliser, NORMALISERS)
        self.local_steps = local_steps
        self.buffer_size = buffer_size
        self.server_learning_rate = server_learning_rate
        self.staleness_exponent = staleness_exponent
        self.normaliser = normaliser
        self.check_period: float = check_period
        self._buffer: list[tuple[float, Commit]] = []

    def begin(self) -> None:
        """Empty the buffer."""
        self._buffer = []

    def assign(self, worker: Worker) -> Work:
        """Take the local steps."""
        return Work(steps=self.local_steps)

    def apply(self, worker: Worker, commit: Commit) -> bool:
        """Put the update into the buffer; use it up when it is full."""
        staleness = self.state.version - commit.version
        self._buffer.append(((1.0 + staleness) ** -self.staleness_exponent, commit))
        if len(self._buffer) < self.buffer_size:
            return False
        weights = [weight for weight, _ in self._buffer]
        norm = self.buffer_size if self.normaliser == "K" else sum(weights)
        shares = [weight / sum(weights) for weight in weights]
        commits = [commit for _, commit in self._buffer]
        update = mean_over_trainers(commits, shares)
        buffers = mean_over_trainers(commits, shares, "buffers")
        self._buffer = []
        rate = self.server_learning_rate * sum(weights) / norm
        add_scaled(self.state.model, update, rate)
        mix_buffers(self.state.model, buffers, min(1.0, sum(weights) / norm))
        return True

    def status(self) -> dict[str, float | int | list[int]]:
        """Return how full the buffer is."""
        return {"buffered": len(self._buffer)}

    def describe(self) -> dict[str, object]:
        """Return the settings by name."""
        return {
            "local_steps": self.local_steps,
            "buffer_size": self.buffer_size,
            "server_learning_rate": self.server_learning_rate,
            "staleness_exponent": self.staleness_exponent,
            "normaliser": self.normaliser,
            "check_period": self.check_period,
        }
