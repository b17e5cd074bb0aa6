from math import nan

import pytest
from flower_adsp.strategies import Adsp, AdspPlus, LoopOptions
from flower_adsp.strategies.adsp_plus import plus_candidates, plus_plus_candidates
from flower_adsp.strategies.offline_search import search_offline
from flwr.app import ArrayRecord

from flower_adsp.errors import ConfigError
from flower_adsp.network import Network
from tests.conftest import Recorder, run_toy, toy_arrays, toy_grid, weight

CONFIGS = [{"seconds_per_sample": seconds} for seconds in (0.5, 1.0, 2.0)]


def loop(recorder: Recorder | None = None) -> LoopOptions:
    return LoopOptions(network=Network(0.0), callbacks=[recorder] if recorder else [])


@pytest.mark.parametrize(
    ("share", "steps"),
    [(1.0, {0: 16, 1: 8, 2: 4}), (0.0, {0: 4, 1: 4, 2: 4}), (0.5, {0: 10, 1: 6, 2: 4})],
)
def test_local_steps_lie_between_the_slowest_and_no_waiting(
    share: float, steps: dict[int, int]
) -> None:
    recorder = Recorder()
    strategy = AdspPlus(check_period=16, commit_rate=2, share=share, loop=loop(recorder))
    with toy_grid(3, node_configs=CONFIGS) as grid:
        run_toy(strategy, grid, rounds=2, lr=0.01)
    assert {record["worker"]: record["steps"] for record in recorder.of("commit")} == steps


def test_with_all_its_share_it_is_adsp() -> None:
    results = []
    for strategy in (AdspPlus(16, 2, loop=loop()), Adsp(16, 2, loop=loop())):
        with toy_grid(3, node_configs=CONFIGS) as grid:
            results.append(weight(run_toy(strategy, grid, rounds=3, lr=0.05).arrays))
    assert results[0] == results[1]


def test_server_momentum_by_hand() -> None:
    recorder = Recorder()
    strategy = Adsp(4, 4, server_momentum=0.5, loop=loop(recorder))
    with toy_grid(2, node_configs=[{"seconds_per_sample": 1.0}] * 2) as grid:
        result = run_toy(strategy, grid, rounds=2, lr=0.5)
    w, velocity, read = 0.0, 0.0, [0.0, 0.0]
    for record in recorder.of("commit"):
        worker = record["worker"]
        velocity = 0.5 * velocity + 0.5 * -0.5 * (read[worker] - (worker + 1))
        w += velocity
        read[worker] = w
    assert weight(result.arrays) == pytest.approx(w, rel=1e-12)


def test_trials_start_from_one_model_and_the_best_is_kept() -> None:
    """A search for ADSP++ on the real loop."""
    saved = toy_arrays()

    def trial(settings: dict[str, float | int]) -> float:
        strategy = Adsp(16, loop=loop(), **settings)  # type: ignore[arg-type]
        with toy_grid(2) as grid:
            result = run_toy(strategy, grid, rounds=1, lr=0.01, arrays=ArrayRecord(dict(saved)))
        return float((weight(result.arrays) - 1.5) ** 2)

    candidates = plus_plus_candidates(2, rates=(1, 4), momenta=(0.0, 0.3))
    found = search_offline(candidates, trial, first_loss=1.5**2, seconds=16)
    assert len(found.losses) == 8
    assert found.seconds == 8 * 16
    assert trial(found.best) == min(found.losses)
    assert found.best["server_learning_rate"] == 0.5  # a tenth of it gets nowhere in a period


def test_what_explodes_is_ruled_out() -> None:
    losses = {"a": nan, "b": 30.0, "c": 9.0}
    assert search_offline("abc", losses.__getitem__, first_loss=1.0).best == "c"
    with pytest.raises(RuntimeError, match=r"ten times 0\.5"):
        search_offline("abc", losses.__getitem__, first_loss=0.5)
    with pytest.raises(ConfigError, match="candidates"):
        search_offline([], lambda _: 0.0, first_loss=1.0)


def test_the_candidates_are_products() -> None:
    assert len(plus_candidates()) == 44
    assert len(plus_plus_candidates(18)) == 56


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: AdspPlus(share=1.5), "share = 1.5"),
        (lambda: Adsp(server_momentum=1.0), "server_momentum = 1.0"),
    ],
)
def test_bad_settings_are_named(build, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=said):
        build()
