"""The protocol of a task, and a base class for classification."""

from abc import ABC, abstractmethod
from collections.abc import Sized
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from flower_adsp.tasks.batches import Batch, collate

Split = Literal["validation", "test"]


class SizedDataset(Sized, Protocol):
    """A map-style data set that knows its length."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Return one example."""
        ...


@runtime_checkable
class Task(Protocol):
    """What a task provides.

    A task may also have ``augment(batch, draws)``, which returns a training batch changed at
    random with a NumPy generator, that of the batch's step.

    Attributes
    ----------
    batch_size : int
        Examples in a mini-batch.
    """

    batch_size: int

    def build_model(self) -> nn.Module:
        """Return a model with its initial weights, the same at each call."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch, a scalar."""
        ...

    def train_data(self, partition_id: int, num_partitions: int) -> SizedDataset:
        """Return the training examples of one device."""
        ...

    def held_out_data(self, split: Split) -> SizedDataset:
        """Return the server's data: `validation` steers and stops a run, `test` is reported."""
        ...

    def metrics(self, model: nn.Module, data: SizedDataset) -> dict[str, float]:
        """Return the model's metrics on data; ``loss`` is among them."""
        ...


class ClassificationTask(ABC):
    """A task that predicts one of several classes, by default with cross-entropy loss.

    Parameters
    ----------
    seed : int (default: 0)
        Seed of the partitioning and of the initial weights.
    batch_size : int (default: 32)
        Examples in a mini-batch.
    """

    evaluation_batch = 1000

    def __init__(self, seed: int = 0, batch_size: int = 32) -> None:
        self.seed = seed
        self.batch_size = batch_size

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return a model with its initial weights, the same at each call."""

    @abstractmethod
    def train_data(self, partition_id: int, num_partitions: int) -> SizedDataset:
        """Return the training examples of one device."""

    @abstractmethod
    def held_out_data(self, split: Split) -> SizedDataset:
        """Return the server's data for one use."""

    def criterion(self, model: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch's outputs: cross-entropy."""
        return nn.functional.cross_entropy(outputs, targets)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return the class numbers that outputs stand for."""
        return outputs.argmax(dim=1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch of inputs and class numbers."""
        inputs, targets = batch
        return self.criterion(model, model(inputs), targets)

    def metrics(self, model: nn.Module, data: SizedDataset) -> dict[str, float]:
        """Return ``loss`` and ``accuracy`` over all examples, in evaluation mode."""
        was_training = model.training
        model.eval()
        loss, correct, total = 0.0, 0, len(data)
        device = next(model.parameters()).device
        with torch.inference_mode():
            for first in range(0, total, self.evaluation_batch):
                indices = np.arange(first, min(first + self.evaluation_batch, total))
                inputs, targets = (tensor.to(device) for tensor in collate(data, indices))
                outputs = model(inputs)
                loss += self.criterion(model, outputs, targets).item() * len(targets)
                correct += int((self.predictions(outputs) == targets).sum())
        model.train(was_training)
        return {"loss": loss / total, "accuracy": correct / total}


__all__ = ["Batch", "ClassificationTask", "Dataset", "SizedDataset", "Split", "Task"]
