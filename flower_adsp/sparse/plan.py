"""A layer plan: what each worker trains, and what that means for its messages and its time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_adsp.arrays import Weights
from flower_adsp.codec import AS_IT_IS, travelling_bytes
from flower_adsp.errors import require, unknown
from flower_adsp.sparse.portions import Portion, Slice
from flower_adsp.tasks.base import Task

if TYPE_CHECKING:
    from flower_adsp.sparse.planner import Cover
    from flower_adsp.sparse.profile import ModelProfile
    from flower_adsp.sparse.units import Unit

METHODS = ("dsparse", "suffix", "alone", "head", "everything")
IMPORTANCES = ("uniform", "fisher", "contribution")
STATISTICS = ("server", "trainers")
MIB = 2**20
_CALIBRATION = 256  # examples


@dataclass(frozen=True)
class Member:
    """A device as the planner sees it.

    Parameters
    ----------
    id : int
        Its partition id.
    name : str
        The kind of device.
    memory_mib : float
        MiB that training may use.
    num_examples : int
        Its training examples.
    batch_size : int
        Its mini-batches.
    """

    id: int
    name: str
    memory_mib: float
    num_examples: int
    batch_size: int


@dataclass(frozen=True)
class WorkerPlan:
    """What one worker trains.

    Parameters
    ----------
    portions : dict[str, Portion]
        By the name of the unit.
    slices : dict[str, Slice]
        What is trained of each parameter, by its name; what is not named is frozen.
    buffers : tuple[str, ...]
        Buffers that its commits carry: those of the units that it trains whole.
    time_share : float
        Time of a step as a part of one that trains all.
    peak_bytes, saved_bytes : int
        Modelled memory at the peak of a step, and kept for backward.
    """

    portions: Mapping[str, Portion]
    slices: Mapping[str, Slice]
    buffers: tuple[str, ...]
    time_share: float
    peak_bytes: int
    saved_bytes: int

    def sends(self, name: str) -> bool:
        """Tell whether an array is in its commits, all of it or some channels."""
        return name in self.slices or name in self.buffers

    def upload_bytes(self, model: Weights, codec: str = AS_IT_IS) -> int:
        """Return the bytes of a commit's arrays."""
        return sum(self.upload_sizes(model, codec).values())

    def upload_sizes(self, model: Weights, codec: str = AS_IT_IS) -> dict[str, int]:
        """Return the bytes of each of a commit's arrays."""
        sizes = {name: model[name].nbytes for name in self.buffers}
        for name, part in self.slices.items():
            whole = model[name]
            count = int(np.prod(part.shape(whole.shape), dtype=np.int64))
            sizes[name] = travelling_bytes(whole, codec, count)
        return sizes


