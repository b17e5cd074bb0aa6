import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_adsp.config import choices, load_config
from flower_adsp.devices import (
    DeviceProfile,
    Presence,
    deal,
    heterogeneity,
    measure,
    not_waiting_limit,
    parse_preset,
    with_overrides,
)
from flower_adsp.errors import ConfigError
from flower_adsp.seeding import stream
from flower_adsp.tasks.images import DigitsMlp
from tests.toy import Quadratic


def test_the_ec2_preset_has_the_paper_s_mix_and_heterogeneity() -> None:
    devices = load_config({"devices": "adsp-ec2"}).devices
    profiles = deal(devices.profiles, 18)
    names = [profile.name for profile in profiles]
    assert {name: names.count(name) for name in set(names)} == {
        "t2.large": 7,
        "t2.xlarge": 5,
        "t2.2xlarge": 4,
        "t3.xlarge": 2,
    }
    speeds = [profile.speed(32) for profile in profiles]
    assert min(speeds) == pytest.approx(0.25)
    assert heterogeneity(speeds) == pytest.approx(2.06, abs=0.005)


@pytest.mark.parametrize("name", choices("devices"))
def test_every_preset_names_its_source(name: str) -> None:
    assert load_config({"devices": name}).devices.source


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 40))
def test_dealing_keeps_the_counts_and_mixes_the_kinds(counts: list[int], number: int) -> None:
    preset = [(DeviceProfile(name=str(kind)), count) for kind, count in enumerate(counts)]
    dealt = [profile.name for profile in deal(preset, number)]
    size = sum(counts)
    assert len(dealt) == number
    for first in range(0, number - size + 1, size):
        hand = dealt[first : first + size]
        assert [hand.count(str(kind)) for kind in range(len(counts))] == counts
    assert len(set(dealt[: len(counts)])) == min(number, len(counts))


@pytest.mark.parametrize("field", ["seconds_per_sample", "up_mbps", "down_mbps", "memory_mib"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "fast"])
def test_a_profile_refuses_what_is_not_above_zero(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{field} of device .* = .*above 0"):
        DeviceProfile(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -3.9, float("inf"), "fast"])
def test_an_npu_is_faster_by_a_number_or_there_is_none(value: object) -> None:
    with pytest.raises(ConfigError, match=r"npu_speedup of device .* = .*above 0"):
        DeviceProfile(npu_speedup=value)  # type: ignore[arg-type]
    assert DeviceProfile().npu_speedup is None
    ((profile, _),) = parse_preset("p", [{"name": "x", "npu_speedup": 3.9}])
    assert profile.npu_speedup == 3.9
    assert with_overrides(profile, {"npu-speedup": 2}).npu_speedup == 2.0


@pytest.mark.parametrize("field", ["latency_s", "jitter"])
def test_a_profile_refuses_negative_latency_and_jitter(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"{field} of device .* at least 0"):
        DeviceProfile(**{field: -0.1})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "x", "seconds_per_sample": -1}, "'p'.*seconds_per_sample of device 'x' = -1"),
        ({"name": "x", "sped": 1}, "unknown field of preset 'p' 'sped'"),
        ({"name": "x", "count": 0}, "count of device 'x' in preset 'p' = 0"),
    ],
)
def test_a_preset_says_which_device_is_wrong(entry: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_preset("p", [entry])


def test_an_empty_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match="not empty"):
        parse_preset("p", [])


def test_jitter_keeps_the_mean_and_is_drawn_once() -> None:
    profile = DeviceProfile(seconds_per_sample=0.5, jitter=0.4)
    draws = [profile.step_seconds(4, stream(1, 0, "jitter", n)) for n in range(4000)]
    assert np.mean(draws) == pytest.approx(2.0, rel=0.03)
    assert profile.step_seconds(4, stream(1, 0, "jitter", 7)) == draws[7]
    assert profile.step_seconds(4) == 2.0


def test_node_config_overrides_any_field() -> None:
    profile = with_overrides(DeviceProfile(), {"up-mbps": 3, "name": "pi", "memory_mib": 64})
    assert (profile.up_mbps, profile.name, profile.memory_mib) == (3.0, "pi", 64.0)
    with pytest.raises(ConfigError, match="up_mbps"):
        with_overrides(DeviceProfile(), {"up_mbps": 0})


def test_measuring_gives_a_profile_of_this_machine() -> None:
    profile = measure(DigitsMlp())
    assert 0 < profile.seconds_per_sample < 1
    assert profile.memory_mib > 1
    assert measure(Quadratic()).seconds_per_sample > 0  # type: ignore[arg-type]


def test_limits_of_not_waiting() -> None:
    assert heterogeneity([1, 1, 1]) == 1
    assert not_waiting_limit(1) == 0
    assert not_waiting_limit(3.2) == pytest.approx(0.6875)


@given(
    st.integers(1, 6), st.integers(0, 5), st.integers(0, 5), st.integers(0, 30), st.integers(0, 30)
)
def test_presence_is_as_counted_second_by_second(
    available: int, away: int, offset: int, start: int, duration: int
) -> None:
    presence = Presence(available, away, min(offset, available - 1))

    def is_there(second: int) -> bool:
        return (second + presence.offset) % (available + away) < available

    end, left = start, duration
    while left:
        left -= is_there(end)
        end += 1
    assert presence.advance(start, duration) == end or not duration
    absent = sum(not is_there(second) for second in range(start, start + duration))
    assert presence.away_between(start, start + duration) == absent
    if away:
        change = presence.next_change(start)
        assert is_there(change) != is_there(change - 1)
        assert all(is_there(s) == is_there(start) for s in range(start, change))


def test_nothing_to_do_while_away_waits_for_the_return() -> None:
    assert Presence(3, 2).advance(4, 0) == 5  # away from 3 to 5
    assert Presence(3, 2).advance(4, 1) == 6


def test_who_is_ever_away_must_sometimes_be_there() -> None:
    with pytest.raises(ConfigError, match="available_s of device 'ghost' = 0"):
        DeviceProfile("ghost", away_s=5.0)
