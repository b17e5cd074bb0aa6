"""Layer plans under the strategies."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flower_adsp.strategies import (
    Adsp,
    AdspOverlap,
    Bsp,
    CommitStrategy,
    FedAsync,
    FedBuff,
    FedCompass,
    FixedAdacomm,
    LoopOptions,
    Socflow,
    Ssp,
)
from flower_adsp.strategies.coverage import Coverage, mean_over_trainers
from flwr.app import Array, ArrayRecord, ConfigRecord, Message

from flower_adsp.arrays import Weights, decode, weighted_mean
from flower_adsp.client_app import app
from flower_adsp.errors import ConfigError
from flower_adsp.messages import Commit
from flower_adsp.network import Network
from flower_adsp.sparse.plan import LayerPlan, LayerPlanner, Member, WorkerPlan
from flower_adsp.sparse.portions import WHOLE, Portion, Slice
from flower_adsp.testing import InProcessGrid
from tests.conftest import Recorder, spoil
from tests.sparse.models import SmallTask

TASK = "task.target=tests.sparse.models:build"
LAYERS = "train.layers=memory-true"


class Given(LayerPlanner):
    """A planner that plans what it is told."""

    def __init__(
        self, task: SmallTask, choices: Sequence[Mapping[int, float]], **more: Any
    ) -> None:
        super().__init__(task, **more)
        self.choices = choices

    def _cover(self, *_: Any) -> Any:
        from flower_adsp.sparse.planner import Cover

        return Cover(tuple(dict(choice) for choice in self.choices))


EVERYTHING = dict.fromkeys(range(5), 1.0)


def run(
    strategy: CommitStrategy, workers: int, overrides: str = "", client: Any = app
) -> tuple[Weights, Recorder]:
    config = {"overrides": f"{TASK} {overrides}".strip(), "devices": "uniform"}
    speeds = [{"seconds_per_sample": 0.25 * (1 + worker)} for worker in range(workers)]
    recorder = Recorder()
    object.__setattr__(strategy.loop, "callbacks", [recorder])
    with InProcessGrid(client, workers, config, node_configs=speeds) as grid:
        arrays = ArrayRecord(SmallTask().build_model().state_dict())
        result = strategy.start(grid, arrays, num_rounds=2, train_config=ConfigRecord({"lr": 0.1}))
    assert result.arrays is not None
    return decode(result.arrays), recorder


def options(planner: LayerPlanner | None = None, **more: Any) -> LoopOptions:
    return LoopOptions(network=Network(0.5), planner=planner, **more)


STRATEGIES = {
    "bsp": lambda loop: Bsp(2, loop=loop),
    "fixed-adacomm": lambda loop: FixedAdacomm(3, loop=loop),
    "adsp": lambda loop: Adsp(6.0, 2, loop=loop),
    "adsp with momentum": lambda loop: Adsp(6.0, 2, server_momentum=0.5, loop=loop),
    "adsp-overlap": lambda loop: AdspOverlap(6.0, 2, loop=loop),
    "ssp": lambda loop: Ssp(2, loop=loop),
    "fedasync": lambda loop: FedAsync(2, check_period=5.0, loop=loop),
    "fedbuff": lambda loop: FedBuff(2, 2, check_period=5.0, loop=loop),
    "fedcompass": lambda loop: FedCompass(1, 4, check_period=5.0, loop=loop),
    "socflow": lambda loop: Socflow(2, 2, 1.0, loop=loop),
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("weighting", ["equal", "examples"])
def test_all_planned_is_no_plan_to_the_bit(name: str, weighting: str) -> None:
    overrides = f"{LAYERS} task.growth=4"
    make = STRATEGIES[name]
    planner = Given(SmallTask(), [EVERYTHING] * 3)
    planned, _ = run(make(options(planner, weighting=weighting)), 3, overrides)
    plain, _ = run(make(options(weighting=weighting)), 3, overrides)
    assert planned.keys() == plain.keys()
    for key, array in plain.items():
        assert array.tobytes() == planned[key].tobytes(), key


@pytest.mark.parametrize("collective", ["ring", "best-tree", "packed-trees"])
def test_all_planned_is_no_plan_along_a_collective_too(collective: str) -> None:
    network = Network(collective=collective)
    planner = Given(SmallTask(), [EVERYTHING] * 3)
    planned, with_plan = run(Bsp(2, loop=LoopOptions(network=network, planner=planner)), 3, LAYERS)
    plain, without = run(Bsp(2, loop=LoopOptions(network=network)), 3, LAYERS)
    for key, array in plain.items():
        assert array.tobytes() == planned[key].tobytes(), key
    assert [(r["t"], r["worker"]) for r in with_plan.of("commit")] == [
        (r["t"], r["worker"]) for r in without.of("commit")
    ]


def test_what_the_same_workers_train_is_one_reduction_among_them() -> None:
    plan = [{1: 1.0, 4: 1.0}, {3: 1.0, 4: 1.0}]

    def first_arrivals(mbps: float) -> dict[int, float]:
        network = Network(collective="ring")
        loop = LoopOptions(network=network, planner=Given(SmallTask(), plan), clock="virtual")
        link = {"latency_s": 0.0, "up_mbps": mbps, "down_mbps": mbps}
        recorder = Recorder()
        object.__setattr__(loop, "callbacks", [recorder])
        config = {"overrides": TASK, "devices": "uniform"}
        with InProcessGrid(app, 2, config, node_configs=[link] * 2) as grid:
            Bsp(1, loop=loop).start(grid, ArrayRecord(model), num_rounds=1)
        return {record["worker"]: record["t"] for record in recorder.of("commit")}

    model = SmallTask().build_model().state_dict()
    sizes = {name: tensor.nbytes for name, tensor in model.items()}

    def size(prefix: str) -> int:
        return sum(each for name, each in sizes.items() if name.startswith(prefix))

    slow, fast = first_arrivals(8e-3), first_arrivals(8e9)  # a kilobyte a second, and no time
    for worker, own in enumerate(("blocks.0", "blocks.2")):
        # The model to three along a ring; what one trains from it to the server; what both do.
        expected = 2 / 3 * sum(sizes.values()) + size(own) / 2 + 2 / 3 * size("fc")
        assert slow[worker] - fast[worker] == pytest.approx(expected / 1000, abs=1e-3)


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_nobody_trains_does_not_change_and_the_rest_does(name: str) -> None:
    start = decode(ArrayRecord(SmallTask().build_model().state_dict()))
    planner = Given(SmallTask(), [{1: 1.0, 4: 1.0}, {3: 0.5, 4: 1.0}], statistics="trainers")
    final, recorder = run(STRATEGIES[name](options(planner)), 2)
    for key, array in start.items():
        is_trained = key.startswith(("blocks.0", "fc", "blocks.2.conv"))
        assert np.array_equal(array, final[key]) != is_trained, key
    assert np.isfinite(np.concatenate([a.ravel() for a in final.values()])).all()
    (plan,) = recorder.of("plan")
    assert plan["workers"]["1"]["ratios"] == {"blocks.2": 0.5, "fc": 1.0}
    worker = recorder.state.workers[0]
    commits = worker.commits
    expected = sum(a.nbytes for key, a in start.items() if key.startswith(("blocks.0", "fc")))
    assert worker.bytes_up == commits * expected


def test_bsp_takes_the_mean_over_those_who_trained_it() -> None:
    """One barrier with two workers, by hand, from the runs of each alone."""
    start = decode(ArrayRecord(SmallTask().build_model().state_dict()))
    whole = {0: 1.0, 4: 1.0}
    both = Given(SmallTask(), [whole, {4: 1.0}], statistics="trainers")
    strategy = Bsp(2, loop=options(both))
    kept: dict[int, Commit] = {}
    average = strategy._average

    def spy(commits: list[Commit]) -> bool:
        if not kept:
            for worker, commit in enumerate(commits):
                copies = {key: array.copy() for key, array in commit.update.items()}
                kept[worker] = Commit(0, 0, 1, 0.0, 1, 0.0, copies)
            done = average(commits)
            for key, array in start.items():
                updates = [c.update[key] for c in kept.values() if key in c.update]
                if updates:
                    np.testing.assert_allclose(
                        strategy.state.model[key] - array,
                        sum(updates) / len(updates),
                        rtol=1e-4, atol=1e-7,
                    )  # fmt: skip
            return done
        return average(commits)

    strategy._average = spy  # type: ignore[method-assign]
    run(strategy, 2)
    assert set(kept[0].update) - set(kept[1].update)


def test_the_step_of_a_slice_is_over_those_that_train_it() -> None:
    model = {"w": np.zeros((2, 4)), "b": np.zeros(2)}
    cut = Slice(1, np.array([0, 2]))
    plans = [
        WorkerPlan({}, {"w": WHOLE, "b": WHOLE}, (), 1.0, 0, 0),
        WorkerPlan({}, {"w": cut}, (), 1.0, 0, 0),
        WorkerPlan({}, {"b": WHOLE}, (), 1.0, 0, 0),
        WorkerPlan({}, {}, (), 1.0, 0, 0),
    ]
    coverage = Coverage([(plan, 0.25) for plan in plans], model)
    np.testing.assert_allclose(coverage.factor("w"), [[2.0, 4.0, 2.0, 4.0]])
    assert coverage.factor("b") == 2.0
    late = Coverage([(plan, 0.5) for plan in plans[2:]], model)
    assert late.factor("w") == 2.0  # of a plan that is over: as if one of two trained it


def test_a_mean_over_trainers_with_slices() -> None:
    cut = Slice(1, np.array([1]))
    whole = Commit(0, 0, 1, 0.0, 1, 0.0, {"w": np.array([[1.0, 2.0]]), "b": np.array([3.0])})
    part = Commit(0, 0, 1, 0.0, 1, 0.0, {"w": np.array([[0.0, 6.0]])}, slices={"w": cut})
    mean = mean_over_trainers([whole, part], [0.75, 0.25])
    np.testing.assert_allclose(mean["w"], [[1.0, 0.75 * 2 + 0.25 * 6]])
    np.testing.assert_allclose(mean["b"], [3.0])
    for shares in ([0.5, 0.5], [0.3, 0.7]):
        full = [Commit(0, 0, 1, 0.0, 1, 0.0, {"w": np.random.default_rng(s).normal(size=(3, 2))})
                for s in range(2)]  # fmt: skip
        expected = weighted_mean((c.update for c in full), shares)
        assert mean_over_trainers(full, shares)["w"].tobytes() == expected["w"].tobytes()


def test_only_what_changed_is_downloaded() -> None:
    planner = Given(SmallTask(), [{1: 1.0, 4: 1.0}, {4: 1.0}], statistics="trainers")
    _, recorder = run(Bsp(1, loop=options(planner)), 2)
    model = recorder.state.model
    size = {
        unit: sum(a.nbytes for key, a in model.items() if key.startswith(unit))
        for unit in ("blocks.0", "fc")
    }
    whole = recorder.state.num_bytes
    first, second = recorder.state.workers[0], recorder.state.workers[1]
    # After the first pull: of blocks.0, worker 0 has what it alone trained.
    pulls = 1  # the second barrier ends the run
    assert first.bytes_down == whole + pulls * size["fc"]
    assert second.bytes_down == whole + pulls * (size["fc"] + size["blocks.0"])


def test_steps_take_the_time_of_what_is_trained() -> None:
    planner = Given(SmallTask(), [EVERYTHING, {4: 1.0}])
    _, recorder = run(Bsp(1, loop=options(planner)), 2)
    seen = {r["worker"]: r["trained"] - r["started"] for r in recorder.of("commit")}
    _, profile = planner.profiled()
    assert seen[0] == pytest.approx(0.25 * 4)
    assert seen[1] == pytest.approx(0.5 * 4 * profile.time_share({4: 1.0}), abs=1e-5)


def spoiled(change: Any) -> Any:
    return spoil(app, change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda arrays: arrays.pop("fc.weight"), r"missing \['fc.weight'\]"),
        (
            lambda arrays: arrays.update({"stem.bias": Array(np.zeros(8, np.float32))}),
            r"not assigned \['stem.bias'\]",
        ),
        (
            lambda arrays: arrays.update({"fc.weight": Array(np.zeros((5, 8), np.float32))}),
            "fc.weight has shape",
        ),
    ],
)
def test_a_commit_of_other_units_than_assigned_is_refused(change: Any, said: str) -> None:
    def spoil_arrays(reply: Message) -> Message:
        change(reply.content["arrays"])
        return reply

    start = decode(ArrayRecord(SmallTask().build_model().state_dict()))
    planner = Given(SmallTask(), [{4: 0.5}, {4: 0.5}], statistics="trainers")
    strategy = Bsp(1, loop=options(planner))

    class Client:
        def __call__(self, message: Message, context: Any) -> Message:
            return spoil(app, spoil_arrays)(message, context)  # type: ignore[no-any-return]

    final, recorder = run(strategy, 2, client=Client())
    refused = recorder.of("refused")
    assert len(refused) == 4
    import re

    assert all(re.search(said, record["detail"]) for record in refused)
    assert all(np.array_equal(start[key], final[key]) for key in start)


def members(*memory: float) -> list[Member]:
    return [Member(i, "d", mib, 20, 4) for i, mib in enumerate(memory)]


def test_plans_cover_all_and_rotate() -> None:
    task = SmallTask()
    weights = decode(ArrayRecord(task.build_model().state_dict()))
    _, profile = LayerPlanner(task).profiled()
    full = profile.peak_bytes(EVERYTHING) / 2**20
    some = members(0.75 * full, 0.7 * full, 0.7 * full)
    for importance in ("uniform", "fisher", "contribution"):
        planner = LayerPlanner(task, importance=importance, channels=True, rotate=True)
        plans = [planner.make(some, weights) for _ in range(6)]
        for plan in plans:
            assert plan.uncovered == ()
            for member in some:
                assert plan.workers[member.id].peak_bytes <= member.memory_mib * 2**20
        again = LayerPlanner(task, importance=importance, channels=True, rotate=True)
        repeated = again.make(some, weights)
        assert _ratios(repeated) == _ratios(plans[0])
    trained: dict[int, set[str]] = {0: set(), 1: set(), 2: set()}
    for plan in plans:
        for id_, worker in plan.workers.items():
            trained[id_] |= set(worker.portions)
    assert all(len(units) == 5 for units in trained.values())  # each has trained each unit


def _ratios(plan: LayerPlan) -> dict[int, dict[str, float]]:
    return {
        id_: {name: portion.ratio for name, portion in worker.portions.items()}
        for id_, worker in plan.workers.items()
    }


def test_it_plans_anew_on_a_period() -> None:
    planner = LayerPlanner(SmallTask(), period=1, rotate=True)
    strategy = FixedAdacomm(2, loop=options(planner))
    _, recorder = run(strategy, 2)
    assert len(recorder.of("plan")) == 3
    assert not recorder.of("refused")


def test_the_server_sets_the_statistics_that_frozen_normalisations_use() -> None:
    task = SmallTask()
    planner = Given(task, [{1: 1.0, 4: 1.0}, {4: 1.0}])
    final, recorder = run(Bsp(1, loop=options(planner)), 2)
    sizes = {name: array.nbytes for name, array in final.items()}
    statistics = sum(sizes[name] for name in sizes if "running" in name)
    head = sum(sizes[name] for name in sizes if name.startswith("fc"))
    # They are downloaded as well, by worker 0 also those of the unit that it alone trains.
    assert recorder.state.workers[0].bytes_down == sum(sizes.values()) + head + statistics
    expected = planner.measured_statistics(final)
    assert sorted(expected) == sorted(name for name in final if "running" in name)
    for name, array in expected.items():
        np.testing.assert_allclose(final[name], array, rtol=1e-4, atol=1e-6)
    # By hand for the first, whose input is the data: the mean over examples and places.
    model = task.build_model()
    model.load_state_dict({name: torch.from_numpy(a) for name, a in final.items()})
    seen = model.stem(task.held_out_data("validation").tensors[0])
    np.testing.assert_allclose(
        final["norm.running_mean"], seen.mean((0, 2, 3)).detach().numpy(), rtol=1e-4, atol=1e-6
    )


def test_it_plans_anew_when_devices_leave_and_return() -> None:
    task = SmallTask()
    _, profile = LayerPlanner(task).profiled()
    memory = 0.75 * profile.peak_bytes(EVERYTHING) / 2**20
    planner = LayerPlanner(task)
    recorder = Recorder()
    config = {"overrides": TASK, "devices": "uniform"}
    nodes = [{"seconds_per_sample": 0.25, "memory_mib": memory} for _ in range(3)]
    nodes[2] |= {"available_s": 6.0, "away_s": 5.0}
    strategy = Adsp(5.0, 2, loop=options(planner, callbacks=[recorder]))
    with InProcessGrid(app, 3, config, node_configs=nodes) as grid:
        arrays = ArrayRecord(task.build_model().state_dict())
        strategy.start(grid, arrays, num_rounds=4, train_config=ConfigRecord({"lr": 0.05}))
    plans = recorder.of("plan")
    moves = [r for r in recorder.records if r["event"] in ("away", "back")]
    assert len(moves) >= 2
    assert len(plans) == 1 + len(moves)
    assert [len(plan["workers"]) for plan in plans[:3]] == [3, 2, 3]
    assert not any(plan["uncovered"] for plan in plans)
    assert not recorder.of("refused")


def test_momentum_stays_with_its_channels() -> None:
    planner = LayerPlanner(SmallTask(), with_momentum=True, channels=True, period=1, rotate=True)
    strategy = FixedAdacomm(2, loop=options(planner))
    _, recorder = run(strategy, 2, "train.momentum=0.9")
    assert not recorder.of("refused")


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"plan.method 'best'"):
        LayerPlanner(SmallTask(), method="best")
    with pytest.raises(ConfigError, match=r"plan.importance 'none'"):
        LayerPlanner(SmallTask(), importance="none")
    with pytest.raises(ConfigError, match=r"plan.period = 0"):
        LayerPlanner(SmallTask(), period=0)
    with pytest.raises(ConfigError, match=r"plan.statistics 'mean'"):
        LayerPlanner(SmallTask(), statistics="mean")
    with pytest.raises(ConfigError, match=r"plan.most_time_share = 2"):
        LayerPlanner(SmallTask(), most_time_share=2)
    with pytest.raises(ConfigError, match=r"the memory of worker 0 \(d\), 0.0 MiB"):
        LayerPlanner(SmallTask()).make(members(0.001), {})
    assert Portion().ratio == 1.0
