"""The network model: how long a payload takes between a device and the server."""

from dataclasses import dataclass

from flower_adsp.clock import MICROSECONDS
from flower_adsp.devices import DeviceProfile
from flower_adsp.errors import require


@dataclass(frozen=True)
class Network:
    """Private links between each device and the server.

    A transfer takes ``latency_s`` plus its bytes over the link's rate. Where a comparison asks for
    one known cost instead, ``overhead_s`` stands for the whole of O_i, the communication time of
    a commit: half for the upload, half for the download.

    Parameters
    ----------
    overhead_s : float | None (default: None)
        Seconds that each commit spends communicating, whatever its size. None takes the time from
        the links of the devices.
    """

    overhead_s: float | None = None

    def __post_init__(self) -> None:
        """Check the settings."""
        require(
            self.overhead_s is None or self.overhead_s >= 0,
            "network.overhead_s",
            self.overhead_s,
            "null or at least 0",
        )

    def upload(self, profile: DeviceProfile, num_bytes: int) -> int:
        """Return the microseconds that `num_bytes` take from the device to the server."""
        return self._transfer(profile.latency_s, profile.up_mbps, num_bytes, upload=True)

    def download(self, profile: DeviceProfile, num_bytes: int) -> int:
        """Return the microseconds that `num_bytes` take from the server to the device."""
        return self._transfer(profile.latency_s, profile.down_mbps, num_bytes, upload=False)

    def _transfer(self, latency_s: float, mbps: float, num_bytes: int, *, upload: bool) -> int:
        if self.overhead_s is None:
            return round((latency_s + num_bytes * 8 / (mbps * 1e6)) * MICROSECONDS)
        whole = round(self.overhead_s * MICROSECONDS)
        return whole // 2 if upload else whole - whole // 2
