"""Device profiles: how fast a device trains, how well it is connected, what fits in its memory."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import exp, isfinite
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_adsp.errors import ConfigError, require, unknown

if TYPE_CHECKING:
    from flower_adsp.tasks.base import Task


_LEAST_STEPS = 3  # that are timed to measure a device


@dataclass(frozen=True)
class DeviceProfile:
    """What one device can do.

    Parameters
    ----------
    name : str (default: "device")
        The kind of device.
    seconds_per_sample : float (default: 0.01)
        Seconds to train on one example (forward, backward and step).
    up_mbps, down_mbps : float (default: 20.0)
        Megabits per second from and to the server.
    latency_s : float (default: 0.01)
        Seconds that the first bit takes, each way.
    memory_mib : float (default: 1024.0)
        MiB that training may use.
    jitter : float (default: 0.0)
        Standard deviation σ of the logarithm of an assignment's slowness: its steps take
        exp(σ z − σ²/2) times as long, z normal, so that the mean speed stays the stated one.
    available_s, away_s : float (default: 0.0)
        In virtual time the device is there for `available_s` seconds, then away for `away_s`, in
        turn, each device at a point of its own in this cycle; what it was at when it left, it goes
        on with when it is back. With `away_s` = 0 it is always there.
    site : str (default: "")
        Where it stands, with others that share the site's uplink; empty for a link of its own.
    npu_speedup : float | None (default: None)
        How many times as many examples a second it trains in INT8 on an NPU as in FP32; None has
        no NPU. It is of modelled hardware, for virtual time: INT8 is emulated here.
    """

    name: str = "device"
    seconds_per_sample: float = 0.01
    up_mbps: float = 20.0
    down_mbps: float = 20.0
    latency_s: float = 0.01
    memory_mib: float = 1024.0
    jitter: float = 0.0
    available_s: float = 0.0
    away_s: float = 0.0
    site: str = ""
    npu_speedup: float | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        for key in TEXT_FIELDS:
            value = getattr(self, key)
            require(isinstance(value, str), f"{key} of device {self.name!r}", value, "a text")
        for key in ("seconds_per_sample", "up_mbps", "down_mbps", "memory_mib", "npu_speedup"):
            value = getattr(self, key)
            if value is None and key in OPTIONAL_FIELDS:
                continue
            ok = isinstance(value, int | float) and isfinite(value) and value > 0
            require(ok, f"{key} of device {self.name!r}", value, "a number above 0")
        for key in ("latency_s", "jitter", "available_s", "away_s"):
            value = getattr(self, key)
            ok = isinstance(value, int | float) and isfinite(value) and value >= 0
            require(ok, f"{key} of device {self.name!r}", value, "a number of at least 0")
        require(
            not self.away_s or self.available_s > 0,
            f"available_s of device {self.name!r}",
            self.available_s,
            "above 0 where away_s is",
        )

    def speed(self, batch_size: int) -> float:
        """Return v_i, the steps per second with mini-batches of `batch_size`."""
        return 1.0 / (self.seconds_per_sample * batch_size)

    def step_seconds(self, batch_size: int, draws: np.random.Generator | None = None) -> float:
        """Return the seconds of one step, with one draw of jitter where `draws` is given."""
        seconds = self.seconds_per_sample * batch_size
        if self.jitter and draws is not None:
            seconds *= exp(self.jitter * draws.standard_normal() - self.jitter**2 / 2)
        return seconds


@dataclass(frozen=True)
class Presence:
    """When a device is there: for `available` of each cycle, then away. All in microseconds.

    Parameters
    ----------
    available, away : int
        How long it is there and away in turn; it is always there if `away` is 0.
    offset : int (default: 0)
        How far into the time it is there it is at time 0.
    """

    available: int
    away: int
    offset: int = 0

    def advance(self, start: int, duration: int) -> int:
        """Return when `duration` of being there has passed since `start`."""
        if not self.away:
            return start + duration
        cycles, place = divmod(start + self.offset, self.available + self.away)
        done = cycles * self.available + min(place, self.available) + duration
        # What ends just when it leaves, ends then and not when it is back.
        cycles, place = divmod(done, self.available)
        if duration and not place:
            cycles, place = cycles - 1, self.available
        return cycles * (self.available + self.away) + place - self.offset

    def away_between(self, start: int, end: int) -> int:
        """Return for how long it is away from `start` to `end`."""
        return end - start - (self._present_until(end) - self._present_until(start))

    def next_change(self, now: int) -> int:
        """Return the first time after `now` at which it leaves or is back."""
        cycles, place = divmod(now + self.offset, self.available + self.away)
        end = self.available if place < self.available else self.available + self.away
        return cycles * (self.available + self.away) + end - self.offset

    def _present_until(self, time: int) -> int:
        if not self.away:
            return time
        cycles, place = divmod(time + self.offset, self.available + self.away)
        return cycles * self.available + min(place, self.available)


ALWAYS = Presence(0, 0)
PROFILE_FIELDS = tuple(field.name for field in fields(DeviceProfile))
TEXT_FIELDS = ("name", "site")
OPTIONAL_FIELDS = ("npu_speedup",)


def deal(profiles: Sequence[tuple[DeviceProfile, int]], num_devices: int) -> list[DeviceProfile]:
    """Lay a preset over devices: dealt in turn while a kind's count lasts, then from the start.

    Parameters
    ----------
    profiles : Sequence[tuple[DeviceProfile, int]]
        Kinds of device and how many of each the preset has.
    num_devices : int
        Number of devices to equip.

    Returns
    -------
    list[DeviceProfile]
        One profile a device. A whole multiple of the preset's size has exactly its mix, and fewer
        devices still have a mixture of kinds.
    """
    most = max(count for _, count in profiles)
    deck = [profile for turn in range(most) for profile, count in profiles if turn < count]
    return [deck[index % len(deck)] for index in range(num_devices)]


def parse_preset(
    name: str, entries: Sequence[Mapping[str, Any]]
) -> list[tuple[DeviceProfile, int]]:
    """Read a preset's list of profiles, each with the fields of a profile and a `count`."""
    require(len(entries) > 0, f"devices.profiles of preset {name!r}", list(entries), "not empty")
    preset = []
    for entry in entries:
        settings = dict(entry)
        count = settings.pop("count", 1)
        require(
            isinstance(count, int) and count > 0,
            f"count of device {settings.get('name')!r} in preset {name!r}",
            count,
            "an integer of at least 1",
        )
        for key in settings:
            if key not in PROFILE_FIELDS:
                raise unknown(f"field of preset {name!r}", key, [*PROFILE_FIELDS, "count"])
        try:
            preset.append((DeviceProfile(**settings), count))
        except ConfigError as error:
            raise ConfigError(f"device preset {name!r}: {error}") from None
    return preset


