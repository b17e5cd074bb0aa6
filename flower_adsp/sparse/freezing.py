"""Train a part of a model: some units whole, some at a part of their input channels."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flower_adsp.errors import ConfigError, unknown
from flower_adsp.sparse.ops import TrainedSlice, channel_axis, freeze_module, set_slice, slice_of
from flower_adsp.sparse.portions import WHOLE, Portion, Slice, choose_channels
from flower_adsp.sparse.units import Unit


def channel_axes(model: nn.Module, unit: Unit) -> dict[str, int | None]:
    """Return what of a unit is trained at a ratio below 1.

    Returns
    -------
    dict[str, int | None]
        The axis along which a weight is cut, by its name; None for what is trained whole: biases,
        and the weights of grouped convolutions, whose channels cannot be cut. What is not named,
        such as normalisations, is frozen.
    """
    axes: dict[str, int | None] = {}
    for name in unit.parameters:
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        if not isinstance(module, nn.Conv2d | nn.Linear):
            continue
        axes[name] = channel_axis(module) if key == "weight" else None
    return axes


def make_portion(
    model: nn.Module,
    unit: Unit,
    ratio: float,
    weights: Mapping[str, NDArray[np.floating]],
    window: int = 0,
) -> Portion:
    """Return a portion of a unit with its channels chosen by the norms of the weights."""
    if ratio >= 1.0:
        return Portion()
    axes = channel_axes(model, unit)
    chosen = {
        name: choose_channels(weights[name], axis, ratio, window)
        for name, axis in axes.items()
        if axis is not None
    }
    return Portion(ratio, chosen)


def trained_slices(model: nn.Module, unit: Unit, portion: Portion) -> dict[str, Slice]:
    """Return what a portion trains of each of the unit's parameters.

    Raises
    ------
    ConfigError
        If the portion's channels are not those of the unit's weights.
    """
    if portion.ratio >= 1.0 and not portion.channels:
        return dict.fromkeys(unit.parameters, WHOLE)
    axes = channel_axes(model, unit)
    expected = {name for name, axis in axes.items() if axis is not None}
    if portion.channels.keys() != expected:
        raise ConfigError(
            f"channels of unit {unit.name!r} at ratio {portion.ratio} are given for "
            f"{sorted(portion.channels)}; they must be for {sorted(expected)}"
        )
    for name, channels in portion.channels.items():
        axis = axes[name]
        assert axis is not None
        size = model.get_parameter(name).shape[axis]
        if not len(channels) or channels.min() < 0 or channels.max() >= size:
            raise ConfigError(f"channels of {name!r} = {channels} must be from 0 to {size - 1}")
    return {
        name: WHOLE if axis is None else Slice(axis, portion.channels[name])
        for name, axis in axes.items()
    }


def train_only(
    model: nn.Module, units: list[Unit], portions: Mapping[str, Portion]
) -> dict[str, nn.Parameter]:
    """Freeze a model but for some portions.

    Parameters
    ----------
    model : nn.Module
        The model; where its layers are memory-true, what is frozen costs next to no memory.
    units : list[Unit]
        All its units.
    portions : Mapping[str, Portion]
        What is trained, by the name of the unit.

    Returns
    -------
    dict[str, nn.Parameter]
        What the optimizer is to step, by name of the parameter; of a portion with channels, a
        leaf with these channels only, which the forward copies into the weight.

    Raises
    ------
    ConfigError
        If a portion names an unknown unit, channels or weights.
    """
    names = [unit.name for unit in units]
    for name in portions:
        if name not in names:
            raise unknown("unit", name, names)
    trained: dict[str, nn.Parameter] = {}
    for unit in units:
        portion = portions.get(unit.name)
        _freeze_unit(model, unit, is_whole=portion is not None and portion.ratio >= 1.0)
        if portion is None:
            continue
        for name, part in trained_slices(model, unit, portion).items():
            parameter = model.get_parameter(name)
            if part.axis is None:
                parameter.requires_grad_(True)
                trained[name] = parameter
                continue
            channels = torch.from_numpy(np.array(part.channels)).to(parameter.device)
            leaf = nn.Parameter(parameter.detach().index_select(part.axis, channels))
            set_slice(_module_of(model, name), TrainedSlice(part.axis, channels, leaf))
            trained[name] = leaf
    return trained


def _module_of(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _freeze_unit(model: nn.Module, unit: Unit, *, is_whole: bool) -> None:
    for name in unit.parameters:
        model.get_parameter(name).requires_grad_(is_whole)
    for path in unit.modules:
        for module in model.get_submodule(path).modules():
            freeze_module(module, not is_whole)
            set_slice(module, None)


def write_slices(model: nn.Module) -> None:
    """Copy the trained slices into the weights, as each forward does."""
    for module in model.modules():
        trained = slice_of(module)
        if trained is not None:
            trained.write(module.get_parameter("weight"))


def read_slices(model: nn.Module) -> None:
    """Copy from the weights into the trained slices, after the weights were set."""
    for module in model.modules():
        trained = slice_of(module)
        if trained is not None:
            trained.read(module.get_parameter("weight"))
