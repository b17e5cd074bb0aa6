from typing import Any

import pytest
from flower_adsp.strategies import FedAsync, FedBuff, LoopOptions
from flower_adsp.strategies.fedasync import staleness_weight

from flower_adsp.errors import ConfigError
from flower_adsp.network import Network
from tests.conftest import Recorder, run_toy, toy_grid, weight


def loop(recorder: Recorder) -> LoopOptions:
    return LoopOptions(network=Network(0.0), callbacks=[recorder], min_available_nodes=1)


@pytest.mark.parametrize(
    ("function", "staleness", "expected"),
    [
        ("constant", 9, 1.0),
        ("polynomial", 0, 1.0),
        ("polynomial", 3, 0.5),
        ("hinge", 4, 1.0),  # up to b
        ("hinge", 5, 1 / (0.5 + 1)),  # 1/(a + 1), not 1/a
        ("hinge", 8, 1 / (0.5 * 4 + 1)),
    ],
)
def test_staleness_weights(function: str, staleness: int, expected: float) -> None:
    assert staleness_weight(function, staleness, a=0.5, b=4) == pytest.approx(expected)


def replay(commits: list[Any], workers: int, mixing: float, a: float) -> float:
    """Work the models out by hand: one local step of rate 0.5 from the version started from."""
    versions = [0.0]
    for record in commits:
        start = versions[record["version"]]
        local = start - 0.5 * (start - (record["worker"] + 1))
        staleness = len(versions) - 1 - record["version"]
        rate = mixing * (1 + staleness) ** -a
        versions.append((1 - rate) * versions[-1] + rate * local)
    return versions[-1]


@pytest.mark.parametrize(("mixing", "a"), [(0.6, 0.5), (0.3, 1.0)])
def test_a_trace_by_hand(mixing: float, a: float) -> None:
    recorder = Recorder()
    configs = [{"seconds_per_sample": seconds} for seconds in (1.0, 2.0, 3.5)]
    strategy = FedAsync(1, mixing, a=a, check_period=10, loop=loop(recorder))
    with toy_grid(3, node_configs=configs) as grid:
        result = run_toy(strategy, grid, rounds=2, lr=0.5)
    commits = recorder.of("commit")
    assert len({record["staleness"] for record in commits}) > 2
    expected = replay(commits, 3, mixing, a)
    assert weight(result.arrays) == pytest.approx(expected, rel=1e-12)


def test_only_versions_in_flight_are_kept() -> None:
    recorder = Recorder()
    configs = [{"seconds_per_sample": seconds} for seconds in (0.1, 0.2, 30.0)]
    with toy_grid(3, node_configs=configs) as grid:
        run_toy(FedAsync(1, check_period=20, loop=loop(recorder)), grid, rounds=3)
    assert all(record["versions_in_flight"] <= 3 for record in recorder.of("checkpoint"))


def test_fresh_updates_one_by_one_are_the_same_for_fedbuff() -> None:
    results = []
    for strategy in (
        FedAsync(2, 0.4, check_period=9, loop=loop(Recorder())),
        FedBuff(2, 1, server_learning_rate=0.4, check_period=9, loop=loop(Recorder())),
    ):
        with toy_grid(1) as grid:
            results.append(weight(run_toy(strategy, grid, rounds=1, lr=0.1).arrays))
    assert results[0] == pytest.approx(results[1], rel=1e-12)


def test_stale_updates_differ_by_how_far_the_model_has_moved() -> None:
    # Two equal workers start from 0 and commit at once; the second is stale by one.
    results = []
    for strategy in (
        FedAsync(1, 0.4, "constant", check_period=1.5, loop=loop(Recorder())),
        FedBuff(1, 1, 0.4, 0.0, check_period=1.5, loop=loop(Recorder())),
    ):
        with toy_grid(2, node_configs=[{"seconds_per_sample": 1.0}] * 2) as grid:
            results.append(weight(run_toy(strategy, grid, rounds=1, lr=0.5).arrays))
    first = 0.4 * 0.5  # after worker 0, whose local model is 0.5; worker 1's is 1.0
    assert results == pytest.approx([(1 - 0.4) * first + 0.4 * 1.0, first + 0.4 * 1.0])
    assert results[1] - results[0] == pytest.approx(0.4 * first)


@pytest.mark.parametrize("normaliser", ["K", "weights"])
def test_fedbuff_by_hand(normaliser: str) -> None:
    recorder = Recorder()
    configs = [{"seconds_per_sample": seconds} for seconds in (1.0, 2.0, 3.5)]
    strategy = FedBuff(1, 2, 1.0, 0.5, normaliser, check_period=10, loop=loop(recorder))
    with toy_grid(3, node_configs=configs) as grid:
        result = run_toy(strategy, grid, rounds=2, lr=0.5)
    versions, buffer = [0.0], []
    for record in recorder.of("commit"):
        start = versions[record["version"]]
        factor = (1 + len(versions) - 1 - record["version"]) ** -0.5
        buffer.append((factor, -0.5 * (start - (record["worker"] + 1))))
        if len(buffer) == 2:  # every update counts once, whatever version it came from
            norm = 2 if normaliser == "K" else sum(factor for factor, _ in buffer)
            versions.append(versions[-1] + sum(factor * step for factor, step in buffer) / norm)
            buffer = []
    assert weight(result.arrays) == pytest.approx(versions[-1], rel=1e-12)
    assert recorder.of("end")[0]["version"] == len(versions) - 1


def test_a_buffer_larger_than_the_federation_still_fills() -> None:
    recorder = Recorder()
    with toy_grid(2) as grid:
        run_toy(FedBuff(1, 5, check_period=1, loop=loop(recorder)), grid, rounds=2)
    assert recorder.of("end")[0]["version"] == len(recorder.of("commit")) // 5


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: FedAsync(0), "local_steps = 0"),
        (lambda: FedAsync(mixing=1.5), "mixing = 1.5"),
        (lambda: FedAsync(staleness_function="linear"), "staleness_function 'linear'"),
        (lambda: FedBuff(buffer_size=0), "buffer_size = 0"),
        (lambda: FedBuff(normaliser="samples"), "normaliser 'samples'"),
        (lambda: FedBuff(staleness_exponent=-1), "staleness_exponent = -1"),
    ],
)
def test_bad_settings_are_named(build: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert said in str(caught.value)
