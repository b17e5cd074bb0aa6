from typing import Any

import numpy as np
import pytest
from flower_adsp.strategies import Adsp, LoopOptions
from flower_adsp.strategies.adsp import commit_timer, commits_due
from hypothesis import given
from hypothesis import strategies as st

from flower_adsp.devices import DeviceProfile
from flower_adsp.network import Network
from tests.conftest import Recorder, run_toy, toy_arrays, toy_grid, weight


@given(st.integers(-50, 50), st.integers(0, 50))
def test_commits_due_is_what_is_missing_and_at_least_one(target: int, commits: int) -> None:
    due = commits_due(target, commits)
    assert due == (target - commits if target > commits else 1)


@given(st.floats(0.1, 1e4), st.integers(1, 100), st.floats(0, 1e3))
def test_the_timer_leaves_room_for_communication(period: float, due: int, overhead: float) -> None:
    timer = commit_timer(period, due, overhead)
    assert timer == pytest.approx(max(0.0, period / due - overhead))
    assert timer >= 0


def fixed(overhead: float = 0.0, **options: Any) -> LoopOptions:
    return LoopOptions(network=Network(overhead_s=overhead), **options)


def asynchronous_by_hand(workers: int, commits: int, lr: float, rate: float) -> list[float]:
    """Return w after each commit of equal workers that take turns, one step a commit."""
    w, models, history = 0.0, [0.0] * workers, []
    for number in range(commits):
        worker = number % workers
        step = -lr * (models[worker] - (worker + 1))
        w += rate * step
        models[worker] = w  # it reads the model right after its own commit, not after later ones
        history.append(w)
    return history


@pytest.mark.parametrize("overhead", [0.0, 0.5])
def test_equal_devices_with_a_timer_of_one_step_are_asynchronous_sgd(overhead: float) -> None:
    # A step of the uniform profile takes 1/32 s with batches of one.
    recorder = Recorder()
    step = 0.03125
    strategy = Adsp(
        check_period=10 * (step + overhead),
        commit_rate=10,
        loop=fixed(overhead, callbacks=[recorder]),
    )
    with toy_grid(3) as grid:
        result = run_toy(strategy, grid, rounds=2, lr=0.5)
    commits = recorder.of("commit")
    assert [record["worker"] for record in commits] == [0, 1, 2] * 20
    assert all(record["steps"] == 1 for record in commits)
    expected = asynchronous_by_hand(3, 60, lr=0.5, rate=1 / 3)
    assert weight(result.arrays) == pytest.approx(expected[-1], rel=1e-12)
    # A barrier would average steps from one model: it is something else.
    barrier = 0.0
    for _ in range(20):
        barrier += sum(-0.5 * (barrier - target) for target in (1, 2, 3)) / 3
    assert weight(result.arrays) != pytest.approx(barrier, rel=1e-6)


def test_staleness_counts_the_commits_in_between() -> None:
    recorder = Recorder()
    strategy = Adsp(check_period=0.3125, commit_rate=10, loop=fixed(callbacks=[recorder]))
    with toy_grid(3) as grid:
        run_toy(strategy, grid, rounds=1)
    staleness = [record["staleness"] for record in recorder.of("commit")]
    assert staleness[:3] == [0, 1, 2]
    assert set(staleness[3:]) == {2}


def test_each_update_counts_once_with_its_own_weight() -> None:
    # Three workers with 9, 18 and 27 training examples start from one version and commit once.
    recorder = Recorder()
    strategy = Adsp(
        check_period=10, commit_rate=1, loop=fixed(weighting="examples", callbacks=[recorder])
    )
    with toy_grid(3, overrides="task.examples=10 task.growth=10") as grid:
        result = run_toy(strategy, grid, rounds=1, lr=0.5)
    commits = recorder.of("commit")
    assert [record["version"] for record in commits] == [0, 0, 0]
    gain = 1 - 0.5 ** commits[0]["steps"]
    expected = sum(
        share * gain * (worker + 1) for worker, share in enumerate([1 / 6, 2 / 6, 3 / 6])
    )
    assert weight(result.arrays) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("given", [None, 0.5])
def test_the_server_step_is_one_over_m_unless_given(given: float | None) -> None:
    strategy = Adsp(check_period=10, commit_rate=1, server_learning_rate=given, loop=fixed())
    with toy_grid(2) as grid:
        result = run_toy(strategy, grid, rounds=1, lr=1.0)
    assert weight(result.arrays) == pytest.approx((given or 0.5) * (1 + 2))


@pytest.mark.parametrize("rate", [1, 4])
@pytest.mark.parametrize("overhead", [0.0, 1.0])
@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_all_devices_commit_equally_often_and_nobody_waits(
    rate: int, overhead: float, jitter: float
) -> None:
    recorder = Recorder()
    strategy = Adsp(commit_rate=rate, loop=fixed(overhead, callbacks=[recorder]))
    configs = [{"jitter": jitter}] * 18
    overrides = "task.examples=40 task.batch_size=32"
    with toy_grid(18, overrides=overrides, devices="adsp-ec2", node_configs=configs) as grid:
        run_toy(strategy, grid, rounds=5, lr=0.01)
    checkpoints = recorder.of("checkpoint")
    assert len(checkpoints) == 5
    for record in checkpoints:
        assert max(record["commits"]) - min(record["commits"]) <= 1
        assert record["index"] * rate - max(record["commits"]) in (0, 1)
    now = recorder.state.now
    for worker in recorder.state.workers.values():
        computing, communicating, blocked = worker.spent(now)
        assert computing + communicating + blocked == now
        assert blocked == 0
        assert communicating <= overhead * 1e6 * (worker.commits + 1)


