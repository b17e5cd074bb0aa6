"""SoCFlow: its schedule, its groups, and what they come to where they are one or all."""

from typing import Any

import numpy as np
import pytest
from flower_adsp.strategies import Bsp, LoopOptions, Socflow
from flower_adsp.strategies.socflow import interval_at
from flwr.app import ArrayRecord, ConfigRecord

from flower_adsp.client_app import app
from flower_adsp.errors import ConfigError
from flower_adsp.network import Network
from flower_adsp.tasks.images import DigitsMlp
from flower_adsp.testing import InProcessGrid
from tests.conftest import Recorder, run_toy, toy_grid, weight

# For a model of 8 bytes: 1 s either way.
LINK = {"seconds_per_sample": 1.0, "latency_s": 0.0, "up_mbps": 64e-6, "down_mbps": 64e-6}


def run(
    configs: list[dict[str, Any]], rounds: int, overrides: str = "", **options: Any
) -> tuple[float, Recorder, Socflow]:
    recorder = Recorder()
    network = Network(**options.pop("network", {"overhead_s": 1.0}))
    loop = LoopOptions(network=network, callbacks=[recorder], **options.pop("loop", {}))
    strategy = Socflow(**{"interval": 1.0, **options}, loop=loop)
    overrides = overrides or "task.examples=5"  # of which a device keeps one
    with toy_grid(len(configs), node_configs=configs, overrides=overrides) as grid:
        result = run_toy(strategy, grid, rounds)
    return weight(result.arrays), recorder, strategy


def test_the_interval_doubles_each_ten_epochs_up_to_two() -> None:
    epochs = (0, 9, 10, 19, 20, 29, 30, 31, 1000)
    assert [interval_at(e) for e in epochs] == [0.25, 0.25, 0.5, 0.5, 1, 1, 2, 2, 2]


def test_the_schedule_is_followed() -> None:
    """An epoch is four steps, so the groups are averaged after each step for ten epochs."""
    _, recorder, _ = run([{}] * 2, 50, num_groups=2, interval=None)
    epochs = [record["epochs"] for record in recorder.of("checkpoint")]
    assert epochs[:3] == [0.25, 0.5, 0.75]
    assert epochs[39:42] == [10.0, 10.5, 11.0]


@pytest.mark.parametrize("weighting", ["equal", "examples"])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_one_group_is_synchronous_sgd_to_the_bit(local_steps: int, weighting: str) -> None:
    initial = ArrayRecord(DigitsMlp(0).build_model().state_dict())
    settings = {"task": "digits-mlp", "devices": "adsp-ec2"}

    def final(make: Any, rounds: int) -> Any:
        with InProcessGrid(app, 5, settings) as grid:
            strategy = make(LoopOptions(weighting=weighting))
            return strategy, strategy.start(
                grid, initial, num_rounds=rounds, train_config=ConfigRecord({"lr": 0.2})
            )

    socflow, grouped = final(lambda loop: Socflow(1, local_steps, 0.25, loop=loop), 3)
    steps = socflow._synchronised
    _, plain = final(lambda loop: Bsp(local_steps, loop=loop), steps)
    assert steps >= 3
    for name, array in plain.arrays.items():
        assert array.numpy().tobytes() == grouped.arrays[name].numpy().tobytes(), name
        assert np.abs(array.numpy() - initial[name].numpy()).max() > 0


@pytest.mark.parametrize("weighting", ["equal", "examples"])
def test_groups_of_one_that_train_an_epoch_are_fedavg(weighting: str) -> None:
    options = {"loop": {"weighting": weighting}, "num_groups": 3, "local_steps": 4}
    ours, _, _ = run([{}] * 3, 5, **options)
    with toy_grid(3, overrides="task.examples=5") as grid:
        theirs = run_toy(Bsp(4, loop=LoopOptions(weighting=weighting)), grid, 5)
    assert ours == pytest.approx(weight(theirs.arrays), rel=1e-12)
    assert abs(ours) > 0.5


def test_two_groups_by_hand() -> None:
    """Workers 1, 2 | 3, 4; each aims at its number, and an epoch is four steps of rate 0.5."""
    final, recorder, strategy = run([{}] * 4, 2, num_groups=2)
    assert strategy.groups == [[0, 1], [2, 3]]
    w = 0.0
    for _ in range(2):
        models = [w, w]
        for _ in range(4):
            models = [a - 0.5 * (a - b) for a, b in zip(models, (1.5, 3.5), strict=True)]
        w = sum(models) / 2
    assert final == pytest.approx(w, rel=1e-12)
    assert len(recorder.of("commit")) == 2 * 4 * 4
    # What is shown between is the mean of the groups as they are.
    assert len(recorder.of("checkpoint")) == 2


def test_a_group_waits_for_its_own_only() -> None:
    configs = [
        {"seconds_per_sample": s, "site": site}
        for s, site in zip((1, 1, 5, 5), "aabb", strict=True)
    ]
    _, recorder, _ = run(configs, 1, num_groups=2)
    times = {
        group: [r["t"] for r in recorder.of("commit") if r["worker"] in group]
        for group in ((0, 1), (2, 3))
    }
    assert times[0, 1] == [t for t in (2.0, 4.0, 6.0, 8.0) for _ in range(2)]
    assert times[2, 3] == [t for t in (6.0, 12.0, 18.0, 24.0) for _ in range(2)]
    assert recorder.of("checkpoint")[0]["t"] == 24.0


