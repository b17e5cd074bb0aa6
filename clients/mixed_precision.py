"""Training a part of each mini-batch in FP32 and the rest in INT8, as SoCFlow does on CPU and NPU.

Xu and others, "SoCFlow: Efficient and Scalable DNN Training on SoC-Clustered Edge Servers", ASPLOS
2024, https://doi.org/10.1145/3617232.3624847, section 3.2. INT8 is emulated, and slower than FP32;
what it would take on an NPU is a matter of virtual time.
"""

from copy import deepcopy

import torch
from flower_adsp.clients.device import Device
from flower_adsp.clients.training import TakeStep, sgd_step
from torch import Tensor, nn

from flower_adsp.errors import require
from flower_adsp.int8 import make_int8, put_on_grid
from flower_adsp.messages import Assignment
from flower_adsp.precision import fp32_examples, merged
from flower_adsp.seeding import integer_seed
from flower_adsp.sgd import Sgd
from flower_adsp.tasks.batches import Batch


def mixed_step(
    device: Device, model: nn.Module, optimizer: Sgd, assignment: Assignment
) -> TakeStep | None:
    """Return what takes an assignment's steps in mixed precision; None if it asks for none.

    Parameters
    ----------
    device : Device
        Task and seeds.
    model : nn.Module
        The model, on the device's accelerator.
    optimizer : Sgd
        Steps the model's parameters.
    assignment : Assignment
        What to do.

    Raises
    ------
    ConfigError
        If there is momentum, a layer plan, or a layer that cannot be trained in INT8.
    """
    share = assignment.fp32_share
    if share is None:
        return None
    # Of two momenta only one could be kept, and merging models does not merge them.
    require(optimizer.momentum == 0, "train.momentum", optimizer.momentum, "0 with mixed precision")
    portions, overlap = assignment.portions, assignment.overlap_steps
    require(portions is None, "plan", portions, "none with mixed precision")
    require(overlap == 0, "overlap_steps", overlap, "0 with mixed precision")
    if share >= 1.0:
        return None
    return _MixedStep(device, model, optimizer, share)


class _MixedStep:
    """Takes steps: both replicas from the same model on their part, then they are merged."""

    def __init__(self, device: Device, model: nn.Module, optimizer: Sgd, share: float) -> None:
        self._device = device
        self._model = model
        self._optimizer = optimizer
        self._share = share
        self._draws = torch.Generator(device.accelerator)
        self._int8 = make_int8(deepcopy(model), self._draws).train()
        self._int8_optimizer = Sgd(
            self._int8.parameters(), optimizer.lr, weight_decay=optimizer.weight_decay
        )

    def __call__(self, batch: Batch, step: int) -> float:
        """Take a step, and return the mean loss over the whole mini-batch."""
        device, size = self._device, len(batch[0])
        first = fp32_examples(size, self._share)
        if first == size:
            return sgd_step(device, self._model, self._optimizer, batch)
        self._draws.manual_seed(integer_seed(device.config.seed, device.partition_id, "int8", step))
        ours, theirs = _tensors(self._model), _tensors(self._int8)
        with torch.no_grad():
            for name, tensor in theirs.items():
                tensor.copy_(ours[name])
        parts = ([tensor[:first] for tensor in batch], [tensor[first:] for tensor in batch])
        fp32_loss = sgd_step(device, self._model, self._optimizer, parts[0])
        int8_loss = sgd_step(device, self._int8, self._int8_optimizer, parts[1])
        # At random: rounded to the nearest, a model that is merged and rounded again at each step
        # would come back to the grid, and what FP32 had moved it would be lost.
        put_on_grid(self._int8, self._draws)
        with torch.no_grad():
            for name, tensor in ours.items():
                tensor.copy_(merged(tensor, theirs[name], self._share))
        return (first * fp32_loss + (size - first) * int8_loss) / size


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
