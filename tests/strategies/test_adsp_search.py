import itertools
from typing import Any

import pytest
from flower_adsp.strategies import Adsp, AdspGuarded, AdspOverlap, LoopOptions
from flower_adsp.strategies.adsp_overlap import hidden_rate
from flower_adsp.strategies.commit_rate import GuardedSearch
from flower_adsp.strategies.reward import slope_reward
from flwr.app import ArrayRecord, MetricRecord

from flower_adsp.errors import ConfigError
from flower_adsp.network import Network
from tests.conftest import Recorder, evaluate_distance, run_toy, toy_grid, weight


def searching(recorder: Recorder, **options: Any) -> Adsp:
    loop = LoopOptions(
        network=Network(0.0), callbacks=[recorder], evaluate_every=options.pop("every", 2.0)
    )
    settings: dict[str, Any] = {"check_period": 8, "reward_target": 0.1, "epoch": 80, **options}
    return Adsp(commit_rate=None, loop=loop, **settings)


@pytest.mark.parametrize("reward", ["published", "robust"])
def test_the_search_goes_by_the_reward_on_the_live_model(reward: str) -> None:
    recorder = Recorder()
    configs = [{"seconds_per_sample": seconds} for seconds in (0.25, 0.5, 1.0)]
    with toy_grid(3, node_configs=configs) as grid:
        run_toy(
            searching(recorder, reward=reward),
            grid,
            rounds=9,
            lr=0.02,
            evaluate_fn=evaluate_distance,
        )
    records = recorder.of("checkpoint")
    expected, rate, reference, is_searching = [], 1, None, True
    for record in records:
        value = record[f"{reward}_reward"]
        if is_searching and (reference is None or value > reference):
            reference, rate = value, rate + 1
        elif is_searching:
            rate, is_searching = rate - 1, False
        expected.append((rate, int(is_searching)))
    assert [(record["commit_rate"], record["is_searching"]) for record in records] == expected
    for before, record in itertools.pairwise(records):
        counts = record["commits"]
        if record["is_searching"]:
            assert record["commit_target"] == max(counts) + record["commit_rate"]
        else:
            assert record["commit_target"] == before["commit_target"] + record["commit_rate"]
        assert record["commits_due"] == [max(1, record["commit_target"] - c) for c in counts]
    for worker in recorder.state.workers.values():
        assert worker.spent(recorder.state.now)[2] == 0  # nobody waits while it searches


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 1e12, 0.0])
@pytest.mark.parametrize("kind", ["published", "robust", "guarded"])
def test_no_loss_stops_a_run_that_searches(kind: str, loss: float) -> None:
    def evaluate(index: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"loss": loss if index > 20 else 1.0 if index else 0.0})

    recorder = Recorder()
    loop = LoopOptions(network=Network(0.0), callbacks=[recorder], evaluate_every=2.0)
    strategy = (
        AdspGuarded(check_period=8, loop=loop)
        if kind == "guarded"
        else searching(recorder, reward=kind)
    )
    with toy_grid(2) as grid:
        run_toy(strategy, grid, rounds=5, lr=0.01, evaluate_fn=evaluate)
    assert len(recorder.of("checkpoint")) == 5


def test_a_search_begins_anew_each_epoch() -> None:
    recorder = Recorder()
    with toy_grid(2) as grid:
        run_toy(
            searching(recorder, epoch=24), grid, rounds=7, lr=0.01, evaluate_fn=evaluate_distance
        )
    rates = [record["commit_rate"] for record in recorder.of("checkpoint")]
    assert rates[2] == rates[5] == 1


