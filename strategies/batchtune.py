"""BatchTune: barriers, with mini-batches in proportion to speed.

After Chen et al., "Round-Robin Synchronization: Mitigating Communication Bottlenecks in Parameter
Servers", INFOCOM 2019 (R2SP), in the form in which Hu, Wang and Wu, AAAI 2020,
https://arxiv.org/abs/1911.06949, compare with it.
"""

from collections.abc import Sequence

from flower_adsp.strategies.bsp import Bsp
from flower_adsp.strategies.state import Work, Worker


def tuned_batch_sizes(batch_size: int, speeds: Sequence[float]) -> list[int]:
    """Return B_i = ⌊B·M·v_i/Σ_j v_j⌋, at least 1: the total stays, all take about as long a step.

    Parameters
    ----------
    batch_size : int
        B, the mean.
    speeds : Sequence[float]
        v_i, examples per second.
    """
    total = batch_size * len(speeds) / sum(speeds)
    return [max(1, int(total * speed + 1e-9)) for speed in speeds]


class BatchTune(Bsp):
    """Bulk synchronous parallel, or periodic averaging, with tuned mini-batches.

    With one local step it is BatchTune on BSP, with more on Fixed ADACOMM. The update is the mean
    over workers, as there; what a worker contributes does not grow with its batch. Batch sizes
    follow the speeds of the profiles.

    Parameters
    ----------
    local_steps : int (default: 1)
        τ, steps of each worker between barriers.
    loop : LoopOptions | None (default: None)
        Options of the event loop.
    """

    stored: tuple[str, ...] = (*Bsp.stored, "batch_sizes")

    def begin(self) -> None:
        """Set the batch sizes."""
        super().begin()
        self._tune()

    def joined(self, worker: Worker) -> None:
        """Set the batch sizes anew, now that there is one more."""
        self._tune()

    def _tune(self) -> None:
        workers = list(self.state.workers.values())
        mean = round(sum(worker.batch_size for worker in workers) / len(workers))
        speeds = [1 / worker.profile.seconds_per_sample for worker in workers]
        sizes = tuned_batch_sizes(mean, speeds)
        self.batch_sizes = {worker.id: size for worker, size in zip(workers, sizes, strict=True)}

    def assign(self, worker: Worker) -> Work:
        """Take the local steps with mini-batches of the worker's own size."""
        return Work(steps=self.local_steps, batch_size=self.batch_sizes[worker.id])
