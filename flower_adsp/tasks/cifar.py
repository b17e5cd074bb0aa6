"""CIFAR-10, through torchvision."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import TensorDataset

from flower_adsp.errors import DataError
from flower_adsp.tasks.in_memory import ImageTask, stratified

_MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)
_DEVIATION = np.array([0.2470, 0.2435, 0.2616], np.float32)


def standardised(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return images of shape ``(n, 32, 32, 3)`` as float32 of shape ``(n, 3, 32, 32)``."""
    scaled = (images.astype(np.float32) / 255 - _MEAN) / _DEVIATION
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))


def _read(path: Path) -> list[Any]:
    """Return the training and the test part, downloaded if they are not there."""
    from filelock import FileLock
    from torchvision.datasets import CIFAR10

    try:
        return [CIFAR10(str(path), train=train) for train in (True, False)]
    except RuntimeError:  # not there, or not whole
        path.mkdir(parents=True, exist_ok=True)
        with FileLock(path / "cifar10.lock"):  # the processes of a run share the folder
            return [CIFAR10(str(path), train=train, download=True) for train in (True, False)]


@lru_cache(maxsize=1)
def load_cifar10(folder: str) -> dict[str, TensorDataset]:
    """Return 45,000 / 5,000 / 10,000 images; they are downloaded if they are not in `folder`.

    Raises
    ------
    DataError
        If they are neither there nor to be had.
    """
    path = Path(folder).expanduser().absolute()
    try:
        known, test = _read(path)
    except Exception as error:  # no network, no disk, damaged files: torchvision raises many kinds
        raise DataError(
            f"CIFAR-10 is not in task.data_folder = {folder!r} ({path}) and cannot be downloaded: "
            f"{error}. Put cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html "
            "there, or set task.data_folder to a folder that has it"
        ) from None
    targets = np.asarray(known.targets, np.int64)
    return {
        **stratified(standardised(known.data), targets, validation=5000),
        "test": TensorDataset(
            torch.from_numpy(standardised(test.data)),
            torch.from_numpy(np.asarray(test.targets, np.int64)),
        ),
    }


class Cifar10Cnn(ImageTask):
    """CIFAR-10 by the CNN of TensorFlow's former tutorial, as in the comparisons of ADSP.

    Two convolutions of 5×5×64, each with pooling and local response normalisation, and one linear
    layer: 148,298 parameters, with the tutorial's initial weights. The code of Hu, Wang and Wu,
    AAAI 2020, adds an L2 term, of which ``train.weight_decay=0.004`` has the gradient (it decays
    the biases too).

    Parameters
    ----------
    seed, batch_size, partitioning, alpha, crop_padding
        As for `ImageTask`.
    data_folder : str (default: "data")
        Where the images are, or are downloaded to.
    """

    evaluation_batch = 250  # the first layer's outputs alone are 256 KiB an image

    def __init__(
        self,
        seed: int = 0,
        batch_size: int = 128,
        partitioning: str = "iid",
        alpha: float = 0.3,
        data_folder: str = "data",
        crop_padding: int = 0,
    ) -> None:
        super().__init__(seed, batch_size, partitioning, alpha, crop_padding)
        self.data_folder = data_folder

    def load(self) -> dict[str, TensorDataset]:
        """Return CIFAR-10."""
        return load_cifar10(self.data_folder)

    def layers(self) -> nn.Module:
        """Return the network."""
        first = nn.Conv2d(3, 64, kernel_size=5, padding=2)
        second = nn.Conv2d(64, 64, kernel_size=5, padding=2)
        head = nn.Linear(64 * 8 * 8, 10)
        for layer, deviation, bias in (
            (first, 0.05, 0.0),
            (second, 0.05, 0.1),
            (head, 1 / 192, 0.0),
        ):
            _initialise(layer, deviation, bias)
        return nn.Sequential(
            first,
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, ceil_mode=True),  # TensorFlow's SAME pads at the end alone
            nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0),
            second,
            nn.ReLU(),
            nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0),
            nn.MaxPool2d(3, stride=2, ceil_mode=True),
            nn.Flatten(),
            head,
        )


def _initialise(layer: nn.Conv2d | nn.Linear, deviation: float, bias: float) -> None:
    """Draw weights from a normal cut at two deviations, as TensorFlow's truncated normal."""
    nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
    assert layer.bias is not None
    nn.init.constant_(layer.bias, bias)
