import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_adsp.devices import DeviceProfile
from flower_adsp.errors import ConfigError
from flower_adsp.network import Network


def test_a_transfer_takes_latency_plus_bytes_over_rate() -> None:
    profile = DeviceProfile(up_mbps=8, down_mbps=16, latency_s=0.25)
    network = Network()
    assert network.upload(profile, 1_000_000) == 1_250_000
    assert network.download(profile, 1_000_000) == 750_000


@given(st.integers(0, 10**9), st.floats(0, 100))
def test_a_fixed_overhead_is_split_in_halves_that_add_up(size: int, seconds: float) -> None:
    network = Network(overhead_s=seconds)
    up, down = network.upload(DeviceProfile(), size), network.download(DeviceProfile(), size)
    assert up + down == round(seconds * 1e6)
    assert 0 <= down - up <= 1


def test_a_negative_overhead_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"network.overhead_s = -1"):
        Network(overhead_s=-1)
