"""SoCFlow: its schedule, its groups, and what they come to where they are one or all."""

import json
from collections.abc import Callable
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flower_adsp.strategies import Bsp, LoopOptions, Socflow
from flower_adsp.strategies.socflow import interval_at
from flwr.app import ArrayRecord, ConfigRecord

from flower_adsp.arrays import decode
from flower_adsp.client_app import app
from flower_adsp.errors import ConfigError
from flower_adsp.network import Network
from flower_adsp.sparse.plan import LayerPlanner
from flower_adsp.tasks.images import DigitsMlp
from flower_adsp.tasks.sequences import MnistLstm
from flower_adsp.tasks.validation import Validation
from flower_adsp.testing import InProcessGrid
from tests.conftest import Recorder, run_toy, toy_grid, weight

# For a model of 8 bytes: 1 s either way.
WITH_PLAN = {
    "plan": LayerPlanner(task=DigitsMlp(0)), "validation": Validation(DigitsMlp(0))
}  # fmt: skip
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


@pytest.mark.parametrize(("takes_turns", "cycle"), [(False, 16.0), (True, 12.0)])
def test_groups_of_one_site_take_turns_on_the_way_to_the_server(
    takes_turns: bool, cycle: float
) -> None:
    """The site carries one device at a time: a group's two members take 2 s each way, computing 8.

    Where both groups share it, all four take 4 s each way.
    """
    configs = [{**LINK, "seconds_per_sample": 8.0, "site": "a"}] * 4
    network = {"overhead_s": None, "site_up_mbps": 64e-6, "site_down_mbps": 64e-6}
    final, recorder, strategy = run(
        configs, 1, "task.examples=40", network=network, num_groups=2, takes_turns=takes_turns
    )
    assert strategy.groups == [[0, 1], [2, 3]]
    ends = [record["t"] for record in recorder.of("commit") if record["worker"] == 0]
    assert ends[-1] - ends[-2] == pytest.approx(cycle, abs=1e-5)
    other = run(
        configs, 1, "task.examples=40", network=network, num_groups=2, takes_turns=not takes_turns
    )
    assert final == other[0]  # only time differs


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


# --------------------------------------------------------------------------------- mixed precision


def digits(
    rounds: int,
    devices: list[dict[str, Any]],
    overrides: str = "",
    lr: float = 0.2,
    loop: LoopOptions | None = None,
    task: Any = None,
    **options: Any,
) -> tuple[Any, Recorder, Socflow]:
    """Run on digits, with one group and an interval of an epoch unless told otherwise."""
    recorder = Recorder()
    task = task or DigitsMlp(0)
    loop = loop or LoopOptions(network=Network(overhead_s=1.0))
    loop = replace(loop, callbacks=[recorder])
    settings = {"num_groups": 1, "interval": 1.0, "validation": Validation(task), **options}
    strategy = Socflow(**settings, loop=loop)
    config = {"task": "digits-mlp", "devices": "uniform", "overrides": overrides}
    with InProcessGrid(app, len(devices), config, node_configs=devices) as grid:
        result = strategy.start(
            grid,
            ArrayRecord(task.build_model().state_dict()),
            num_rounds=rounds,
            train_config=ConfigRecord({"lr": lr}),
        )
    return result, recorder, strategy


def bits(result: Any) -> dict[str, bytes]:
    return {name: array.numpy().tobytes() for name, array in result.arrays.items()}


def accuracy(result: Any) -> float:
    task = DigitsMlp(0)
    model = task.build_model()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    return task.metrics(model, task.held_out_data("test"))["accuracy"]


SOC = {"seconds_per_sample": 0.0625, "npu_speedup": 3.0}  # a step of 16 examples takes 1 s


def test_mixed_precision_learns_as_fp32_does_and_is_reproducible() -> None:
    options = {"devices": [SOC] * 2, "num_groups": 2, "lr": 0.5}
    (fp32, before, _), (mixed, after, _), (again, _, _) = (
        digits(5, mixed_precision=is_mixed, **options) for is_mixed in (False, True, True)
    )
    assert bits(mixed) == bits(again)
    assert bits(mixed) != bits(fp32)
    assert accuracy(mixed) > 0.8
    assert abs(accuracy(mixed) - accuracy(fp32)) < 0.05
    assert after.of("checkpoint")[-1]["t"] < 0.8 * before.of("checkpoint")[-1]["t"]


