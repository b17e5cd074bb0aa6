"""Train a part of a model: some units whole, some at a part of their input channels."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flower_adsp.errors import ConfigError, unknown
from flower_adsp.sparse.ops import (
    TrainedSlice,
    channel_axis,
    freeze_module,
    set_slice,
)
from flower_adsp.sparse.units import Unit

Indices = NDArray[np.int64]
RATIOS = (1.0, 0.5, 0.25, 0.125)


@dataclass(frozen=True)
class Portion:
    """What is trained of a unit.

    Parameters
    ----------
    ratio : float
        Part of the input channels of its layers; 1 for the whole unit.
    channels : dict[str, NDArray[np.int64]]
        Indices of the input channels that are trained, by the name of the weight; empty at ratio 1.
    """

    ratio: float = 1.0
    channels: Mapping[str, Indices] = field(default_factory=dict)


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


def choose_channels(weight: NDArray[np.floating], axis: int, ratio: float, window: int) -> Indices:
    """Return the input channels with the largest norms, or those that follow them.

    Parameters
    ----------
    weight : NDArray
        The layer's weight.
    axis : int
        Along its input channels.
    ratio : float
        Part of them to take; at least one is taken.
    window : int
        0 for those with the largest norms, k for those that come k times as many places later;
        after the last come the first again.

    Returns
    -------
    NDArray[np.int64]
        Indices in increasing order, of shape ``(c,)``.
    """
    others = tuple(other for other in range(weight.ndim) if other != axis)
    norms = np.square(weight.astype(np.float64)).sum(axis=others)
    order = np.argsort(-norms, kind="stable")
    count = max(1, round(len(order) * ratio))
    places = np.arange(window * count, (window + 1) * count) % len(order)
    return np.sort(order[np.unique(places)]).astype(np.int64)


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


def windows(ratio: float) -> int:
    """Return after how many windows all channels have been trained."""
    return ceil(1 / ratio)


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
        axes: Mapping[str, int | None] = (
            dict.fromkeys(unit.parameters) if portion.ratio >= 1.0 else channel_axes(model, unit)
        )
        if portion.channels.keys() != {name for name, axis in axes.items() if axis is not None}:
            raise ConfigError(
                f"channels of unit {unit.name!r} at ratio {portion.ratio} are given for "
                f"{sorted(portion.channels)}; they must be for "
                f"{sorted(name for name, axis in axes.items() if axis is not None)}"
            )
        for name, axis in axes.items():
            parameter = model.get_parameter(name)
            if axis is None:
                parameter.requires_grad_(True)
                trained[name] = parameter
                continue
            channels = torch.from_numpy(np.array(portion.channels[name])).to(parameter.device)
            part = nn.Parameter(parameter.detach().index_select(axis, channels))
            set_slice(model.get_submodule(name.rpartition(".")[0]), TrainedSlice(channels, part))
            trained[name] = part
    return trained


def _freeze_unit(model: nn.Module, unit: Unit, *, is_whole: bool) -> None:
    for name in unit.parameters:
        model.get_parameter(name).requires_grad_(is_whole)
    for path in unit.modules:
        for module in model.get_submodule(path).modules():
            freeze_module(module, not is_whole)
            set_slice(module, None)


def write_slices(model: nn.Module, portions: Mapping[str, Portion]) -> None:
    """Copy trained slices into the weights, after the last step."""
    from flower_adsp.sparse.ops import _synchronised_slice

    for portion in portions.values():
        for name in portion.channels:
            _synchronised_slice(model.get_submodule(name.rpartition(".")[0]))  # type: ignore[arg-type]
