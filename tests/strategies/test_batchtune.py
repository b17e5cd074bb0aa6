import numpy as np
import pytest
from flower_adsp.strategies import BatchTune, Bsp, LoopOptions
from flower_adsp.strategies.batchtune import tuned_batch_sizes
from hypothesis import given
from hypothesis import strategies as st

from flower_adsp.network import Network
from tests.conftest import Recorder, run_toy, toy_grid, weight


@given(st.integers(1, 256), st.lists(st.floats(0.01, 100), min_size=1, max_size=40))
def test_sizes_follow_speeds_and_keep_the_total(batch_size: int, speeds: list[float]) -> None:
    sizes = tuned_batch_sizes(batch_size, speeds)
    assert min(sizes) >= 1
    ideal = batch_size * len(speeds) * np.asarray(speeds) / sum(speeds)
    assert all(
        size in (1, int(each), int(each + 1e-6)) for size, each in zip(sizes, ideal, strict=True)
    )
    assert sum(size for size in sizes if size > 1) <= batch_size * len(speeds) + 1e-6


def test_sizes_by_hand() -> None:
    assert tuned_batch_sizes(32, [1, 1, 2, 4]) == [16, 16, 32, 64]
    assert tuned_batch_sizes(8, [1, 1, 1]) == [8, 8, 8]
    assert tuned_batch_sizes(2, [1, 100]) == [1, 3]


@pytest.mark.parametrize("tau", [1, 3])
def test_with_equal_devices_it_is_bsp(tau: int) -> None:
    results = []
    for strategy in (BatchTune(tau), Bsp(tau)):
        with toy_grid(3) as grid:
            results.append(weight(run_toy(strategy, grid, rounds=4, lr=0.2).arrays))
    assert results[0] == results[1]


def test_unequal_devices_arrive_together() -> None:
    recorder = Recorder()
    loop = LoopOptions(network=Network(0.0), callbacks=[recorder])
    configs = [{"seconds_per_sample": seconds} for seconds in (0.1, 0.2, 0.4)]
    with toy_grid(3, overrides="task.batch_size=14 task.examples=40", node_configs=configs) as grid:
        run_toy(BatchTune(loop=loop), grid, rounds=2)
    # 42·(4 : 2 : 1)/7: 24, 12 and 6 examples, all in 2.4 s.
    assert [record["t"] for record in recorder.of("commit")] == pytest.approx([2.4] * 3 + [4.8] * 3)
    assert all(worker.blocked == 0 for worker in recorder.state.workers.values())
