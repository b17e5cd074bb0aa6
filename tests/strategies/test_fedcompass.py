from typing import Any

import pytest
from flower_adsp.strategies import FedCompass, LoopOptions
from flwr.app import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_adsp.client_app import app
from flower_adsp.errors import ConfigError
from flower_adsp.network import Network
from tests.conftest import Recorder, run_toy, spoil, toy_grid, weight


def compass(recorder: Recorder, **options: Any) -> FedCompass:
    loop = LoopOptions(network=Network(0.0), callbacks=[recorder])
    return FedCompass(loop=loop, **{"min_local_steps": 2, "max_local_steps": 8, **options})


def configs(*seconds: float) -> list[dict[str, float]]:
    return [{"seconds_per_sample": each} for each in seconds]


def test_a_trace_by_hand() -> None:
    # Steps of 1 s and 2 s. Worker 0 is in first, at 2 s, and opens a group with 8 steps, expected
    # at 10 s. Worker 1 comes at 4 s, and joins with (10 − 4)/2 = 3 steps: both arrive at 10 s.
    recorder = Recorder()
    with toy_grid(2, node_configs=configs(1, 2)) as grid:
        result = run_toy(compass(recorder, check_period=11), grid, rounds=1, lr=0.5)
    seen = [(r["worker"], r["steps"], r["t"], r["staleness"]) for r in recorder.of("commit")]
    assert seen == [(0, 2, 2, 0), (1, 2, 4, 1), (0, 8, 10, 1), (1, 3, 10, 0)]

    def moved(w: float, target: int, steps: int) -> float:
        return (target - w) * (1 - 0.5**steps)

    first = 0.5 * moved(0, 1, 2)
    second = first + 0.5 * 2**-0.5 * moved(0, 2, 2)
    third = second + 0.5 * (2**-0.5 * moved(first, 1, 8) + moved(second, 2, 3))
    assert weight(result.arrays) == pytest.approx(third, rel=1e-12)


def test_who_is_late_is_not_waited_for_and_is_added_with_the_next() -> None:
    # Worker 1 is in worker 0's group, but by far slower than its profile says.
    recorder = Recorder()
    strategy = compass(recorder, check_period=12, latest_time_factor=1.1)
    with toy_grid(2, node_configs=configs(1, 2)) as grid:
        join = strategy._join

        def overrate(worker: Any) -> Any:
            group, steps = join(worker)
            return group, steps + (2 if worker.id == 1 else 0)

        strategy._join = overrate  # type: ignore[method-assign]
        run_toy(strategy, grid, rounds=1, lr=0.5)
    # Expected at 10 s, latest at 2 + 8·1.1 = 10.8 s: there worker 0 is let go.
    released = [r["released"] for r in recorder.of("commit") if r["worker"] == 0]
    assert released == [0, 2]
    state = recorder.state
    assert state.workers[0].flight.released == 10_800_000
    assert state.workers[0].blocked == 800_000
    assert state.version == 3


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from([0.5, 1.0, 1.3, 2.0, 5.0, 9.0]), min_size=2, max_size=6),
    st.sampled_from([1.0, 1.2, 2.0]),
)
def test_steps_stay_in_bounds_and_nobody_waits_past_the_latest_time(
    seconds: list[float], factor: float
) -> None:
    recorder = Recorder()
    strategy = compass(recorder, check_period=40, latest_time_factor=factor)
    with toy_grid(len(seconds), node_configs=configs(*seconds)) as grid:
        run_toy(strategy, grid, rounds=5, lr=0.05)
    assert all(2 <= record["steps"] <= 8 for record in recorder.of("commit"))
    for worker in recorder.state.workers.values():
        assert worker.commits >= 2
    assert recorder.of("end")[0]["version"] >= len(seconds)


def test_a_device_that_fails_does_not_hold_its_group() -> None:
    def damage(reply: Message) -> Message:
        if reply.metadata.src_node_id == 1001:
            del reply.content["metrics"]
        return reply

    recorder = Recorder()
    with toy_grid(3, client_app=spoil(app, damage)) as grid:
        run_toy(compass(recorder, check_period=5), grid, rounds=4)
    assert len(recorder.of("refused")) > 3
    assert all(recorder.state.workers[worker].commits > 3 for worker in (0, 2))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_local_steps": 0}, "min_local_steps = 0"),
        ({"min_local_steps": 9, "max_local_steps": 8}, "max_local_steps = 8"),
        ({"latest_time_factor": 0.5}, "latest_time_factor = 0.5"),
    ],
)
def test_bad_settings_are_named(options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FedCompass(**options)
