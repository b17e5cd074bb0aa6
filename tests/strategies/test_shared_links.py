"""Commits that share a site's uplink or the server's card slow each other."""

from pathlib import Path
from typing import Any

import pytest
from flower_adsp.strategies import Adsp, AdspOverlap, Bsp, LoopOptions, Ssp

from flower_adsp.errors import ConfigError
from flower_adsp.network import Network
from tests.conftest import Recorder, run_toy, toy_grid

# For a model of 8 bytes: 1 s up, 2 s down.
LINK = {"seconds_per_sample": 0.5, "latency_s": 0.25, "up_mbps": 64e-6, "down_mbps": 32e-6}
FAST = {**LINK, "latency_s": 0.0, "up_mbps": 1.0, "down_mbps": 1.0}


def run(strategy: Any, configs: list[dict[str, Any]], rounds: int = 2, **options: Any) -> Recorder:
    recorder = Recorder()
    loop = LoopOptions(callbacks=[recorder], min_available_nodes=1, **options)
    with toy_grid(len(configs), node_configs=configs) as grid:
        run_toy(strategy(loop), grid, rounds=rounds)
    return recorder


def bsp(loop: LoopOptions) -> Bsp:
    return Bsp(local_steps=4, loop=loop)


def times(record: Any) -> list[float]:
    return [record[key] for key in ("released", "started", "trained", "t")]


@pytest.mark.parametrize(
    "strategy",
    [
        bsp,
        lambda loop: Adsp(check_period=30, commit_rate=2, loop=loop),
        lambda loop: AdspOverlap(check_period=30, commit_rate=2, loop=loop),
        lambda loop: Ssp(staleness=2, loop=loop),
    ],
)
def test_a_card_that_is_never_full_changes_nothing(strategy: Any) -> None:
    configs: list[dict[str, Any]] = [
        {**LINK, "seconds_per_sample": 0.4713},
        {**LINK, "seconds_per_sample": 0.7129, "up_mbps": 32e-6},
        {**LINK, "seconds_per_sample": 0.5337, "available-s": 17.0, "away-s": 6.0},
    ]
    private = run(strategy, configs, rounds=4)
    shared = run(strategy, configs, rounds=4, network=Network(server_up_mbps=1.0))
    assert len(private.of("commit")) > 8
    assert shared.records == private.records
    for mine, other in zip(
        shared.state.workers.values(), private.state.workers.values(), strict=True
    ):
        assert mine.spent(shared.state.now) == other.spent(private.state.now)
        assert mine.overhead == other.overhead


def test_two_that_arrive_together_share_the_servers_card() -> None:
    # The card sends 8 bytes a second: each has its model after 2 s; then 4 steps of 0.5 s, and
    # the card takes 16 bytes a second: both have arrived after 1 s more.
    network = Network(server_up_mbps=128e-6, server_down_mbps=64e-6)
    recorder = run(bsp, [FAST, FAST], network=network)
    assert [times(record) for record in recorder.of("commit")] == [
        [0, 2, 4, 5],
        [0, 2, 4, 5],
        [5, 7, 9, 10],
        [5, 7, 9, 10],
    ]
    for worker in recorder.state.workers.values():
        assert (worker.computing, worker.communicating, worker.blocked) == (4_000_000, 6_000_000, 0)
        assert worker.overhead == 3_000_000


def test_a_site_shares_its_uplink_and_leaves_another_site_alone() -> None:
    configs = [{**FAST, "site": site} for site in ("east", "east", "west")]
    recorder = run(bsp, configs, rounds=1, network=Network(site_up_mbps=64e-6))
    tiny = 64e-6  # seconds for the model down a link of its own
    ends = {record["worker"]: record["t"] - tiny for record in recorder.of("commit")}
    assert ends == pytest.approx({0: 4.0, 1: 4.0, 2: 3.0}, abs=1e-5)


