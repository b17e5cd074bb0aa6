"""What a server finds out about a model on its own data, while it decides how to train it."""

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from flower_adsp.arrays import Weights, encode
from flower_adsp.errors import require
from flower_adsp.int8 import check_layers, make_int8
from flower_adsp.precision import similarity
from flower_adsp.tasks.base import Task
from flower_adsp.tasks.batches import collate

_BATCH = 1000  # examples


class Validation:
    """A task's validation data, and models of it to look at.

    Parameters
    ----------
    task : Task
        The task. In a batch of it, the first tensor is what its model is called with.
    """

    def __init__(self, task: Task) -> None:
        self.task = task

    @cached_property
    def chance(self) -> float:
        """The accuracy of always guessing the most frequent class.

        Raises
        ------
        ConfigError
            If the data have no class numbers.
        """
        data = self.task.held_out_data("validation")
        batch = collate(data, np.arange(len(data)))
        ok = len(batch) == 2 and batch[1].ndim == 1
        require(ok, "task", type(self.task).__name__, "one of inputs and class numbers")
        counts = torch.unique(batch[1], return_counts=True)[1]
        return int(counts.max()) / len(data)

    def accuracy(self, weights: Weights) -> float:
        """Return a model's accuracy.

        Raises
        ------
        ConfigError
            If it is not among the task's metrics.
        """
        model = self.task.build_model()
        model.load_state_dict(encode(weights).to_torch_state_dict())
        metrics = self.task.metrics(model, self.task.held_out_data("validation"))
        require("accuracy" in metrics, "task", type(self.task).__name__, "one with an accuracy")
        return metrics["accuracy"]

    def check_int8(self) -> None:
        """See that the task's model can be trained in INT8, as `flower_adsp.int8.check_layers`."""
        check_layers(self.task.build_model())

    def similarity(self, weights: Weights) -> float:
        """Return α of a model, the cosine of its logits in FP32 and in INT8.

        Notes
        -----
        Source: SoCFlow (https://doi.org/10.1145/3617232.3624847), equation 4.
        """
        return similarity(self._logits(weights))

    def _logits(self, weights: Weights) -> Iterator[tuple[Tensor, Tensor]]:
        fp32, int8 = self.task.build_model(), make_int8(self.task.build_model())
        for model in (fp32, int8):
            model.load_state_dict(encode(weights).to_torch_state_dict())
            model.eval()
        data = self.task.held_out_data("validation")
        with torch.inference_mode():
            for first in range(0, len(data), _BATCH):
                inputs = collate(data, np.arange(first, min(first + _BATCH, len(data))))[0]
                yield fp32(inputs), int8(inputs)