def test_mini_batches_by_speed_and_updates_by_mini_batches() -> None:
    configs = [{"seconds_per_sample": s} for s in (1.0, 3.0)]
    final, recorder, _ = run(
        configs, 1, "task.batch_size=4 task.examples=8", num_groups=1, rebalances=True
    )
    spans = [r["trained"] - r["started"] for r in recorder.of("commit")]
    assert spans == [6.0] * len(spans)  # 6 examples of one second, 2 of three
    aim = (6 * 1 + 2 * 2) / 8
    w = 0.0
    for _ in range(len(spans) // 2):
        w -= 0.5 * (w - aim)
    assert final == pytest.approx(w, rel=1e-12)


# ---------------------------------------------------------------------------- time over the network


def exchanged(record: Any) -> list[float]:
    return [record[key] for key in ("released", "started", "trained", "t")]


def test_a_ring_in_each_group_by_hand() -> None:
    """Two hops of half the model each: 0.5 s, and the latency of both devices once."""
    configs = [{**LINK, "latency_s": 0.125, "site": "a"}] * 4
    network = {"collective": "ring", "site_up_mbps": 1e-9, "site_down_mbps": 1e-9}
    _, recorder, _ = run(configs, 1, network=network, num_groups=2)
    first, *_ = recorder.of("commit")
    assert exchanged(first) == [0.0, 0.75, 1.75, 2.5]
    ends = [record["t"] for record in recorder.of("commit")]
    assert ends == [2.5 * step for step in (1, 2, 3, 4) for _ in range(4)]


def test_groups_that_are_averaged_take_a_ring_of_one_of_each_and_pass_it_on() -> None:
    configs = [{**LINK, "site": site} for site in "aabb"]
    network = {"collective": "ring", "site_up_mbps": 32e-6, "site_down_mbps": 32e-6}
    _, recorder, strategy = run(configs, 2, network=network, num_groups=2, local_steps=4)
    assert strategy.groups == [[0, 1], [2, 3]]
    commits = recorder.of("commit")
    assert exchanged(commits[0]) == [0.0, 0.5, 4.5, 5.0]
    # Half the model there and back between sites at 32e-6 Mbit/s, 2 s; then 1 s in the groups.
    assert exchanged(commits[-1]) == [8.0, 8.5, 12.5, 13.0]


@pytest.mark.parametrize(("takes_turns", "cycle"), [(False, 8.0), (True, 6.0)])
def test_groups_in_each_others_way_take_turns(takes_turns: bool, cycle: float) -> None:
    """Both are split over the same two sites; an exchange alone takes 1 s each way.

    Where they share, both take twice as long, computing 4 s; where they take turns, one exchanges
    while the other computes.
    """
    configs = [{**LINK, "seconds_per_sample": 4.0, "site": site} for site in "abab"]
    network = {"collective": "ring", "site_up_mbps": 32e-6, "site_down_mbps": 32e-6}
    _, recorder, strategy = run(
        configs, 1, "task.examples=40", network=network, num_groups=2,
        mapping="sequential", takes_turns=takes_turns,
    )  # fmt: skip
    assert strategy.groups == [[0, 1], [2, 3]]
    ends = [record["t"] for record in recorder.of("commit") if record["worker"] == 0]
    assert ends[-1] - ends[-2] == pytest.approx(cycle, abs=1e-5)


def test_only_a_ring_takes_the_place_of_the_star() -> None:
    with pytest.raises(ConfigError, match="binary-trees"):
        run([LINK] * 2, 1, network={"collective": "binary-trees"}, num_groups=1)


# ------------------------------------------------------------------------------- who comes and goes


def test_a_group_that_is_taken_away_is_not_waited_for_and_comes_back() -> None:
    away = {"available_s": 10.5, "away_s": 60.0}
    configs: list[dict[str, Any]] = [{"site": "a"}] * 2 + [{"site": "b", **away}] * 2
    final, recorder, _ = run(configs, 30, num_groups=2, loop={"seed": 3, "min_available_nodes": 4})
    gone = [r["t"] for r in recorder.of("away")]
    back = [r["t"] for r in recorder.of("back")]
    assert gone
    assert back
    while_away = [r for r in recorder.of("checkpoint") if max(gone[:2]) < r["t"] < min(back)]
    assert len(while_away) > 2
    after = [r["worker"] for r in recorder.of("commit") if r["t"] > max(back[:2])]
    assert {0, 1, 2, 3} <= set(after)
    assert 1.0 < final < 4.0


def test_one_that_joins_comes_into_the_smallest_group_of_its_site() -> None:
    strategy = Socflow(num_groups=2, loop=LoopOptions())
    _, _, used = run([{"site": site} for site in "aaab"], 1, num_groups=2)
    strategy.state = used.state
    strategy.groups = [[0, 1], [2]]
    strategy.joined(used.state.workers[3])
    assert strategy.groups == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"num_groups": 0}, "num_groups"),
        ({"local_steps": 0}, "local_steps"),
        ({"interval": 0.0}, "interval"),
        ({"mapping": "best"}, "mapping"),
    ],
)
def test_what_is_not_allowed_is_refused(arguments: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        Socflow(**arguments)


def test_more_groups_than_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_groups = 5"):
        run([{}] * 4, 1, num_groups=5)