def with_overrides(profile: DeviceProfile, node_config: Mapping[str, Any]) -> DeviceProfile:
    """Lay the fields that a node's own ``--node-config`` gives over its profile."""
    given: dict[str, Any] = {}
    for key in PROFILE_FIELDS:
        value = node_config.get(key, node_config.get(key.replace("_", "-")))
        if value is not None:
            given[key] = str(value) if key in TEXT_FIELDS else float(value)
    return replace(profile, **given)


def measure(task: "Task", seconds: float = 0.5) -> DeviceProfile:
    """Measure the device this runs on by timed steps of the task.

    The median step counts: what else the device does at times, such as starting processes, makes
    some steps much longer.

    Parameters
    ----------
    task : Task
        The task whose steps are timed, on a batch of its held-out data.
    seconds : float (default: 0.5)
        How long to take steps; at least three are timed, after one that is not.

    Returns
    -------
    DeviceProfile
        Speed and memory as found; the link keeps the defaults until commits have been timed.
    """
    from flower_adsp.sgd import Sgd
    from flower_adsp.tasks.batches import first_batch

    model, batch = task.build_model(), first_batch(task)
    optimizer = Sgd(model.parameters(), lr=0.0)
    took: list[float] = []
    started = time.monotonic()
    while len(took) < 1 + _LEAST_STEPS or time.monotonic() - started < seconds:
        began = time.monotonic()
        optimizer.zero_grad()
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        took.append(time.monotonic() - began)
    return DeviceProfile(
        name=os.uname().nodename,
        seconds_per_sample=max(median(took[1:]), 1e-6) / task.batch_size,
        memory_mib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 2**20,
    )


def heterogeneity(speeds: Sequence[float]) -> float:
    """Return H = mean(v) / min(v), the degree of heterogeneity of speeds in steps per second.

    Source: Hu, Wang and Wu, "Distributed Machine Learning through Heterogeneous Edge Systems",
    AAAI 2020, https://arxiv.org/abs/1911.06949.
    """
    return sum(speeds) / len(speeds) / min(speeds)


def not_waiting_limit(degree: float) -> float:
    """Return 1 − 1/H, the most that not waiting can save *at equal total steps*."""
    return 1.0 - 1.0 / degree
