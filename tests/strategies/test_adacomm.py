import pytest
from flower_adsp.strategies import Adacomm, FixedAdacomm, LoopOptions
from flower_adsp.strategies.adacomm import next_local_steps
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import FedAvg

from flower_adsp.errors import ConfigError
from flower_adsp.network import Network
from tests.conftest import Recorder, run_toy, toy_arrays, toy_grid, weight


@pytest.mark.parametrize(
    ("current", "first", "loss", "first_loss", "expected"),
    [
        (40, 40, 0.25, 1.0, 20),  # sqrt(1/4)·40
        (40, 40, 0.30, 1.0, 22),  # rounded up
        (20, 40, 0.25, 1.0, 10),  # 20 is not below 20: halved
        (5, 40, 0.9, 1.0, 3),  # 38 is not below 5: halved and rounded up
        (1, 40, 0.9, 1.0, 1),
        (40, 40, 2.0, 1.0, 20),  # the loss has risen
        (7, 40, 0.0, 1.0, 1),
    ],
)
def test_the_rule(current: int, first: int, loss: float, first_loss: float, expected: int) -> None:
    assert next_local_steps(current, first, loss, first_loss) == expected


@pytest.mark.parametrize("growth", [0, 5])
@pytest.mark.parametrize("tau", [1, 4])
def test_fixed_adacomm_is_fedavg_with_as_many_local_steps(tau: int, growth: int) -> None:
    overrides = f"task.growth={growth}"
    loop = LoopOptions(weighting="examples")
    with toy_grid(3, overrides=overrides) as grid:
        ours = run_toy(FixedAdacomm(tau, loop=loop), grid, rounds=4, lr=0.25)
    config = ConfigRecord({"lr": 0.25, "local-steps": tau})
    with toy_grid(3, overrides=overrides) as grid:
        theirs = FedAvg(fraction_evaluate=0.0).start(
            grid, toy_arrays(), num_rounds=4, train_config=config
        )
    assert weight(ours.arrays) == pytest.approx(weight(theirs.arrays), rel=1e-12)


def test_local_steps_fall_by_the_evaluated_loss() -> None:
    losses = iter([4.0, 4.0, *[1.0] * 20])

    def evaluate(index: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"loss": next(losses)})

    recorder = Recorder()
    loop = LoopOptions(network=Network(0.0), evaluate_every=3.0, callbacks=[recorder])
    # Steps of 1 s: barriers at 8, then τ is changed at the first barrier after each 10 s.
    with toy_grid(2, node_configs=[{"seconds_per_sample": 1.0}] * 2) as grid:
        run_toy(Adacomm(8, interval=10.0, loop=loop), grid, rounds=3, evaluate_fn=evaluate)
    steps = [record["local_steps"] for record in recorder.of("checkpoint")]
    times = [record["t"] for record in recorder.of("checkpoint")]
    # At 8 s no interval is over; at 16 s the loss is a quarter: τ = 4; at 20 s it is halved.
    assert times == [8, 16, 20]
    assert steps == [8, 4, 2]


def test_without_evaluation_the_training_loss_decides() -> None:
    recorder = Recorder()
    loop = LoopOptions(network=Network(0.0), callbacks=[recorder])
    with toy_grid(2, node_configs=[{"seconds_per_sample": 1.0}] * 2) as grid:
        run_toy(Adacomm(8, interval=8.0, loop=loop), grid, rounds=4, lr=0.3)
    steps = [record["local_steps"] for record in recorder.of("checkpoint")]
    assert steps[0] == 4  # √(F/F0) is 1 after one barrier: halved
    assert steps == sorted(steps, reverse=True)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="interval = 0"):
        Adacomm(interval=0)
    with pytest.raises(ConfigError, match="local_steps = 0"):
        FixedAdacomm(0)