@pytest.mark.parametrize(
    ("speedup", "share"),
    [(3.0, None), (0.25, 0.8), (None, 1.0)],
)
def test_a_step_takes_the_longer_of_both_parts(speedup: float | None, share: float | None) -> None:
    """Of a speed-up of 3, e^−α in FP32 and the rest at 3 times the speed; of 1/4, 4/5 and 1/5."""
    device = {"seconds_per_sample": 0.0625}
    if speedup is not None:
        device["npu_speedup"] = speedup
    _, recorder, _ = digits(1, [device] * 2, mixed_precision=True)
    first, *_ = recorder.of("commit")
    alpha = Validation(DigitsMlp(0)).similarity(initial_weights())
    gamma = exp(-alpha) if share is None else share
    assert gamma >= exp(-1)
    expected = max(gamma, (1 - gamma) / (speedup or 1.0))
    assert first["trained"] - first["started"] == pytest.approx(expected, abs=1e-6)
    if share is None:
        assert 0.36 < expected < 0.38


def initial_weights() -> Any:
    return decode(ArrayRecord(DigitsMlp(0).build_model().state_dict()))


def test_devices_without_an_npu_train_as_ever() -> None:
    devices = [{"seconds_per_sample": 0.0625}] * 3
    plain, before, _ = digits(2, devices)
    mixed, after, _ = digits(2, devices, mixed_precision=True)
    assert bits(plain) == bits(mixed)
    assert [r["t"] for r in before.of("commit")] == [r["t"] for r in after.of("commit")]
    assert after.of("checkpoint")[-1]["fp32_share"] == 1.0


def test_alpha_is_measured_before_each_epoch_of_each_group() -> None:
    """Groups that are averaged each two epochs measure their own model in between."""
    measured: list[float] = []

    class Watched(Validation):
        def similarity(self, weights: Any) -> float:
            measured.append(super().similarity(weights))
            return measured[-1]

    options = {"devices": [SOC] * 2, "num_groups": 2, "mixed_precision": True}
    validation = Watched(DigitsMlp(0))
    _, recorder, strategy = digits(2, interval=2.0, validation=validation, **options)
    # At first; before the second epoch of each; after averaging; twice; after averaging.
    assert len(measured) == 1 + 2 + 1 + 2 + 1
    assert measured[1] != measured[2]
    last = recorder.of("checkpoint")[-1]
    assert last["alpha"] == measured[-1]
    assert last["fp32_share"] == pytest.approx(exp(-measured[-1]))
    assert strategy.describe()["mixed_precision"] is True
    measured.clear()
    digits(4, interval=0.25, validation=validation, **options)
    assert len(measured) == 2


def test_where_int8_is_of_no_use_nothing_is_trained_in_it() -> None:
    class Useless(Validation):
        def similarity(self, weights: Any) -> float:
            return -0.25

    validation = Useless(DigitsMlp(0))
    plain, *_ = digits(1, [SOC] * 2)
    mixed, *_ = digits(1, [SOC] * 2, mixed_precision=True, validation=validation)
    assert bits(plain) == bits(mixed)


def test_mini_batches_are_by_the_speed_with_the_npu() -> None:
    """γ = e^−α, so a device with an NPU that is fast takes 0.368 of the time for an example."""
    devices = [{"seconds_per_sample": 0.0625}, {**SOC, "npu_speedup": 9.0}]
    _, recorder, strategy = digits(1, devices, mixed_precision=True, rebalances=True)
    assert 31 <= sum(strategy._batch_sizes.values()) <= 32  # each is rounded down
    assert strategy._batch_sizes[1] / strategy._batch_sizes[0] == pytest.approx(2.7, abs=0.3)
    spans = [r["trained"] - r["started"] for r in recorder.of("commit")[:2]]
    assert spans[0] == pytest.approx(spans[1], rel=0.1)


def test_the_settings_of_a_run_ask_for_it(run_folder: Callable[..., Path]) -> None:
    asked = "strategy.num_groups=2 strategy.mixed_precision=true run.num_rounds=2"
    options = {"strategy": "socflow", "devices": "soc-cluster", "tracking.progress": "off"}
    folder = run_folder("run", overrides=asked, **options)
    events = [json.loads(line) for line in (folder / "history.jsonl").open()]
    shares = [event["fp32_share"] for event in events if event["event"] == "checkpoint"]
    assert len(shares) == 2
    assert all(0.36 < share < 0.38 for share in shares)
    with pytest.raises(ConfigError, match=r"train\.momentum = 0\.9 .* 0 with strategy\.mixed"):
        run_folder("other", overrides=f"{asked} train.momentum=0.9", **options)
    with pytest.raises(ConfigError, match="layer 'lstm' is a LSTM"):
        run_folder("third", overrides=asked, **options, task="mnist-lstm")


# --------------------------------------------------------------------------------- number of groups


class Collapsing(Validation):
    """Says that beyond some number of groups nothing is learnt."""

    def __init__(self, task: Any, most: int) -> None:
        super().__init__(task)
        self.most = most
        self.seen: list[Any] = []

    def accuracy(self, weights: Any) -> float:
        self.seen.append({name: array.copy() for name, array in weights.items()})
        number = 2 ** (len(self.seen) - 1)
        return 0.6 if number <= self.most else 0.12


