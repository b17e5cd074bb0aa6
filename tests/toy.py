"""A task small enough to be worked out by hand."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Point(nn.Module):
    """A single weight w, that starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w - x


class PointWithBuffers(Point):
    """The same with a float and an integer buffer, which count training batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(0.5 * x.mean())
            self.count += 1
        return super().forward(x)


class Quadratic:
    """Worker p has examples equal to p + 1; a step of rate r does w <- w - r (w - (p + 1))."""

    def __init__(
        self,
        seed: int = 0,
        batch_size: int = 1,
        examples: int = 4,
        growth: int = 0,
        buffers: bool = False,
        empty: bool = False,
    ) -> None:
        self.batch_size = batch_size
        self.examples = examples
        self.growth = growth
        self.buffers = buffers
        self.empty = empty

    def build_model(self) -> nn.Module:
        return PointWithBuffers() if self.buffers else Point()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return 0.5 * model(batch[0]).square().mean()

    def train_data(self, partition_id: int, num_partitions: int) -> TensorDataset:
        size = 0 if self.empty else self.examples + self.growth * partition_id
        return TensorDataset(torch.full((size, 1), partition_id + 1.0, dtype=torch.float64))

    def held_out_data(self, split: str) -> TensorDataset:
        return TensorDataset(torch.full((4, 1), 2.0, dtype=torch.float64))

    def metrics(self, model: nn.Module, data: TensorDataset) -> dict[str, float]:
        model.eval()
        with torch.inference_mode():
            return {"loss": float(self.loss(model, [data.tensors[0]]))}


def build(
    seed: int = 0,
    batch_size: int = 1,
    examples: int = 4,
    growth: int = 0,
    buffers: bool = False,
) -> Quadratic:
    """Build the task, as a user's own function would."""
    return Quadratic(seed, batch_size, examples, growth, buffers)


def build_empty(seed: int = 0) -> Quadratic:
    """Build a task whose partitions hold nothing."""
    return Quadratic(seed, empty=True)


def build_nonsense(seed: int = 0) -> int:
    """Build something that is no task."""
    return seed


def build_slow(seed: int = 0) -> Quadratic:
    """Build the task with mini-batches so large that a check period has few steps."""
    return Quadratic(seed, batch_size=32, examples=40)