def test_a_worker_that_fell_behind_catches_up_and_without_catching_up_it_does_not() -> None:
    def spread(catch_up: bool) -> int:
        recorder = Recorder()
        strategy = Adsp(
            check_period=60, commit_rate=4, catch_up=catch_up, loop=fixed(callbacks=[recorder])
        )
        # Steps of 1 s and 7 s: the latter's timer of 15 s always runs out late, after 21 s.
        configs = [{"seconds_per_sample": 1.0}, {"seconds_per_sample": 7.0}]
        with toy_grid(2, node_configs=configs) as grid:
            run_toy(strategy, grid, rounds=10, lr=0.01)
        counts = recorder.of("checkpoint")[-1]["commits"]
        return max(counts) - min(counts)

    assert spread(catch_up=True) <= 1
    assert spread(catch_up=False) >= 10


def test_the_target_grows_by_the_rate_at_each_checkpoint() -> None:
    recorder = Recorder()
    strategy = Adsp(check_period=1, commit_rate=3, loop=fixed(callbacks=[recorder]))
    with toy_grid(2) as grid:
        run_toy(strategy, grid, rounds=3)
    for record in recorder.of("checkpoint"):
        assert record["commit_target"] == 3 * (record["index"] + 1)
        assert record["commits_due"] == [
            max(1, record["commit_target"] - count) for count in record["commits"]
        ]


def test_a_floor_keeps_timers_from_being_short() -> None:
    recorder = Recorder()
    strategy = Adsp(
        check_period=1, commit_rate=100, timer_floor=0.5, loop=fixed(callbacks=[recorder])
    )
    with toy_grid(2) as grid:
        run_toy(strategy, grid, rounds=2)
    assert {record["steps"] for record in recorder.of("commit")} == {16}  # 0.5 s of 1/32 s each


def test_a_timer_without_room_for_communication_commits_each_step() -> None:
    recorder = Recorder()
    strategy = Adsp(check_period=1, commit_rate=4, loop=fixed(5.0, callbacks=[recorder]))
    with toy_grid(2) as grid:
        run_toy(strategy, grid, rounds=20)
    assert {record["steps"] for record in recorder.of("commit")} == {1}


def test_who_cannot_keep_up_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with toy_grid(2, node_configs=[{}, {"seconds_per_sample": 8.0, "name": "snail"}]) as grid:
        run_toy(Adsp(check_period=60, commit_rate=4, loop=fixed()), grid, rounds=1)
    warnings = [record.getMessage() for record in caplog.records if "keep up" in record.msg]
    assert len(warnings) == 1
    assert "snail (workers 1)" in warnings[0]


def test_buffers_are_mixed_by_value_and_counts_never_scaled() -> None:
    recorder = Recorder()
    strategy = Adsp(check_period=10, commit_rate=1, loop=fixed(callbacks=[recorder]))
    with toy_grid(2, overrides="task.buffers=true") as grid:
        result = run_toy(strategy, grid, rounds=1, arrays=toy_arrays(buffers=True))
    steps = recorder.of("commit")[0]["steps"]
    assert int(result.arrays["count"].numpy()) == steps
    seen = [(1 - 0.5**steps) * (worker + 1) for worker in range(2)]
    mean = 0.0
    for value in seen:
        mean += 0.5 * (value - mean)
    np.testing.assert_allclose(result.arrays["mean"].numpy(), [mean])


def test_profiles_from_the_node_config_are_used() -> None:
    recorder = Recorder()
    strategy = Adsp(check_period=8, commit_rate=1, loop=fixed(callbacks=[recorder]))
    with toy_grid(2, node_configs=[{"seconds_per_sample": 2.0}, {"seconds_per_sample": 4}]) as grid:
        run_toy(strategy, grid, rounds=1)
    assert [record["steps"] for record in recorder.of("commit")] == [4, 2]
    assert recorder.state.workers[0].profile == DeviceProfile(
        name="uniform", seconds_per_sample=2.0, memory_mib=4096
    )


def test_who_is_back_counts_like_the_others_and_holds_nobody_up() -> None:
    recorder = Recorder()
    configs = [{"seconds_per_sample": 1.0} for _ in range(3)]
    configs[2] |= {"available_s": 40.0, "away_s": 45.0}
    strategy = Adsp(check_period=10, commit_rate=2, loop=fixed(callbacks=[recorder]))
    with toy_grid(3, node_configs=configs) as grid:
        run_toy(strategy, grid, rounds=12)
    moves = [(record["event"], record["t"]) for record in recorder.records if "worker" in record
             and record["event"] in ("away", "back")]  # fmt: skip
    assert [event for event, _ in moves] == ["away", "back", "away"]
    left, back = moves[0][1], moves[1][1]
    assert 0 < left <= 40
    assert back == left + 45
    commits = [(record["worker"], record["t"]) for record in recorder.of("commit")]
    assert not [t for worker, t in commits if worker == 2 and left < t < back]
    worker = recorder.state.workers[2]
    assert worker.counted_before > 0
    again = [
        r["commits_due"] for r in recorder.of("checkpoint") if back + 10 < r["t"] < moves[2][1]
    ]
    assert again
    assert all(max(due) <= 3 for due in again)  # it need not make up for the time away
    computing, communicating, blocked = worker.spent(recorder.state.now)
    present = 120 - 45 - max(0, 120 - moves[2][1])
    assert computing + communicating + blocked == round(present * 1_000_000)
    assert blocked == 0
