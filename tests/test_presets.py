import re
from math import exp

import numpy as np
import pytest
from flower_adsp.strategies import Bsp, LoopOptions
from scipy.stats import norm

from flower_adsp.config import choices, load_config
from flower_adsp.devices import DeviceProfile, deal, heterogeneity
from flower_adsp.network.groups import MAPPINGS, conflict_number, map_groups
from tests.conftest import run_toy, toy_grid

PRESETS = [
    name for name in choices("devices") if not load_config({"devices": name}).devices.measure
]


def preset(name: str) -> list[DeviceProfile]:
    profiles = load_config({"devices": name}).devices.profiles
    return deal(profiles, sum(count for _, count in profiles))


def degree(name: str) -> float:
    return heterogeneity([profile.speed(32) for profile in preset(name)])


def seconds(name: str) -> dict[str, float]:
    return {profile.name: profile.seconds_per_sample for profile in preset(name)}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_heterogeneity_that_its_source_states(name: str) -> None:
    stated = re.search(r"H = (\d+(\.\d+)?)", load_config({"devices": name}).devices.source)
    if stated:
        assert degree(name) == pytest.approx(float(stated[1]), abs=0.005)
    assert degree(name) >= 1


@pytest.mark.parametrize("name", PRESETS)
def test_a_run_works_on_a_preset(name: str) -> None:
    with toy_grid(3, devices=name) as grid:
        result = run_toy(Bsp(loop=LoopOptions()), grid, rounds=2, lr=0.5)
    assert float(result.arrays["w"].numpy()[0]) == pytest.approx(1.5, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "expected"), [("h145", 1.45), ("h200", 2), ("h260", 2.6), ("h320", 3.2)]
)
def test_the_scaled_ec2_presets_have_the_degree_in_their_name(name: str, expected: float) -> None:
    assert degree(f"adsp-ec2-{name}") == pytest.approx(expected, abs=1e-3)
    counts = [count for _, count in load_config({"devices": f"adsp-ec2-{name}"}).devices.profiles]
    assert counts == [7, 5, 4, 2]
    original, scaled = seconds("adsp-ec2"), seconds(f"adsp-ec2-{name}")
    assert max(scaled.values()) == scaled["t2.large"] == 0.125
    # One factor for all kinds: (s' − 1) / (s − 1) of the relative speeds is the same.
    factors = [
        (0.125 / scaled[kind] - 1) / (0.125 / original[kind] - 1)
        for kind in ("t2.xlarge", "t2.2xlarge", "t3.xlarge")
    ]
    assert factors == pytest.approx([(expected - 1) * 18 / 19] * 3, rel=1e-4)


def test_the_large_ec2_preset_is_the_mix_twice() -> None:
    small, large = preset("adsp-ec2"), preset("adsp-ec2-36")
    assert sorted(map(str, large)) == sorted(map(str, small * 2))


def test_measured_presets_have_the_numbers_published() -> None:
    pis, phones = seconds("rpi-mixed"), seconds("phones")
    assert [pis["rpi4"], pis["rpi5"]] == pytest.approx([15.27 / 16, 7.22 / 16], rel=1e-6)
    published = [4.815 / 16, 4.525 / 16]
    assert [phones["meizu-16t"], phones["xiaomi-mi9"]] == pytest.approx(published, rel=1e-5)
    boards = seconds("jetson-rpi")
    ratios = [boards[name] / boards["jetson-tx2"] for name in ("jetson-nano", "rpi")]
    assert ratios == pytest.approx([1.8125, 11.625], rel=1e-6)


def test_nvflare_s_devices_take_as_long_as_its_rounds() -> None:
    work = [profile.step_seconds(32) * 32 for profile in preset("nvflare-edge")]
    assert sorted(set(work)) == pytest.approx([100, 200, 400], rel=1e-5)


def test_the_lognormal_preset_has_the_quantiles_of_its_distribution() -> None:
    levels = (np.arange(20) + 0.5) / 20
    expected = [0.005 * max(1e-4, exp(1 + 0.6 * norm.ppf(level))) for level in levels]
    listed = [profile.seconds_per_sample for profile in preset("lognormal")]
    assert sorted(listed) == [float(f"{value:.4g}") for value in expected]


@pytest.mark.parametrize("overhead", [0, 2, 5, 10])
def test_overhead_networks_cost_what_their_name_says(overhead: int) -> None:
    network = load_config({"network": f"overhead-{overhead}"}).network
    device = DeviceProfile()
    up, down = network.upload(device, 10**9), network.download(device, 1)
    assert up == down == overhead * 1_000_000 // 2


def test_on_the_soc_cluster_two_split_groups_must_meet() -> None:
    sites = [profile.site for profile in preset("soc-cluster")]
    assert len(sites) == 32
    numbers = {name: conflict_number(map_groups(sites, 8, name), sites) for name in MAPPINGS}
    assert numbers["integrity-greedy"] == numbers["packed"] == 2
    assert numbers["sequential"] > 2