@pytest.mark.parametrize(
    ("options", "evaluate", "said"),
    [
        ({"reward_target": None}, evaluate_distance, "reward_target"),
        ({"every": 6.0}, evaluate_distance, "evaluate_every"),
        ({"every": None}, evaluate_distance, "evaluate_every"),
        ({}, None, "evaluate_every"),
    ],
)
def test_a_search_says_what_it_needs(options: Any, evaluate: Any, said: str) -> None:
    with toy_grid(2) as grid, pytest.raises(ConfigError, match=said):
        run_toy(searching(Recorder(), **options), grid, rounds=1, evaluate_fn=evaluate)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"reward": "best"}, "reward 'best'"), ({"epoch": 100.0}, "epoch = 100"),
     ({"commit_rate": 0}, "commit_rate = 0")],
)  # fmt: skip
def test_bad_settings_are_named(settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Adsp(**settings)


def test_a_guarded_search_begins_near_the_optimum_and_goes_by_the_slope() -> None:
    recorder = Recorder()
    loop = LoopOptions(network=Network(2.0), callbacks=[recorder], evaluate_every=4.0)
    strategy = AdspGuarded(check_period=20, drift=1.6, guard=0.9, gain=1.0, loop=loop)
    configs = [{"seconds_per_sample": seconds} for seconds in (0.25, 0.5, 1.0)]
    with toy_grid(3, node_configs=configs) as grid:
        run_toy(strategy, grid, rounds=8, lr=0.02, evaluate_fn=evaluate_distance)
    records, search = recorder.of("checkpoint"), GuardedSearch(4, gain=1.0, guard=0.9)
    samples = [(record["t"], record["loss"]) for record in recorder.of("evaluation")]
    for record in records:
        now = record["t"]
        window = [(t, loss) for t, loss in samples if now - 20 <= t <= now]
        assert record["slope_reward"] == slope_reward(*zip(*window, strict=True))
        search.end_window(record["slope_reward"], window[-1][1] / samples[0][1])
        assert (record["commit_rate"], record["is_searching"]) == (
            search.rate, search.is_searching
        )  # fmt: skip
    assert len({record["commit_rate"] for record in records}) > 1  # it has moved
    for worker in recorder.state.workers.values():
        assert worker.spent(recorder.state.now)[2] == 0  # and nobody has waited


def test_a_guarded_search_needs_losses_but_no_aim() -> None:
    with toy_grid(2) as grid, pytest.raises(ConfigError, match="evaluate_every"):
        run_toy(AdspGuarded(), grid, rounds=1)
    with pytest.raises(ConfigError, match=r"drift = 0\.0"):
        AdspGuarded(drift=0.0)


# ---------------------------------------------------------------------------------------- overlap


def overlapping(recorder: Recorder, overhead: float, **options: Any) -> AdspOverlap:
    loop = LoopOptions(network=Network(overhead), callbacks=[recorder], min_available_nodes=1)
    return AdspOverlap(loop=loop, **options)


def test_the_rate_that_can_be_hidden() -> None:
    assert hidden_rate(60, 4.0, 0.5) == 15  # a step of 4 s for each
    assert hidden_rate(60, 4.0, 5.0) == 12  # one is through when the next begins
    assert hidden_rate(60, 4.0, 1000.0) == 1


def test_without_communication_it_is_adsp() -> None:
    results = []
    for strategy in (
        overlapping(Recorder(), 0.0, check_period=4, commit_rate=2),
        Adsp(check_period=4, commit_rate=2, loop=LoopOptions(network=Network(0.0))),
    ):
        with toy_grid(3) as grid:
            results.append(weight(run_toy(strategy, grid, rounds=4, lr=0.1).arrays))
    assert results[0] == results[1]


def test_a_trace_by_hand() -> None:
    # One worker, steps of 1 s, Γ/ΔC = 4 s, O = 2 s: 1 s down, 1 s up.
    recorder = Recorder()
    strategy = overlapping(recorder, 2.0, check_period=4, commit_rate=1, catch_up=False)
    with toy_grid(1, node_configs=[{"seconds_per_sample": 1.0}]) as grid:
        result = run_toy(strategy, grid, rounds=5, lr=0.25)
    commits = recorder.of("commit")
    # 0-1 down, 1-3 two steps, 3-4 up. Then it trains on from 3: two steps while the commit (until
    # 4) and the model (until 5) travel, and two more from 5 to 7, up until 8, and so on.
    assert [(r["steps"], r["trained"], r["t"]) for r in commits[:3]] == [
        (2, 3, 4), (4, 7, 8), (4, 11, 12)
    ]  # fmt: skip

    def train(w: float, steps: int) -> float:
        for _ in range(steps):
            w -= 0.25 * (w - 1)
        return w

    server, local = 0.0, 0.0
    for number, record in enumerate(commits):
        moved = train(local, 2) - local if number else 0.0
        local = train(server + moved, 2)
        server += local - server  # M = 1, so that η = 1
        assert record["staleness"] == 0
    assert weight(result.arrays) == pytest.approx(server, rel=1e-12)
    computing, communicating, blocked = recorder.state.workers[0].spent(recorder.state.now)
    assert computing + communicating + blocked == recorder.state.now
    assert blocked == 0
    # All but the first download; and the last overlap has not been told yet.
    assert computing >= recorder.state.now - 4_000_000


def test_overlap_makes_more_steps_in_the_same_time() -> None:
    steps = []
    for overlap in (True, False):
        recorder = Recorder()
        strategy = overlapping(recorder, 5.0, check_period=20, commit_rate=2, overlap=overlap)
        with toy_grid(3, node_configs=[{"seconds_per_sample": 0.5}] * 3) as grid:
            run_toy(strategy, grid, rounds=5, lr=0.01)
        steps.append(sum(worker.steps for worker in recorder.state.workers.values()))
    assert steps[0] > 1.7 * steps[1]


def test_a_device_that_lost_its_model_is_refused_once_and_goes_on() -> None:
    recorder = Recorder()
    strategy = overlapping(recorder, 1.0, check_period=4, commit_rate=1)
    with toy_grid(1, node_configs=[{"seconds_per_sample": 0.5}]) as grid:

        def forget(index: int, arrays: ArrayRecord) -> MetricRecord:
            if index == 2:
                grid.context_of(1000).state.clear()
            return MetricRecord({"loss": 1.0})

        run_toy(strategy, grid, rounds=8, lr=0.1, evaluate_fn=forget)
    assert len(recorder.of("refused")) <= 1
    assert recorder.of("commit")[-1]["t"] > 25


def test_the_step_factor_scales_the_step() -> None:
    results = []
    for factor in (1.0, 1.5):
        strategy = overlapping(
            Recorder(), 0.0, check_period=10, commit_rate=1, step_factor=factor, overlap=False
        )
        with toy_grid(2) as grid:
            results.append(weight(run_toy(strategy, grid, rounds=1, lr=0.01).arrays))
    assert results[1] == pytest.approx(1.5 * results[0])