@dataclass(frozen=True)
class LayerPlan:
    """What each worker trains.

    Parameters
    ----------
    units : tuple[Unit, ...]
        The model's units.
    workers : dict[int, WorkerPlan]
        By partition id.
    uncovered : tuple[str, ...]
        Units that nobody trains whole.
    value : float (default: 0.0)
        The planner's objective.
    unit_of : dict[str, str]
        The unit of each parameter and buffer.
    """

    units: "tuple[Unit, ...]"
    workers: Mapping[int, WorkerPlan]
    uncovered: tuple[str, ...] = ()
    value: float = 0.0
    unit_of: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Tell whether each worker trains everything."""
        return all(
            len(worker.portions) == len(self.units)
            and all(portion.ratio >= 1.0 for portion in worker.portions.values())
            for worker in self.workers.values()
        )

    def describe(self) -> dict[str, Any]:
        """Return the plan as plain data, for the history."""
        return {
            "units": [unit.name for unit in self.units],
            "uncovered": list(self.uncovered),
            "value": self.value,
            "workers": {
                str(id_): {
                    "ratios": {name: portion.ratio for name, portion in plan.portions.items()},
                    "peak_mib": plan.peak_bytes / MIB,
                    "time_share": plan.time_share,
                }
                for id_, plan in self.workers.items()
            },
        }


class LayerPlanner:
    """Makes layer plans for a task's model.

    Parameters
    ----------
    task : Task
        The model, its loss, and a mini-batch to profile it on.
    with_momentum : bool (default: False)
        Whether devices train with momentum.
    method : str (default: "dsparse")
        ``dsparse``: the most useful cover; ``suffix``: each device the last units that fit with
        stock layers; and as controls ``alone``: each device its own best choice, whatever the
        others do; ``head``: the last unit only; ``everything``, whether it fits or not.
    importance : str (default: "uniform")
        v_u: ``uniform``, ``fisher`` or ``contribution``, measured on the server's data.
    channels : bool (default: False)
        Whether units may also be trained at a part of their input channels.
    period : int | None (default: None)
        Rounds after which to plan anew; None plans once, and again when workers come or go.
    rotate : bool (default: False)
        Whether a new plan favours, for each device, units that it has not trained for long, and
        moves on to the next channels.
    statistics : str (default: "server")
        Where the running statistics of normalisations come from, which frozen ones use:
        ``trainers``: the devices that train the unit, by value as other buffers; ``server``: the
        server sets them from its data, at the start and once a round's worth of commits is in,
        unless all train everything.
        Those of the trainers lag behind, as the units below are trained by others; then training
        from scratch may not get anywhere.
    headroom : float (default: 0.01)
        Part of each device's memory that a plan leaves free, for what the memory model misses.
    most_time_share : float | None (default: None)
        The most time that a step may take, as a part of one that trains all; None for no limit.
    """

    def __init__(
        self,
        task: Task,
        with_momentum: bool = False,
        method: str = "dsparse",
        importance: str = "uniform",
        channels: bool = False,
        period: int | None = None,
        rotate: bool = False,
        statistics: str = "server",
        headroom: float = 0.01,
        most_time_share: float | None = None,
    ) -> None:
        if method not in METHODS:
            raise unknown("plan.method", method, METHODS)
        if importance not in IMPORTANCES:
            raise unknown("plan.importance", importance, IMPORTANCES)
        require(0 <= headroom < 1, "plan.headroom", headroom, "at least 0 and below 1")
        if statistics not in STATISTICS:
            raise unknown("plan.statistics", statistics, STATISTICS)
        require(period is None or period >= 1, "plan.period", period, "null or at least 1")
        require(
            most_time_share is None or 0 < most_time_share <= 1,
            "plan.most_time_share",
            most_time_share,
            "null, or above 0 and at most 1",
        )
        self.task = task
        self.with_momentum = with_momentum
        self.method = method
        self.importance = importance
        self.channels = channels
        self.period = period
        self.rotate = rotate
        self.statistics = statistics
        self.headroom = headroom
        self.most_time_share = most_time_share
        self._profiled: tuple[list[Unit], ModelProfile] | None = None
        self._since: dict[tuple[int, str], int] = {}
        self._plans = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what rotation remembers."""
        return {"since": self._since, "plans": self._plans}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self._since, self._plans = dict(state["since"]), int(state["plans"])

    @property
    def is_memory_true(self) -> bool:
        """Tell whether devices train with memory-true layers under these plans."""
        return self.method != "suffix"

    def profiled(self) -> "tuple[list[Unit], ModelProfile]":
        """Return the model's units and what they cost, with the task's mini-batch."""
        if self._profiled is None:
            from flower_adsp.sparse.profile import profile_model
            from flower_adsp.tasks.batches import first_batch

            batch = first_batch(self.task)
            self._profiled = profile_model(
                self.task.build_model(),
                lambda model: self.task.loss(model, batch),
                batch,
                self.with_momentum,
                memory_true=self.is_memory_true,
            )
        return self._profiled

    def make(self, members: Sequence[Member], weights: Weights) -> LayerPlan:
        """Plan for these devices and the present weights.

        Raises
        ------
        ConfigError
            If the model cannot be split into units, or a device cannot even train the last one.
        """
        units, profile = self.profiled()
        cover = self._cover(units, profile, members, weights)
        model = self.task.build_model()
        plans = {
            member.id: self._worker_plan(model, units, profile, member, choice, weights)
            for member, choice in zip(members, cover.choices, strict=True)
        }
        self._plans += 1
        for member, choice in zip(members, cover.choices, strict=True):
            for index, unit in enumerate(units):
                key = (member.id, unit.name)
                self._since[key] = 0 if index in choice else self._since.get(key, 0) + 1
        return LayerPlan(
            tuple(units),
            plans,
            tuple(units[index].name for index in cover.uncovered),
            cover.value,
            {name: unit.name for unit in units for name in (*unit.parameters, *unit.buffers)},
        )

    def measured_statistics(self, weights: Weights) -> Weights:
        """Return the buffers of normalisations as they are for weights on the server's data."""
        import torch
        from torch import nn

        from flower_adsp.tasks.batches import collate

        model = self.task.build_model()
        model.load_state_dict({name: torch.from_numpy(np.array(a)) for name, a in weights.items()})
        names: list[str] = []
        for path, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                module.reset_running_stats()
                module.momentum = None  # the plain mean
                names += [f"{path}.running_mean", f"{path}.running_var"]
        if not names:
            return {}
        data = self.task.held_out_data("validation")
        batch = collate(data, np.arange(min(len(data), _CALIBRATION)))
        with torch.no_grad():
            self.task.loss(model.train(), batch)
        state = model.state_dict()
        return {name.removeprefix("."): state[name.removeprefix(".")].numpy() for name in names}

    def _cover(
        self,
        units: "list[Unit]",
        profile: "ModelProfile",
        members: Sequence[Member],
        weights: Weights,
    ) -> "Cover":
        from flower_adsp.sparse import planner

        mean = sum(member.num_examples for member in members) / len(members)
        capacities = [
            planner.Capacity(
                int(member.memory_mib * MIB * (1 - self.headroom)),
                member.num_examples / mean if mean else 1.0,
                self.most_time_share,
                f"worker {member.id} ({member.name})",
            )
            for member in members
        ]
        if self.method == "suffix":
            return planner.plan_suffix(profile, capacities)
        if self.method == "head":
            return planner.plan_head(profile, capacities)
        if self.method == "everything":
            return planner.plan_everything(profile, capacities)
        values = self._importance(units, weights)
        ratios = sorted(profile.units[0].parameters, reverse=True) if self.channels else (1.0,)
        if self.method == "alone":
            return planner.plan_alone(profile, values, capacities, ratios)
        boost: Callable[[int, int], float] | None = None
        if self.rotate:
            ids = [member.id for member in members]
            names = [unit.name for unit in units]

            def boost(device: int, unit: int) -> float:
                return 1.0 + self._since.get((ids[device], names[unit]), 0)

        return planner.plan_cover(profile, values, capacities, ratios, boost)

    def _importance(self, units: "list[Unit]", weights: Weights) -> list[float]:
        if self.importance == "uniform":
            return [1 / len(units)] * len(units)
        import torch

        from flower_adsp.sparse.importance import contribution_importance, fisher_importance
        from flower_adsp.tasks.batches import first_batch

        model, batch = self.task.build_model(), first_batch(self.task)
        model.load_state_dict({name: torch.from_numpy(np.array(a)) for name, a in weights.items()})
        measure = fisher_importance if self.importance == "fisher" else contribution_importance
        return measure(model, units, lambda model: self.task.loss(model, batch))

    def _worker_plan(
        self,
        model: Any,
        units: "list[Unit]",
        profile: "ModelProfile",
        member: Member,
        choice: Mapping[int, float],
        weights: Weights,
    ) -> WorkerPlan:
        from flower_adsp.sparse.freezing import make_portion, trained_slices

        window = self._plans if self.rotate else 0
        portions = {
            units[index].name: make_portion(model, units[index], ratio, weights, window)
            for index, ratio in sorted(choice.items())
        }
        slices: dict[str, Slice] = {}
        buffers: list[str] = []
        for unit in units:
            portion = portions.get(unit.name)
            if portion is not None:
                slices |= trained_slices(model, unit, portion)
                buffers += unit.buffers if portion.ratio >= 1.0 else ()
        if member.batch_size != self.task.batch_size:
            profile = profile.scaled(member.batch_size / self.task.batch_size)
        return WorkerPlan(
            portions,
            slices,
            tuple(buffers),
            profile.time_share(choice),
            profile.peak_bytes(choice),
            profile.saved_bytes(choice),
        )


class DSparsePlan(LayerPlanner):
    """A `LayerPlanner` under the name of what it plans, unless told otherwise."""


def no_plan() -> None:
    """Return no planner: all devices train all."""
