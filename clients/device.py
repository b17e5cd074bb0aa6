"""What a device knows of itself: its settings, task, data and profile."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import isfinite
from typing import Any

import torch
from flwr.app import Context

from flower_adsp.config import Choice, Config, Devices, load_config
from flower_adsp.devices import DeviceProfile, deal, measure, with_overrides
from flower_adsp.errors import require
from flower_adsp.tasks.base import Task
from flower_adsp.tasks.batches import Augment, BatchStream, own_split
from flower_adsp.tasks.build import build_task


@dataclass(frozen=True)
class Device:
    """A device that takes part in a run.

    Parameters
    ----------
    config : Config
        The run's settings.
    task : Task
        What it trains.
    partition_id, num_partitions : int
        Which worker it is, of how many.
    train : BatchStream
        Its mini-batches.
    held_out : BatchStream
        Its own evaluation share, as a stream of which the indices are of interest.
    """

    config: Config
    task: Task
    partition_id: int
    num_partitions: int
    train: BatchStream
    held_out: BatchStream
    node_config: tuple[tuple[str, Any], ...]

    @cached_property
    def profile(self) -> DeviceProfile:
        """Return its profile: from the preset or measured, under its node's own overrides."""
        if self.config.devices.measure:
            profile = measure(self.task)
            slower = profile.seconds_per_sample * self.slowdown
            profile = replace(profile, seconds_per_sample=slower)
        else:
            profile = deal(self.config.devices.profiles, self.partition_id + 1)[-1]
        return with_overrides(profile, dict(self.node_config))

    @property
    def slowdown(self) -> float:
        """Return how many times as long its steps are to take, for trials; 1 for as they are."""
        value = dict(self.node_config).get("slowdown", 1.0)
        ok = isinstance(value, int | float) and isfinite(value) and value >= 1
        require(ok, "node-config slowdown", value, "a number of at least 1")
        return float(value)

    @property
    def accelerator(self) -> torch.device:
        """Return the torch device to train on."""
        return pick_accelerator(self.config.train.device)


@dataclass(frozen=True)
class Own:
    """What a Flower app of a user's own brings, in place of names in the run config.

    Parameters
    ----------
    task : Callable[..., Task]
        Returns the task; called with ``seed`` if it takes that.
    devices : tuple[DeviceProfile, ...] (default: ())
        Profiles of simulated devices, in turn; none: those of the run config.
    """

    task: Callable[..., Task]
    devices: tuple[DeviceProfile, ...] = ()

    def config(self, run_config: Mapping[str, Any]) -> Config:
        """Return the settings; the app's own keys of the run config are left to it."""
        settings = {key: run_config[key] for key in _SHARED if key in run_config}
        config = load_config(settings)
        task = Choice(getattr(self.task, "__name__", "own"), self.task, {})
        if not self.devices:
            return replace(config, task=task)
        profiles = [(profile, 1) for profile in self.devices]
        return replace(config, task=task, devices=Devices("own", "the app's own", profiles))


# What the run config of any app may say to its devices.
_SHARED = ("devices", "seed", "overrides")


def device_of(context: Context, own: Own | None = None) -> Device:
    """Return the device that a context belongs to; it is built once a process.

    Parameters
    ----------
    context : Context
        Flower's context.
    own : Own or None (default: None)
        The app's own task; None takes the one that the run config names.

    Raises
    ------
    ConfigError
        If the run's or the node's settings are wrong.
    DataError
        If the partition has no data.
    """
    torch.set_num_threads(1)  # so that results do not depend on how many cores there are
    return _build(
        tuple(sorted(context.run_config.items())), tuple(sorted(context.node_config.items())), own
    )


@lru_cache(maxsize=256)
def _build(
    run_config: tuple[tuple[str, Any], ...],
    node_config: tuple[tuple[str, Any], ...],
    own: Own | None,
) -> Device:
    config = load_config(dict(run_config)) if own is None else own.config(dict(run_config))
    task = build_task(config)
    node = dict(node_config)
    partition_id, num_partitions = node.get("partition-id"), node.get("num-partitions")
    require(isinstance(partition_id, int), "node-config partition-id", partition_id, "an integer")
    require(
        isinstance(num_partitions, int), "node-config num-partitions", num_partitions, "an integer"
    )
    assert isinstance(partition_id, int)
    assert isinstance(num_partitions, int)
    data = task.train_data(partition_id, num_partitions)
    train, held_out = own_split(len(data), config.seed, partition_id)

    def batches(indices: Any, augment: Augment | None = None) -> BatchStream:
        return BatchStream(data, indices, task.batch_size, config.seed, partition_id, augment)

    own_batches = batches(train, getattr(task, "augment", None))
    return Device(
        config, task, partition_id, num_partitions, own_batches, batches(held_out), node_config
    )


def pick_accelerator(name: str) -> torch.device:
    """Return the torch device of a name; ``auto`` takes the best there is.

    Raises
    ------
    ConfigError
        If the device asked for is not there.
    """
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind, there in available.items() if there)
    there = [kind for kind, is_there in available.items() if is_there]
    require(available.get(name, False), "train.device", name, f"auto or one of {there}")
    return torch.device(name)
