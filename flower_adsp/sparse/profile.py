"""What training a model costs, unit by unit: bytes kept, bytes at the peak, and arithmetic.

A unit keeps for backward as much as it does whatever else is trained: T_u if it is trained, F_u if
it is frozen but lies on the path of gradients to a trained unit below it, and nothing below the
lowest trained unit. So one pass with all units trained and one with only the lowest trained tell
what any choice of units keeps, exactly:

    saved(S) = Σ_{u ∈ S} T_u + Σ_{u ∉ S, u > min S} F_u.

The peak follows from the same passes: at each unit, forward and backward, what is alive beyond
that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flower_adsp.errors import ConfigError
from flower_adsp.sparse.freezing import channel_axes, make_portion, train_only
from flower_adsp.sparse.meters import PeakMeter, SavedMeter
from flower_adsp.sparse.ops import make_memory_true, make_stock
from flower_adsp.sparse.portions import RATIOS
from flower_adsp.sparse.units import Unit, split_into_units

Loss = Callable[[nn.Module], Tensor]
Choice = Mapping[int, float]

FROZEN, UNRECORDED = 0.0, -1.0


@dataclass(frozen=True)
class UnitProfile:
    """What one unit costs, all in bytes but for `macs`.

    Modes are a ratio above 0 where it is trained, 0 where it is frozen on the path of gradients,
    and −1 where nothing is recorded.

    Parameters
    ----------
    name : str
        Its name.
    macs : int
        Multiply-accumulates of one forward pass.
    parameters : dict[float, int]
        Bytes of the parameters trained, by ratio.
    saved : dict[float, int]
        Bytes kept for backward, by mode.
    forward, backward : dict[float, int]
        The most alive within it, by mode, beyond model, optimizer, what units before it keep, and
        the gradients of units after it.
    """

    name: str
    macs: int
    parameters: dict[float, int]
    saved: dict[float, int]
    forward: dict[float, int]
    backward: dict[float, int]


@dataclass(frozen=True)
class ModelProfile:
    """What training any choice of units costs.

    A choice maps indices of units to ratios; the units that it does not name are frozen.

    Parameters
    ----------
    units : tuple[UnitProfile, ...]
        In the order in which they run; the loss is the last.
    model_bytes : int
        Parameters and buffers.
    batch_bytes : int
        One mini-batch.
    momentum : bool
        Whether the optimizer keeps a tensor of each trained parameter's size.
    is_memory_true : bool
        Whether the layers were.
    """

    units: tuple[UnitProfile, ...]
    model_bytes: int
    batch_bytes: int
    momentum: bool
    is_memory_true: bool

    @property
    def num_units(self) -> int:
        """Return the number of units, without the loss."""
        return len(self.units) - 1

    def mode(self, index: int, choice: Choice) -> float:
        """Return the mode of a unit under a choice."""
        if index == self.num_units:
            return 1.0 if choice else UNRECORDED
        ratio = choice.get(index)
        if ratio is not None:
            return ratio
        return FROZEN if choice and index > min(choice) else UNRECORDED

    def saved_bytes(self, choice: Choice) -> int:
        """Return what is kept for backward."""
        return sum(unit.saved[self.mode(index, choice)] for index, unit in enumerate(self.units))

    def state_bytes(self, choice: Choice) -> int:
        """Return what training holds all the time, besides the model and the batch.

        It is the start of each trained parameter, which the update is measured from, its momentum
        if there is any, and at a ratio below 1 the copy that is trained.
        """
        total = 0
        for index, ratio in choice.items():
            copies = 1 + self.momentum + (ratio < 1.0)
            total += copies * self.units[index].parameters[ratio]
        return total

    def gradient_bytes(self, choice: Choice) -> int:
        """Return the bytes of all gradients."""
        return sum(self.units[index].parameters[ratio] for index, ratio in choice.items())

    def peak_bytes(self, choice: Choice) -> int:
        """Return the most that is alive in a training step: max over its forward and backward."""
        base = self.model_bytes + self.batch_bytes + self.state_bytes(choice)
        modes = [self.mode(index, choice) for index in range(len(self.units))]
        kept, most = 0, 0
        gradients = self.gradient_bytes(choice)
        for index, unit in enumerate(self.units):
            most = max(most, kept + unit.forward[modes[index]])
            kept += unit.saved[modes[index]]
            if index in choice:
                gradients -= unit.parameters[choice[index]]
            if choice and index >= min(choice):
                most = max(most, kept + gradients + unit.backward[modes[index]])
        return base + max(most, self.gradient_bytes(choice))

    def time_share(self, choice: Choice) -> float:
        """Return the time of a step as a part of one that trains all, by arithmetic.

        (fwd + Σ_{u > min S} grad_in_u + Σ_{u ∈ S} r_u · grad_w_u) / (3 · fwd): both gradients take
        as many multiply-accumulates as the forward pass.
        """
        forward = sum(unit.macs for unit in self.units)
        lowest = min(choice, default=self.num_units)
        work = float(forward + sum(unit.macs for unit in self.units[lowest + 1 :]))
        work += sum(ratio * self.units[index].macs for index, ratio in choice.items())
        full = 3 * forward - self.units[0].macs
        return work / full if full else 1.0

    def scaled(self, factor: float) -> "ModelProfile":
        """Return the profile with mini-batches `factor` times as large."""

        def scale(unit: UnitProfile) -> UnitProfile:
            def activations(sizes: dict[float, int]) -> dict[float, int]:
                return {mode: round(size * factor) for mode, size in sizes.items()}

            gradients = {mode: unit.parameters.get(mode, 0) for mode in unit.backward}
            return UnitProfile(
                unit.name,
                unit.macs,
                unit.parameters,
                activations(unit.saved),
                activations(unit.forward),
                {
                    mode: round((size - gradients[mode]) * factor) + gradients[mode]
                    for mode, size in unit.backward.items()
                },
            )

        return ModelProfile(
            tuple(scale(unit) for unit in self.units),
            self.model_bytes,
            round(self.batch_bytes * factor),
            self.momentum,
            self.is_memory_true,
        )


def profile_model(
    model: nn.Module,
    loss: Loss,
    batch: Sequence[Tensor],
    momentum: bool = False,
    ratios: Sequence[float] = RATIOS,
    memory_true: bool = True,
) -> tuple[list[Unit], ModelProfile]:
    """Measure what training each unit costs, on one mini-batch.

    Parameters
    ----------
    model : nn.Module
        A model of which nobody needs the weights after.
    loss : Callable[[nn.Module], Tensor]
        Computes the loss of the mini-batch.
    batch : Sequence[Tensor]
        The mini-batch, for its size.
    momentum : bool (default: False)
        Whether the optimizer will have momentum.
    ratios : Sequence[float] (default: RATIOS)
        At which units may be trained; 1 is among them.
    memory_true : bool (default: True)
        Whether to train with memory-true layers. Without them all ratios are 1.

    Returns
    -------
    tuple[list[Unit], ModelProfile]
        The units in the order in which they run, and their profile.

    Raises
    ------
    ConfigError
        If the units of the model cannot be told apart: see `split_into_units`; or a unit runs
        twice, or never.
    """
    ratios = ratios if memory_true else (1.0,)
    make_stock(model)
    if memory_true:
        make_memory_true(model)
    model.train()
    units = _in_order(model, split_into_units(model), loss)
    weights = {name: p.detach().cpu().numpy() for name, p in model.named_parameters()}
    everything = [_measure(model, units, loss, weights, dict.fromkeys(range(len(units)), ratio))
                  for ratio in ratios]  # fmt: skip
    lowest = _measure(model, units, loss, weights, {0: 1.0})
    nothing = _measure(model, units, loss, weights, {})
    macs = _count(model, units, loss)
    profiles = []
    for index, name in enumerate([*(unit.name for unit in units), "loss"]):
        saved, forward, backward = {}, {}, {}
        for ratio, measured in zip(ratios, everything, strict=True):
            saved[ratio] = measured.saved[index]
            forward[ratio], backward[ratio] = measured.forward[index], measured.backward[index]
        saved[FROZEN], saved[UNRECORDED] = lowest.saved[index], 0
        forward[FROZEN], forward[UNRECORDED] = lowest.forward[index], nothing.forward[index]
        backward[FROZEN] = lowest.backward[index]
        parameters = {
            ratio: 0 if index == len(units) else _trained_bytes(model, units[index], ratio)
            for ratio in ratios
        }
        profiles.append(UnitProfile(name, macs[index], parameters, saved, forward, backward))
    make_stock(model)
    held = [*model.parameters(), *model.buffers()]
    profile = ModelProfile(
        tuple(profiles),
        sum(tensor.nbytes for tensor in held),
        sum(tensor.nbytes for tensor in batch),
        momentum,
        memory_true,
    )
    return units, profile


def _trained_bytes(model: nn.Module, unit: Unit, ratio: float) -> int:
    if ratio >= 1.0:
        return sum(model.get_parameter(name).nbytes for name in unit.parameters)
    total = 0
    for name, axis in channel_axes(model, unit).items():
        parameter = model.get_parameter(name)
        if axis is None:
            total += parameter.nbytes
        else:
            size = parameter.shape[axis]
            total += parameter.nbytes // size * max(1, round(size * ratio))
    return total


# ------------------------------------------------------------------------------------ measuring


@contextmanager
def _entering(
    model: nn.Module, units: list[Unit], enter: Callable[[int, Any], None]
) -> Iterator[None]:
    """Call `enter` with a unit's index when it begins to run, and with their number at the loss."""
    handles, current = [], [-1]

    def switch(index: int, args: tuple[Any, ...]) -> None:
        if current[0] != index:
            current[0] = index
            enter(index, next((arg for arg in args if isinstance(arg, Tensor)), None))

    def before(index: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _, args: switch(index, args)

    for index, unit in enumerate(units):
        for path in unit.modules:
            module = model.get_submodule(path)
            handles.append(module.register_forward_pre_hook(before(index)))

    def after(_: nn.Module, __: Any, output: Any) -> None:
        switch(len(units), output if isinstance(output, tuple) else (output,))

    handles.append(model.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _in_order(model: nn.Module, units: list[Unit], loss: Loss) -> list[Unit]:
    order: list[int] = []
    with torch.no_grad(), _entering(model, units, lambda index, _: order.append(index)):
        loss(model)
    order = [index for index in order if index < len(units)]
    for index in order:
        if order.count(index) > 1:
            raise ConfigError(
                f"unit {units[index].name!r} runs more than once in a forward pass, or its layers "
                "do not run one after another; what it keeps cannot be told: train without a plan"
            )
    missing = [unit.name for index, unit in enumerate(units) if index not in order]
    if missing:
        raise ConfigError(
            f"units {missing} do not run in a forward pass; remove them from the model"
        )
    return [units[index] for index in order]


@dataclass
class _Measured:
    saved: list[int]
    forward: list[int]
    backward: list[int]


def _measure(
    model: nn.Module, units: list[Unit], loss: Loss, weights: Mapping[str, Any], choice: Choice
) -> _Measured:
    """Run one step and split what it keeps, and what is alive beyond that, over the units."""
    portions = {
        units[index].name: make_portion(model, units[index], ratio, weights)
        for index, ratio in choice.items()
    }
    trained = train_only(model, units, portions)
    saved = [0] * (len(units) + 1)
    current = [0]

    def keep(size: int) -> None:
        saved[current[0]] += size

    def enter(index: int, _: Any) -> None:
        current[0] = index

    for parameter in trained.values():
        parameter.grad = None
    with _entering(model, units, enter), SavedMeter(model, trained.values(), keep):
        value = loss(model) if choice else None
    del value
    held = [*model.parameters(), *model.buffers(), *trained.values()]
    forward, backward = [0] * (len(units) + 1), [0] * (len(units) + 1)
    meter = PeakMeter(held)
    before = meter.live
    segment = {"values": forward, "index": 0}

    def close() -> None:
        values, index = segment["values"], segment["index"]
        values[index] = max(values[index], meter.peak - before)  # type: ignore[index]
        meter.peak = meter.live

    def step_forward(index: int, boundary: Tensor | None) -> None:
        close()
        segment["index"] = index
        if boundary is not None and boundary.requires_grad and index:
            boundary.register_hook(lambda _: step_backward(index - 1))  # type: ignore[no-untyped-call]

    def step_backward(index: int) -> None:
        close()
        segment["values"], segment["index"] = backward, index

    with meter, _entering(model, units, step_forward):
        if choice:
            value = loss(model)
            close()
            segment["values"], segment["index"] = backward, len(units)
            value.backward()  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                loss(model)
        close()
    kept = 0
    gradients = {index: _trained_bytes(model, units[index], choice[index]) for index in choice}
    rest = sum(gradients.values())
    for index in range(len(units) + 1):
        forward[index] -= kept
        kept += saved[index]
        rest -= gradients.get(index, 0)
        backward[index] -= kept + rest
    for parameter in (*trained.values(), *model.parameters()):
        parameter.grad = None
    return _Measured(saved, [max(0, f) for f in forward], [max(0, b) for b in backward])


@dataclass(frozen=True)
class LayerCost:
    """A unit in forward order: its parameters and buffers by name, and its part of the MACs."""

    names: tuple[str, ...]
    share: float


def layer_costs(model: nn.Module, loss: Loss) -> tuple[LayerCost, ...]:
    """Return the units of a model in the order in which they run, with what each computes.

    Parameters
    ----------
    model : nn.Module
        Any model that `split_into_units` takes.
    loss : Callable[[nn.Module], Tensor]
        Computes the loss of a mini-batch.
    """
    units = _in_order(model, split_into_units(model), loss)
    macs = _count(model, units, loss)[: len(units)]
    total = sum(macs) or 1
    return tuple(
        LayerCost((*unit.parameters, *unit.buffers), count / total)
        for unit, count in zip(units, macs, strict=True)
    )


def _count(model: nn.Module, units: list[Unit], loss: Loss) -> list[int]:
    """Return the multiply-accumulates of each unit's forward pass."""
    macs = [0] * (len(units) + 1)
    current, counted = [0], [0]
    counter = FlopCounterMode(display=False)

    def enter(index: int, _: Any) -> None:
        total = counter.get_total_flops()
        macs[current[0]] += (total - counted[0]) // 2
        current[0], counted[0] = index, total

    with torch.no_grad(), counter, _entering(model, units, enter):
        loss(model)
        enter(len(units), None)
    return macs
