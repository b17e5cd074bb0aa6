"""Classification tasks over data that fits in memory."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import TensorDataset

from flower_adsp.errors import require
from flower_adsp.seeding import integer_seed
from flower_adsp.tasks.base import Batch, ClassificationTask, SizedDataset, Split
from flower_adsp.tasks.batches import random_crop
from flower_adsp.tasks.partition import check_partitioning, partition_indices

_SPLIT_SEED = 0  # the split is part of the task: it is the same for all seeds


def stratified(
    inputs: NDArray[Any], targets: NDArray[Any], validation: int, test: int = 0
) -> dict[str, TensorDataset]:
    """Split into parts, each with the classes in proportion, shuffled.

    Parameters
    ----------
    inputs : NDArray
        Examples, of shape ``(n, ...)``.
    targets : NDArray
        Class numbers, of shape ``(n,)``.
    validation, test : int
        Examples in these parts; without test examples there is no such part.

    Returns
    -------
    dict[str, TensorDataset]
        ``train``, ``validation`` and ``test``.
    """
    from sklearn.model_selection import train_test_split

    rows = {"train": np.arange(len(targets))}
    for split, size in (("test", test), ("validation", validation)):
        if size:
            rest = rows["train"]
            rows["train"], rows[split] = train_test_split(
                rest, test_size=size, stratify=targets[rest], random_state=_SPLIT_SEED
            )
    return {
        split: TensorDataset(torch.from_numpy(inputs[chosen]), torch.from_numpy(targets[chosen]))
        for split, chosen in rows.items()
    }


class InMemoryTask(ClassificationTask):
    """A classification task over a data set that fits in memory.

    Parameters
    ----------
    seed : int (default: 0)
        Seed of the partitioning and of the initial weights.
    batch_size : int (default: 32)
        Examples in a mini-batch.
    partitioning : str (default: "iid")
        How the training data is laid over the devices: ``iid`` or ``dirichlet``.
    alpha : float (default: 0.3)
        Concentration of ``dirichlet``.
    """

    def __init__(
        self,
        seed: int = 0,
        batch_size: int = 32,
        partitioning: str = "iid",
        alpha: float = 0.3,
    ) -> None:
        super().__init__(seed, batch_size)
        require(batch_size > 0, "task.batch_size", batch_size, "at least 1")
        check_partitioning(partitioning, alpha)
        self.partitioning = partitioning
        self.alpha = alpha

    def load(self) -> dict[str, TensorDataset]:
        """Return the splits ``train``, ``validation`` and ``test``."""
        raise NotImplementedError

    def layers(self) -> nn.Module:
        """Return a fresh model, with weights from torch's current random state."""
        raise NotImplementedError

    def build_model(self) -> nn.Module:
        """Return a model with its initial weights, the same at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(integer_seed(self.seed, "init"))
            return self.layers()

    def train_data(self, partition_id: int, num_partitions: int) -> SizedDataset:
        """Return the training examples of one device."""
        inputs, targets = self.load()["train"].tensors
        rows = torch.from_numpy(
            partition_indices(
                targets.numpy(),
                partition_id,
                num_partitions,
                self.partitioning,
                self.alpha,
                self.seed,
            )
        )
        return TensorDataset(inputs[rows], targets[rows])

    def held_out_data(self, split: Split) -> SizedDataset:
        """Return the server's validation or test examples."""
        return self.load()[split]


class ImageTask(InMemoryTask):
    """A classification task over images that fit in memory.

    Parameters
    ----------
    seed, batch_size, partitioning, alpha
        As for `InMemoryTask`.
    crop_padding : int (default: 0)
        Pixels by which each training image is shifted at most, at random and anew at each step,
        the border being repeated; 0 leaves the images as they are.
    """

    def __init__(
        self,
        seed: int = 0,
        batch_size: int = 32,
        partitioning: str = "iid",
        alpha: float = 0.3,
        crop_padding: int = 0,
    ) -> None:
        super().__init__(seed, batch_size, partitioning, alpha)
        require(crop_padding >= 0, "task.crop_padding", crop_padding, "at least 0")
        self.crop_padding = crop_padding

    def augment(self, batch: Batch, draws: np.random.Generator) -> Batch:
        """Return a mini-batch to train on: its images at random places, if that is asked for."""
        if not self.crop_padding:
            return batch
        images, targets = batch
        return random_crop(images, self.crop_padding, draws), targets