def test_one_that_leaves_in_mid_transfer_goes_on_when_it_is_back() -> None:
    # Each alone would take 1 s to upload; together 2 s.
    network = Network(server_up_mbps=64e-6)
    there, leaving = FAST, {**FAST, "available-s": 3.0, "away-s": 4.0}
    recorder = run(bsp, [there, leaving], rounds=1, network=network)
    ends = {record["worker"]: record["t"] for record in recorder.of("commit")}
    away = [record["t"] for record in recorder.of("away")]
    back = [record["t"] for record in recorder.of("back")]
    assert len(away) == len(back) == 1
    assert away[0] <= 3.0
    assert back[0] == pytest.approx(away[0] + 4)
    if away[0] < 2:  # in its training: the other has the link to itself
        assert ends[0] == pytest.approx(3.0, abs=1e-3)
        assert ends[1] == pytest.approx(7.0, abs=1e-3)
    else:  # the two share until it leaves; when it is back it goes on alone
        done = (away[0] - 2) / 2
        assert ends[0] == pytest.approx(away[0] + 1 - done, abs=1e-3)
        assert ends[1] == pytest.approx(back[0] + 1 - done, abs=1e-3)


def test_communication_that_is_slowed_is_measured_and_shortens_the_timers() -> None:
    def adsp(loop: LoopOptions) -> Adsp:
        return Adsp(check_period=20, commit_rate=2, loop=loop)

    configs = [FAST] * 4
    shared = run(adsp, configs, rounds=6, network=Network(server_up_mbps=64e-6))
    alone = run(adsp, configs, rounds=6)
    for worker in shared.state.workers.values():
        assert worker.overhead >= 1_000_000
        assert worker.blocked == 0
    assert max(worker.overhead for worker in alone.state.workers.values()) < 1000
    counts = [worker.commits for worker in shared.state.workers.values()]
    assert max(counts) - min(counts) <= 1
    # The timers make room for it: just as many commits, of fewer steps.
    assert abs(len(shared.of("commit")) - len(alone.of("commit"))) <= 4
    steps = [sum(record["steps"] for record in r.of("commit")) for r in (shared, alone)]
    assert steps[0] < steps[1]


@pytest.mark.parametrize("strategy", ["adsp", "bsp", "adsp-overlap"])
def test_a_stock_client_app_trains_over_shared_links(strategy: str) -> None:
    from tests.strategies.test_loop import stock_app

    recorder = Recorder()
    kinds = {"adsp": Adsp, "bsp": Bsp, "adsp-overlap": AdspOverlap}
    loop = LoopOptions(
        callbacks=[recorder], min_available_nodes=2, network=Network(server_up_mbps=64e-6)
    )
    settings = {} if strategy == "bsp" else {"check_period": 20, "commit_rate": 2}
    with toy_grid(2, client_app=stock_app(), node_configs=[FAST] * 2) as grid:
        run_toy(kinds[strategy](loop=loop, **settings), grid, rounds=3)
    assert len(recorder.of("commit")) >= 4
    assert not recorder.of("refused")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"server_up_mbps": 0.0}, "network.server_up_mbps = 0.0 .* null or above 0"),
        ({"site_down_mbps": -3.0}, "network.site_down_mbps = -3.0"),
        ({"site_up_mbps": 1.0, "overhead_s": 2.0}, "network.site_up_mbps = 1.0 .* null where"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Network(**settings)


def test_the_time_alone_is_that_of_the_narrowest(tmp_path: Path) -> None:
    from flower_adsp.devices import DeviceProfile

    profile = DeviceProfile(up_mbps=8.0, down_mbps=80.0, latency_s=0.0, site="east")
    network = Network(server_down_mbps=16.0, site_up_mbps=4.0)
    assert network.upload(profile, 1_000_000) == 2_000_000
    assert network.download(profile, 1_000_000) == 500_000
    assert network.path(profile, upload=True) == ("east up",)
    assert network.path(profile, upload=False) == ("down",)
