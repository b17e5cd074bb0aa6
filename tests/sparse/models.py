"""Models small enough for many trials."""

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flower_adsp.tasks.base import ClassificationTask, Split


class Residual(nn.Module):
    """Two convolutions with normalisation around a shortcut, as in residual networks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU6(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return out


class SmallNet(nn.Module):
    """A stem, residual blocks, pooling and a head."""

    def __init__(self, blocks: int = 3, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(blocks)))
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.blocks(self.act(self.norm(self.stem(x)))))
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


@lru_cache
def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(size, 3, 12, 12, generator=generator)
    return x, torch.randint(0, 5, (size,), generator=generator)


def loss(model: nn.Module, size: int = 4) -> Tensor:
    x, y = batch(size)
    return nn.functional.cross_entropy(model(x), y)


class SmallTask(ClassificationTask):
    """Random images, whose classes a `SmallNet` can learn."""

    def __init__(self, seed: int = 0, batch_size: int = 4, growth: int = 0) -> None:
        super().__init__(seed, batch_size)
        self.growth = growth

    def build_model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return SmallNet()

    def _data(self, key: int, size: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(key)
        y = torch.randint(0, 5, (size,), generator=generator)
        x = torch.randn(size, 3, 12, 12, generator=generator)
        x[torch.arange(size), y % 3] += 1.0
        return TensorDataset(x, y)

    def train_data(self, partition_id: int, num_partitions: int) -> TensorDataset:
        return self._data(partition_id, 24 + self.growth * partition_id)

    def held_out_data(self, split: Split) -> TensorDataset:
        return self._data(1000 + len(split), 40)


def build(seed: int = 0, growth: int = 0) -> SmallTask:
    """Build the task."""
    return SmallTask(seed, growth=growth)
