"""Links measured by timed payloads."""

import time
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from flower_adsp.clients.payload import handle_payload
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from flower_adsp.client_app import app
from flower_adsp.config import load_config
from flower_adsp.errors import ConfigError, NodeCountError, RefusedMessage
from flower_adsp.experiment import run_probe
from flower_adsp.messages import MOST_BYTES, decode_payload_query, encode_payload
from flower_adsp.network.probe import measure_link
from flower_adsp.testing import InProcessGrid

SETTINGS = {"task": "digits-mlp", "overrides": "probe.seconds=0.2 probe.repeats=2"}


@given(
    st.floats(0.1, 1000),
    st.floats(0.1, 1000),
    st.lists(st.floats(0, 1), min_size=1, max_size=7),
    st.integers(1, 4),
)
def test_rates_are_found_within_what_the_waiting_explains(
    up: float, down: float, waits: list[float], repeats: int
) -> None:
    waiting = cycle(waits)

    def round_trip(sent: int, received: int) -> float:
        return 2.0 + next(waiting) + sent * 8e-6 / down + received * 8e-6 / up

    link = measure_link(round_trip, seconds=10.0, largest=10**12, repeats=repeats)
    assert 2.0 <= link.round_trip_s <= 3.0
    for found, true in ((link.up_mbps, up), (link.down_mbps, down)):
        assert 10 / 11 * true <= found <= 11 / 10 * true  # a second in ten, either way
    assert not link.up_is_least
    assert not link.down_is_least


def test_a_link_without_waiting_is_found_exactly() -> None:
    link = measure_link(lambda sent, received: 0.5 + sent * 8e-6 / 20 + received * 8e-6 / 5)
    assert link.round_trip_s == 0.5
    assert (link.up_mbps, link.down_mbps) == pytest.approx((5.0, 20.0))


def test_a_link_that_is_faster_than_can_be_told_has_at_least_a_rate() -> None:
    waiting = cycle([0.0, 1.0, 1.0])
    link = measure_link(lambda sent, received: next(waiting), largest=10_000_000, repeats=3)
    assert link.up_is_least
    assert link.down_is_least
    assert link.up_mbps == link.down_mbps == 80.0  # 10 MB in the second that messages differ by


def test_payloads_grow_no_larger_than_allowed() -> None:
    sizes = []

    def round_trip(sent: int, received: int) -> float:
        sizes.append((sent, received))
        return 0.1

    measure_link(round_trip, largest=5_000_000, repeats=1)
    assert sizes == [
        (0, 0), (1_000_000, 0), (4_000_000, 0), (5_000_000, 0),
        (0, 1_000_000), (0, 4_000_000), (0, 5_000_000),
    ]  # fmt: skip


# ------------------------------------------------------------------------------ over Flower's grid


def slow_link(up: float, down: float, broken: tuple[int, ...] = ()) -> ClientApp:
    """Return the app of nodes whose links are slow: what they send and receive takes time."""
    slow = ClientApp()

    def size(message: Message) -> int:
        records = message.content.array_records.values()
        return sum(array.numpy().size for record in records for array in record.values())

    @slow.query("payload")
    def payload(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] in broken:
            raise RuntimeError("no link")
        reply = handle_payload(message, context)
        time.sleep(size(message) * 8e-6 / down + size(reply) * 8e-6 / up)
        return reply

    @slow.query("capability")
    def capability(message: Message, context: Context) -> Message:
        return app(message, context)

    return slow


def probe(tmp_path: Path, client_app: Any, nodes: int = 2, **more: Any) -> Any:
    path = tmp_path / "links.yaml"
    settings = {**SETTINGS, "devices": "uniform", "probe": str(path), **more}
    with InProcessGrid(client_app, nodes, settings) as grid:
        run_probe(grid, load_config(settings))
    return load_config({"devices": str(path)}).devices


def test_a_probe_writes_a_preset_with_the_rates_of_the_links(tmp_path: Path) -> None:
    devices = probe(tmp_path, slow_link(up=40.0, down=80.0))
    assert "worker 1" in devices.source
    assert len(devices.profiles) == 2
    for profile, count in devices.profiles:
        assert count == 1
        assert profile.name == "uniform"
        assert profile.seconds_per_sample == 0.03125
        assert profile.up_mbps == pytest.approx(40.0, rel=0.25)
        assert profile.down_mbps == pytest.approx(80.0, rel=0.25)
        assert profile.latency_s < 0.1


def test_a_node_that_does_not_answer_is_left_out(tmp_path: Path) -> None:
    more = {"overrides": "probe.seconds=0.01 probe.repeats=1"}
    devices = probe(tmp_path, slow_link(100.0, 100.0, broken=(0,)), **more)
    assert len(devices.profiles) == 1
    assert "worker 1" in devices.source
    with pytest.raises(NodeCountError, match="no node answered"):
        probe(tmp_path, slow_link(100.0, 100.0, broken=(0, 1)), **more)


@pytest.mark.parametrize("place", ["links.txt", "nowhere/links.yaml"])
def test_a_probe_needs_a_place_for_its_file(tmp_path: Path, place: str) -> None:
    with pytest.raises(ConfigError, match=r"probe = .*yaml file in a folder that exists"):
        probe(tmp_path, app, probe=str(tmp_path / place))


@pytest.mark.parametrize("setting", ["seconds=0", "largest_mb=0", "largest_mb=1000", "repeats=0"])
def test_a_wrong_setting_is_named(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"probe.{setting.split('=')[0]} = "):
        load_config({"overrides": f"probe.{setting}"})


@pytest.mark.parametrize("number", [-1, MOST_BYTES + 1])
def test_a_device_sends_no_payload_of_any_size(number: int) -> None:
    InProcessGrid(app, 1)  # so that messages can be built
    with pytest.raises(RefusedMessage, match=f"reply-bytes = {number}; allowed are 0 to"):
        decode_payload_query(encode_payload(1, b"", number))
