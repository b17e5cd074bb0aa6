"""Mini-batches that depend on the step's number alone."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from flower_adsp.seeding import stream

if TYPE_CHECKING:
    from flower_adsp.tasks.base import SizedDataset, Task

Batch = Sequence[Tensor]
Augment = Callable[[Batch, np.random.Generator], Batch]


def collate(data: "SizedDataset", indices: NDArray[np.integer[Any]]) -> Batch:
    """Return the examples at `indices` as one batch."""
    if isinstance(data, TensorDataset):
        chosen = torch.from_numpy(indices)
        return tuple(tensor[chosen] for tensor in data.tensors)
    return cast(Batch, default_collate([data[int(index)] for index in indices]))


def first_batch(task: "Task") -> Batch:
    """Return a mini-batch of a task's held-out data, to measure with."""
    data = task.held_out_data("validation")
    return collate(data, np.arange(task.batch_size) % len(data))


class BatchStream:
    """An endless stream of mini-batches over a subset of a data set.

    The stream is the concatenation of one permutation per epoch; batch n is its slice from
    n·B to (n + 1)·B. So which examples step n uses depends on n alone, and not on how the steps
    are cut into commits, nor on which process computes them.

    Parameters
    ----------
    data : SizedDataset
        Where the examples are.
    indices : NDArray[np.integer]
        The examples to use, of shape ``(size,)``; at least one.
    batch_size : int
        B, examples in a batch.
    seed, partition_id : int
        Which stream.
    augment : Callable or None (default: None)
        Changes a mini-batch at random, with the generator of its step.
    """

    def __init__(
        self,
        data: "SizedDataset",
        indices: NDArray[np.integer[Any]],
        batch_size: int,
        seed: int,
        partition_id: int,
        augment: Augment | None = None,
    ) -> None:
        self.data = data
        self.indices = indices
        self.batch_size = batch_size
        self.seed = seed
        self.partition_id = partition_id
        self.augment = augment
        self._permutation = lru_cache(maxsize=4)(self._draw_permutation)

    def __len__(self) -> int:
        """Return the number of examples in an epoch."""
        return len(self.indices)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of batches that cover an epoch."""
        return -(-len(self) // self.batch_size)

    def _draw_permutation(self, epoch: int) -> NDArray[np.int64]:
        return stream(self.seed, self.partition_id, "epoch", epoch).permutation(len(self))

    def rows(self, step: int, batch_size: int | None = None) -> NDArray[np.integer[Any]]:
        """Return which examples of the data set step `step` uses."""
        size = batch_size or self.batch_size
        positions = np.arange(step * size, (step + 1) * size)
        epochs, offsets = np.divmod(positions, len(self))
        parts = [
            self._permutation(int(epoch))[offsets[epochs == epoch]] for epoch in np.unique(epochs)
        ]
        return np.take(self.indices, np.concatenate(parts))

    def batch(self, step: int, batch_size: int | None = None) -> Batch:
        """Return the mini-batch of step `step`, of `batch_size` examples if that is given."""
        batch = collate(self.data, self.rows(step, batch_size))
        if self.augment is None:
            return batch
        return self.augment(batch, stream(self.seed, self.partition_id, "augment", step))


def random_crop(images: Tensor, padding: int, draws: np.random.Generator) -> Tensor:
    """Return each image shifted by up to `padding` pixels, as a crop of the padded image is.

    Parameters
    ----------
    images : Tensor
        Of shape ``(n, channels, height, width)``.
    padding : int
        Pixels of the border's own values put around the image; at least 1.
    draws : np.random.Generator
        Draws where each image's crop begins.

    Returns
    -------
    Tensor
        Of the same shape.
    """
    padded = nn.functional.pad(images, (padding,) * 4, mode="replicate")
    height, width = images.shape[2:]
    crops = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: (n, c, top, left, h, w)
    top, left = torch.from_numpy(draws.integers(0, 2 * padding + 1, (2, len(images))))
    return crops[torch.arange(len(images)), :, top, left].contiguous()


def own_split(
    size: int, seed: int, partition_id: int, fraction: float = 0.1
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split a device's examples into those it trains on and those it evaluates on.

    Parameters
    ----------
    size : int
        Examples in the partition.
    seed, partition_id : int
        Which stream draws the split.
    fraction : float (default: 0.1)
        Share held out, rounded down; at least one example where there are two or more.

    Returns
    -------
    tuple[NDArray[np.int64], NDArray[np.int64]]
        Training and evaluation indices, sorted. A single example serves as both.
    """
    order = stream(seed, partition_id, "own-split").permutation(size)
    held = max(int(size * fraction), 1) if size > 1 else 0
    train = np.sort(order[held:])
    return train, np.sort(order[:held]) if held else train
