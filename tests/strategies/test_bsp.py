import numpy as np
import pytest
from flower_adsp.strategies import Bsp, LoopOptions
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp.strategy import FedAvg

from flower_adsp.client_app import app
from flower_adsp.network import Network
from flower_adsp.tasks.images import DigitsMlp
from flower_adsp.testing import InProcessGrid
from tests.conftest import Recorder, run_toy, spoil, toy_grid, weight


def barrier_by_hand(workers: int, rounds: int, lr: float, shares: list[float]) -> float:
    w = 0.0
    for _ in range(rounds):
        w += sum(
            share * -lr * (w - (worker + 1))
            for worker, share in zip(range(workers), shares, strict=True)
        )
    return w


@pytest.mark.parametrize("weighting", ["equal", "examples"])
def test_bsp_is_the_mean_at_a_barrier(weighting: str) -> None:
    strategy = Bsp(loop=LoopOptions(weighting=weighting))
    with toy_grid(3, overrides="task.examples=10 task.growth=10") as grid:
        result = run_toy(strategy, grid, rounds=5, lr=0.5)
    shares = [1 / 3] * 3 if weighting == "equal" else [1 / 6, 2 / 6, 3 / 6]
    assert weight(result.arrays) == pytest.approx(barrier_by_hand(3, 5, 0.5, shares), rel=1e-12)


@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_bsp_equals_flower_s_fedavg_with_as_many_local_steps(local_steps: int, seed: int) -> None:
    run_config = {"task": "digits-mlp", "seed": seed}
    initial = ArrayRecord(DigitsMlp(seed).build_model().state_dict())
    with InProcessGrid(app, 5, run_config) as grid:
        ours = Bsp(local_steps, loop=LoopOptions(weighting="examples")).start(
            grid, initial, num_rounds=6, train_config=ConfigRecord({"lr": 0.2})
        )
    with InProcessGrid(app, 5, run_config) as grid:
        theirs = FedAvg(fraction_evaluate=0.0, min_train_nodes=5, min_available_nodes=5).start(
            grid,
            initial,
            num_rounds=6,
            train_config=ConfigRecord({"lr": 0.2, "local-steps": local_steps}),
        )
    moved = 0.0
    for name, array in theirs.arrays.items():
        np.testing.assert_allclose(ours.arrays[name].numpy(), array.numpy(), atol=2e-6)
        moved = max(moved, float(np.abs(array.numpy() - initial[name].numpy()).max()))
    assert moved > 0.01


def test_the_model_does_not_depend_on_speeds_and_links() -> None:
    def run(devices: str, overhead: float | None) -> float:
        strategy = Bsp(loop=LoopOptions(network=Network(overhead)))
        with toy_grid(6, devices=devices) as grid:
            return weight(run_toy(strategy, grid, rounds=4).arrays)

    assert run("uniform", None) == run("adsp-ec2", 3.0)


def test_a_barrier_takes_as_long_as_its_slowest_worker() -> None:
    recorder = Recorder()
    loop = LoopOptions(network=Network(1.0), callbacks=[recorder])
    configs = [{"seconds_per_sample": seconds} for seconds in (1.0, 2.0, 5.0)]
    with toy_grid(3, node_configs=configs) as grid:
        run_toy(Bsp(local_steps=2, loop=loop), grid, rounds=3)
    assert [record["t"] for record in recorder.of("checkpoint")] == [11.0, 22.0, 33.0]
    blocked = [worker.spent(33_000_000)[2] for worker in recorder.state.workers.values()]
    assert blocked == [24_000_000, 18_000_000, 0]


def test_a_refused_commit_does_not_hold_the_barrier() -> None:
    recorder = Recorder()

    def damage(reply: Message) -> Message:
        if reply.metadata.src_node_id == 1001:
            reply.content["metrics"]["train-loss"] = float("nan")
        return reply

    loop = LoopOptions(callbacks=[recorder])
    with toy_grid(3, client_app=spoil(app, damage)) as grid:
        result = run_toy(Bsp(loop=loop), grid, rounds=4, lr=0.5)
    assert [record["worker"] for record in recorder.of("refused")] == [1] * 3  # it rests then
    w = 0.0
    for _ in range(4):
        w += sum(-0.5 * (w - target) for target in (1, 3)) / 2
    assert weight(result.arrays) == pytest.approx(w, rel=1e-12)


def test_when_all_commits_are_refused_the_model_stays() -> None:
    recorder = Recorder()

    def damage(reply: Message) -> Message:
        del reply.content["metrics"]
        return reply

    with toy_grid(2, client_app=spoil(app, damage)) as grid:
        result = run_toy(Bsp(loop=LoopOptions(callbacks=[recorder])), grid, rounds=3)
    assert weight(result.arrays) == 0.0
    assert recorder.of("end")[0]["version"] == 0
    assert len(recorder.of("refused")) == 6
