import numpy as np
import pytest
from flower_adsp.strategies import Bsp, LoopOptions, Ssp
from flwr.app import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_adsp.client_app import app
from flower_adsp.errors import ConfigError
from flower_adsp.network import Network
from tests.conftest import Recorder, run_toy, spoil, toy_grid, weight


def speeds(*seconds: float) -> list[dict[str, float]]:
    return [{"seconds_per_sample": each} for each in seconds]


def loop(recorder: Recorder | None = None, overhead: float = 0.0) -> LoopOptions:
    return LoopOptions(network=Network(overhead), callbacks=[recorder] if recorder else [])


@pytest.mark.parametrize("seconds", [(1, 1, 1), (1, 2, 5)])
def test_without_staleness_it_is_bsp(seconds: tuple[float, ...]) -> None:
    results = []
    for strategy in (Ssp(staleness=0, loop=loop()), Bsp(loop=loop())):
        with toy_grid(3, node_configs=speeds(*seconds)) as grid:
            results.append(weight(run_toy(strategy, grid, rounds=5, lr=0.5).arrays))
    assert results[0] == pytest.approx(results[1], rel=1e-12)


def test_a_trace_by_hand() -> None:
    # Steps of 1 s and 3 s, s = 1: the fast one starts step k + 1 while it leads by at most 1.
    recorder = Recorder()
    with toy_grid(2, node_configs=speeds(1, 3)) as grid:
        result = run_toy(Ssp(staleness=1, loop=loop(recorder)), grid, rounds=2, lr=0.5)
    seen = [(record["worker"], record["t"], record["released"]) for record in recorder.of("commit")]
    # At 2 s worker 0 leads by 2 and waits; at 3 s worker 1 finishes, and both go.
    assert seen == [(0, 1, 0), (0, 2, 1), (1, 3, 0), (0, 4, 3), (1, 6, 3)]
    w, read = 0.0, {0: 0.0, 1: 0.0}
    for worker, _, _ in seen:
        w += 0.5 * -0.5 * (read[worker] - (worker + 1))
        if (worker, w) != (0, None):
            read[worker] = w
        if worker == 1:
            read[0] = w  # it was waiting, and pulls when it is let go
    assert weight(result.arrays) == pytest.approx(w, rel=1e-12)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from([0.5, 1.0, 1.7, 4.0, 9.0]), min_size=2, max_size=5),
    st.integers(0, 4),
)
def test_nobody_leads_by_more_than_s_and_the_step_it_was_allowed(
    seconds: list[float], staleness: int
) -> None:
    recorder = Recorder()
    with toy_grid(len(seconds), node_configs=speeds(*seconds)) as grid:
        run_toy(Ssp(staleness=staleness, loop=loop(recorder)), grid, rounds=6, lr=0.1)
    counts = np.zeros(len(seconds), int)
    for record in recorder.of("commit"):
        counts[record["worker"]] += 1
        assert counts.max() - counts.min() <= staleness + 1


def test_a_device_that_always_fails_does_not_hold_the_others() -> None:
    def damage(reply: Message) -> Message:
        if reply.metadata.src_node_id == 1001:
            del reply.content["metrics"]
        return reply

    recorder = Recorder()
    with toy_grid(2, client_app=spoil(app, damage)) as grid:
        run_toy(Ssp(staleness=1, loop=loop(recorder)), grid, rounds=5)
    assert len(recorder.of("refused")) == 3  # it rests then
    assert recorder.state.workers[0].commits >= 5


def test_bad_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="staleness = -1"):
        Ssp(staleness=-1)
    with pytest.raises(ConfigError, match="server_learning_rate = 0"):
        Ssp(server_learning_rate=0)


def test_who_pulls_only_when_it_leads_goes_on_from_its_own_model() -> None:
    # Steps of 1 s and 3 s, s = 1: worker 0 leads by s at each of its commits, worker 1 never does.
    recorder = Recorder()
    strategy = Ssp(staleness=1, pull="blocked", loop=loop(recorder))
    with toy_grid(2, node_configs=speeds(1, 3)) as grid:
        result = run_toy(strategy, grid, rounds=3, lr=0.5)
    order = [record["worker"] for record in recorder.of("commit")]
    assert order == [0, 0, 1, 0, 1, 0, 1]
    w, own = 0.0, {0: 0.0, 1: 0.0}
    waits = False
    for worker in order:
        step = -0.5 * (own[worker] - (worker + 1))
        w += 0.5 * step
        own[worker] += step
        if worker == 0:
            own[0] = w
        if waits:
            own[0] = w  # it is let go by worker 1's commit, and reads what that made
        waits = worker == 0 and own[0] is w
    assert weight(result.arrays) == pytest.approx(w, rel=1e-12)
    versions = [record["version"] for record in recorder.of("commit") if record["worker"] == 1]
    assert versions == [0, 0, 0]  # it never pulled
    workers = recorder.state.workers
    assert workers[1].bytes_down == workers[0].bytes_down / 4


def test_pull_is_one_of_two() -> None:
    with pytest.raises(ConfigError, match="pull 'never'"):
        Ssp(pull="never")
