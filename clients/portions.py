"""What an assignment lets a device train."""

from collections.abc import Mapping

from flower_adsp.clients.device import Device
from torch import nn

from flower_adsp.messages import Assignment
from flower_adsp.sparse.freezing import train_only
from flower_adsp.sparse.ops import make_memory_true
from flower_adsp.sparse.units import split_into_units


def trainable(
    model: nn.Module, device: Device, assignment: Assignment
) -> Mapping[str, nn.Parameter]:
    """Freeze what is not assigned, and return what the optimizer is to step, by name.

    Without portions that is all, and layers are PyTorch's own unless ``train.layers`` says
    otherwise; with them layers are memory-true.

    Raises
    ------
    ConfigError
        If the assignment names units or channels that the model does not have.
    """
    layers = device.config.train.layers
    if layers == "memory-true" or (layers == "auto" and assignment.portions is not None):
        make_memory_true(model)
    if assignment.portions is None:
        return dict(model.named_parameters())
    return train_only(model, split_into_units(model), assignment.portions)


def committed_buffers(model: nn.Module, assignment: Assignment) -> set[str]:
    """Return the names of the buffers that a commit carries: those of units trained whole."""
    if assignment.portions is None:
        parameters = dict(model.named_parameters())
        return {name for name in model.state_dict() if name not in parameters}
    persistent = model.state_dict().keys()
    return {
        name
        for unit in split_into_units(model)
        if unit.name in assignment.portions and assignment.portions[unit.name].ratio >= 1.0
        for name in unit.buffers
        if name in persistent
    }
