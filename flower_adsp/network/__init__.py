"""The network model: how long a payload takes between a device and the server."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import ceil

from flower_adsp.clock import MICROSECONDS
from flower_adsp.codec import AS_IT_IS, CODECS
from flower_adsp.devices import DeviceProfile
from flower_adsp.errors import require, unknown
from flower_adsp.network.collectives import COLLECTIVES, STAR, Card, plan_collective
from flower_adsp.network.slices import (
    SCHEDULES,
    SLICE_SIZE,
    WHOLE,
    Layer,
    Link,
    hidden_seconds,
    next_forward_end,
    queued,
    uploaded,
)

_NO_LIMIT = 1e9  # Mbit/s
_SHARED = ("server_up_mbps", "server_down_mbps", "site_up_mbps", "site_down_mbps")


@dataclass(frozen=True)
class Network:
    """The links between each device and the server, and what they share.

    A transfer takes ``latency_s`` plus its bytes over the link's rate. Where transfers pass a
    resource that they share, they slow each other: each has its max-min fair rate at any time
    (`flower_adsp.network.sharing`). Where a comparison asks for one known cost instead,
    ``overhead_s`` stands for the whole of O_i, the communication time of a commit: half for the
    upload, half for the download.

    Parameters
    ----------
    overhead_s : float | None (default: None)
        Seconds that each commit spends communicating, whatever its size. None takes the time from
        the links of the devices.
    server_up_mbps, server_down_mbps : float | None (default: None)
        Megabits per second that the server's network card carries from and to all devices
        together; None for no limit.
    site_up_mbps, site_down_mbps : float | None (default: None)
        The same for the uplink of each site, from and to all devices whose profile has the same
        `site`.
    codec : str (default: "float32")
        What the updates in commits travel as: ``float32`` for as they are, ``float16``, or
        ``int8`` with stochastic rounding and error feedback (`flower_adsp.codec`). It holds in
        real time, too.
    collective : str (default: "star")
        In virtual time, how the commits of a barrier are added up and the model is given to all:
        ``star`` is what Flower does; the others are those of a transport of one's own, between
        nodes of which each can send to each (`flower_adsp.network.collectives`). Under a layer
        plan what the same devices have trained is added up among these and the server, one such
        group of a device after another; a group of one is an upload. A strategy with
        groups of devices takes ``ring`` for a ring in each (`flower_adsp.network.rings`).
    schedule : str (default: "whole")
        In virtual time, how the parameters of a transfer are ordered: ``whole`` for one message, as
        Flower has it, of which nothing is used before all is there; ``fifo``, ``p3`` or ``reverse``
        for slices, so that the first forward pass and the last backward pass of an assignment hide
        part of the transfers, and the server sends a slice on as soon as it has it from all that a
        barrier waits for (`flower_adsp.network.slices`).
    slice_size : int (default: 40,000)
        Parameters in a slice.
    window : int (default: 1)
        Slices given to the link that can no longer be overtaken.
    """

    overhead_s: float | None = None
    server_up_mbps: float | None = None
    server_down_mbps: float | None = None
    site_up_mbps: float | None = None
    site_down_mbps: float | None = None
    codec: str = AS_IT_IS
    collective: str = STAR
    schedule: str = WHOLE
    slice_size: int = SLICE_SIZE
    window: int = 1

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.codec not in CODECS:
            raise unknown("network.codec", self.codec, CODECS)
        if self.schedule not in SCHEDULES:
            raise unknown("network.schedule", self.schedule, SCHEDULES)
        if self.collective not in COLLECTIVES:
            raise unknown("network.collective", self.collective, COLLECTIVES)
        require(
            self.collective == STAR or (self.overhead_s is None and self.schedule == WHOLE),
            "network.collective",
            self.collective,
            f"{STAR!r} with network.overhead_s or a network.schedule of slices",
        )
        for key in ("slice_size", "window"):
            require(getattr(self, key) >= 1, f"network.{key}", getattr(self, key), "at least 1")
        require(
            self.schedule == WHOLE or not self.is_shared,
            "network.schedule",
            self.schedule,
            f"{WHOLE!r} where links are shared: how long a transfer takes is then not known before",
        )
        require(
            self.overhead_s is None or self.overhead_s >= 0,
            "network.overhead_s",
            self.overhead_s,
            "null or at least 0",
        )
        for key in _SHARED:
            value = getattr(self, key)
            require(value is None or value > 0, f"network.{key}", value, "null or above 0")
            require(
                value is None or self.overhead_s is None,
                f"network.{key}",
                value,
                "null where network.overhead_s is set, whose cost no load changes",
            )

    @property
    def has_limits(self) -> bool:
        """Tell whether there is anything that transfers share."""
        return any(getattr(self, key) is not None for key in _SHARED)

    @property
    def is_shared(self) -> bool:
        """Tell whether transfers between devices and the server may slow each other."""
        return self.collective == STAR and self.has_limits

    def together(self, profiles: Iterable[DeviceProfile], num_bytes: int, *, upload: bool) -> int:
        """Return the microseconds of a barrier's reduction or broadcast, by its collective."""
        plan = plan_collective(self.collective, self.cards(profiles))
        return round(plan.seconds(num_bytes, upload=upload) * MICROSECONDS)

    def cards(self, profiles: Iterable[DeviceProfile]) -> tuple[Card, ...]:
        """Return the network cards of the server and of devices."""
        server = Card(self.server_down_mbps or _NO_LIMIT, self.server_up_mbps or _NO_LIMIT)
        devices = (Card(each.up_mbps, each.down_mbps, each.latency_s) for each in profiles)
        return (server, *devices)

    def path(self, profile: DeviceProfile, *, upload: bool) -> tuple[str, ...]:
        """Return the names of the shared resources between a device and the server."""
        way = "up" if upload else "down"
        server = self.server_up_mbps if upload else self.server_down_mbps
        return (*self._uplink(profile, way), *([way] if server is not None else []))

    def between(self, sender: DeviceProfile, receiver: DeviceProfile) -> tuple[str, ...]:
        """Return the names of the shared resources from one device to another."""
        if sender.site == receiver.site:
            return ()
        return (*self._uplink(sender, "up"), *self._uplink(receiver, "down"))

    def _uplink(self, profile: DeviceProfile, way: str) -> list[str]:
        """Return the name of a device's site's uplink, if it has one that may be full."""
        limit = self.site_up_mbps if way == "up" else self.site_down_mbps
        return [f"{profile.site} {way}"] if limit is not None and profile.site else []

    def capacity(self, name: str) -> float:
        """Return the Mbit/s of a shared resource, by its name in a path."""
        *site, way = name.rsplit(" ", 1)
        return float(getattr(self, f"{'site' if site else 'server'}_{way}_mbps"))

    def describe(self) -> dict[str, float | int | str | None]:
        """Return the settings that say something."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {key: v for key, v in values.items() if v is not None or key == "overhead_s"}

    def upload(self, profile: DeviceProfile, num_bytes: int) -> int:
        """Return the microseconds from the device to the server, where nobody else sends."""
        return self._alone(profile, num_bytes, upload=True)

    def download(self, profile: DeviceProfile, num_bytes: int) -> int:
        """Return the microseconds from the server to the device, where nobody else receives."""
        return self._alone(profile, num_bytes, upload=False)

    def hidden(
        self, profile: DeviceProfile, layers: Sequence[Layer], num_bytes: int, *, upload: bool
    ) -> int:
        """Return the microseconds of a transfer that its device's computing hides.

        Parameters
        ----------
        profile : DeviceProfile
            The device.
        layers : Sequence[Layer]
            What is transferred of each, in forward order, and in what time the device computes it.
        num_bytes : int
            Of all layers.
        upload : bool
            Whether it is from the device to the server.
        """
        link = self._link(profile, num_bytes)
        if self.schedule == WHOLE or link is None:
            return 0
        down, up = hidden_seconds(layers, link, *self._slicing)
        took = self._alone(profile, num_bytes, upload=upload)
        return min(int((up if upload else down) * MICROSECONDS), took)

    def uploaded(
        self, profile: DeviceProfile, layers: Sequence[Layer], num_bytes: int
    ) -> list[tuple[int, int]]:
        """Return the layer of each slice, and the microseconds until the server has it.

        They count from the start of the backward pass; parameters are those of `hidden`.
        """
        link = self._link(profile, num_bytes)
        if link is None:
            return []
        slices = queued(layers, self.slice_size)
        seconds = uploaded(layers, link, *self._slicing)
        return [
            (each.layer, ceil(after * MICROSECONDS))
            for each, after in zip(slices, seconds, strict=True)
        ]

    def next_forward_end(
        self,
        profile: DeviceProfile,
        layers: Sequence[Layer],
        num_bytes: int,
        ready: Sequence[Sequence[int]],
        otherwise: int,
        idle: int,
    ) -> int:
        """Return the microsecond at which a device's next forward pass is done.

        Parameters
        ----------
        profile, layers, num_bytes
            As for `hidden`.
        ready : Sequence[Sequence[int]]
            By layer: when the server can send each slice; where the times are not as many as the
            slices, the latest holds for all.
        otherwise : int
            When it can send a layer for which `ready` has nothing.
        idle : int
            When the device can compute.
        """
        link = self._link(profile, num_bytes)
        slices = queued(layers, self.slice_size)
        at = {
            layer: list(ready[layer])
            if len(ready[layer]) == number
            else [max(ready[layer], default=otherwise)] * number
            for layer, number in Counter(each.layer for each in slices).items()
        }
        seconds = [at[each.layer][each.start // self.slice_size] / MICROSECONDS for each in slices]
        done = next_forward_end(
            layers, link or Link(_NO_LIMIT, _NO_LIMIT), seconds, idle / MICROSECONDS, *self._slicing
        )
        return ceil(done * MICROSECONDS)

    @property
    def _slicing(self) -> tuple[str, int, int]:
        return self.schedule, self.slice_size, self.window

    def _link(self, profile: DeviceProfile, num_bytes: int) -> Link | None:
        """Return what carries slices; None where they take no time."""
        if not num_bytes:
            return None
        latency = 0.0 if self.overhead_s is not None else profile.latency_s

        def mbps(*, upload: bool) -> float:
            seconds = self._alone(profile, num_bytes, upload=upload) / MICROSECONDS - latency
            return num_bytes * 8 / 1e6 / seconds if seconds > 0 else _NO_LIMIT

        return Link(mbps(upload=True), mbps(upload=False), latency)

    def _alone(self, profile: DeviceProfile, num_bytes: int, *, upload: bool) -> int:
        if self.overhead_s is not None:
            whole = round(self.overhead_s * MICROSECONDS)
            return whole // 2 if upload else whole - whole // 2
        own = profile.up_mbps if upload else profile.down_mbps
        mbps = min([own, *map(self.capacity, self.path(profile, upload=upload))])
        return round((profile.latency_s + num_bytes * 8 / (mbps * 1e6)) * MICROSECONDS)