@pytest.mark.parametrize(("most", "kept", "trials"), [(1, 1, 2), (2, 2, 3), (8, 4, 3)])
def test_numbers_of_groups_are_tried_for_an_epoch_each(most: int, kept: int, trials: int) -> None:
    validation = Collapsing(DigitsMlp(0), most)
    devices = [{"seconds_per_sample": 0.0625}] * 4
    _, recorder, strategy = digits(2, devices, num_groups=None, validation=validation)
    assert len(validation.seen) == trials
    assert len(strategy.groups) == kept
    assert sorted(id_ for ids in strategy.groups for id_ in ids) == [0, 1, 2, 3]
    epoch = strategy._rounds_an_epoch
    # A step takes 1 s, and the exchange another; the trials' time counts, their rounds do not.
    ends = [record["t"] for record in recorder.of("checkpoint")]
    assert ends == pytest.approx([2.0 * epoch * (trials + 1), 2.0 * epoch * (trials + 2)])
    assert [record["num_groups"] for record in recorder.of("checkpoint")] == [kept, kept]
    assert recorder.of("checkpoint")[0]["epochs"] == 1.0


def test_after_the_trials_the_run_is_one_from_the_initial_model() -> None:
    """With all of a device's examples in each mini-batch, it ends as a run without trials does."""
    devices = [{"seconds_per_sample": 0.0625}] * 4
    overrides = "task.batch_size=324"  # what each has: only their order differs
    validation = Collapsing(DigitsMlp(0), 2)
    tried, _, _ = digits(3, devices, overrides, num_groups=None, validation=validation)
    given, _, _ = digits(3, devices, overrides, num_groups=2)
    start = initial_weights()
    for name, array in given.arrays.items():
        np.testing.assert_allclose(tried.arrays[name].numpy(), array.numpy(), atol=1e-6)
        assert np.abs(array.numpy() - start[name]).max() > 1e-3
    # Each trial began from there too.
    first, second, _ = validation.seen
    for name, array in first.items():
        np.testing.assert_allclose(array, second[name], atol=1e-6)


def test_on_real_data_it_is_the_accuracy_that_decides() -> None:
    """In an epoch all numbers of groups learn, so all are tried; at a tiny rate one does not."""
    devices = [{"seconds_per_sample": 0.0625}] * 8
    _, _, strategy = digits(1, devices, num_groups=None, lr=0.5)
    assert len(strategy._accuracies) == 4
    assert min(strategy._accuracies) > 0.3
    assert len(strategy.groups) == 8
    _, _, none = digits(1, devices, num_groups=None, lr=1e-6)
    assert len(none._accuracies) == 1
    assert none._accuracies[0] < 0.15
    assert len(none.groups) == 1


def test_one_that_is_away_at_the_end_of_a_trial_brings_nothing_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrived: list[tuple[int, bool]] = []
    arrive = Socflow._arrive

    def watched(strategy: Socflow, worker: Any, commit: Any) -> bool:
        arrived.append((worker.id, commit is not None))
        return arrive(strategy, worker, commit)

    monkeypatch.setattr(Socflow, "_arrive", watched)
    configs: list[dict[str, Any]] = [{"seconds_per_sample": 0.0625, "site": "a"}] * 2
    configs += [{**configs[0], "site": "b", "available_s": 40.5, "away_s": 300.0}] * 2
    validation = Collapsing(DigitsMlp(0), 2)
    loop = LoopOptions(network=Network(overhead_s=1.0), seed=3, deadline_factor=None)
    _, recorder, strategy = digits(12, configs, num_groups=None, validation=validation, loop=loop)
    assert recorder.of("away")
    assert recorder.of("back")
    assert len(strategy.groups) == 2
    assert not strategy._late
    assert not recorder.of("refused")
    ignored = [id_ for id_, counts in arrived if not counts]
    assert ignored
    assert set(ignored) <= {2, 3}
    assert all((id_, True) in arrived[arrived.index((id_, False)) :] for id_ in ignored)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"num_groups": 0}, "num_groups"),
        ({"local_steps": 0}, "local_steps"),
        ({"interval": 0.0}, "interval"),
        ({"mapping": "best"}, "mapping"),
        ({"mixed_precision": True}, "mixed_precision = True .* without `validation`"),
        ({"num_groups": None}, "num_groups = None .* without `validation`"),
        (
            {"mixed_precision": True, **WITH_PLAN},
            "mixed_precision = True .* false with a layer plan",
        ),
        ({"num_groups": None, **WITH_PLAN}, "num_groups = None .* a number with a layer plan"),
        ({"mixed_precision": True, "validation": Validation(MnistLstm(0))}, "layer 'lstm'"),
    ],
)
def test_what_is_not_allowed_is_refused(arguments: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        Socflow(**arguments)


def test_more_groups_than_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_groups = 5"):
        run([{}] * 4, 1, num_groups=5)
