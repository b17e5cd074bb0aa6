import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from flower_adsp.clients import register
from flower_adsp.strategies import Adsp, Bsp, LoopOptions
from flower_adsp.strategies.loop import TrailingMean
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod, message_size_mod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from flower_adsp.client_app import app
from flower_adsp.errors import ConfigError, DataError, EngineFailed, NodeCountError
from flower_adsp.faults import FaultyGrid
from flower_adsp.network import Network
from flower_adsp.testing import InProcessGrid
from tests.conftest import (
    TOY,
    Recorder,
    evaluate_distance,
    run_toy,
    spoil,
    toy_arrays,
    toy_grid,
    weight,
)


def adsp(recorder: Recorder | None = None, **options: Any) -> Adsp:
    callbacks = [recorder] if recorder else []
    return Adsp(check_period=1, commit_rate=2, loop=LoopOptions(callbacks=callbacks, **options))


# ------------------------------------------------------------------------------------------- time


def test_one_commit_happens_when_the_design_says() -> None:
    # 16 bytes/s up and 8 bytes/s down for a model of 8 bytes, and a latency of 0.25 s:
    # pull until 1.25, train 4 steps of 0.5 s until 3.25, arrive at 3.25 + 0.25 + 0.5 = 4.0.
    recorder = Recorder()
    config = {"seconds_per_sample": 0.5, "latency_s": 0.25, "up_mbps": 128e-6, "down_mbps": 64e-6}
    strategy = Bsp(local_steps=4, loop=LoopOptions(callbacks=[recorder], min_available_nodes=1))
    with toy_grid(1, node_configs=[config]) as grid:
        run_toy(strategy, grid, rounds=2)
    first, second = recorder.of("commit")
    assert [first[key] for key in ("released", "started", "trained", "t")] == [0, 1.25, 3.25, 4.0]
    assert [second[key] for key in ("released", "started", "trained", "t")] == [4, 5.25, 7.25, 8]
    worker = recorder.state.workers[0]
    assert (worker.computing, worker.communicating, worker.blocked) == (4_000_000, 4_000_000, 0)
    assert worker.overhead == 2_000_000
    assert (worker.bytes_up, worker.bytes_down) == (16, 16)


def test_a_timer_ends_at_the_first_step_boundary_at_or_after_it() -> None:
    recorder = Recorder()
    configs = [{"seconds_per_sample": seconds} for seconds in (0.3, 0.5, 0.7, 1.5)]
    strategy = Adsp(
        check_period=1,
        commit_rate=1,
        loop=LoopOptions(network=Network(0.0), callbacks=[recorder]),
    )
    with toy_grid(4, node_configs=configs) as grid:
        run_toy(strategy, grid, rounds=2)
    first = {record["worker"]: record for record in reversed(recorder.of("commit"))}
    assert [first[worker]["steps"] for worker in range(4)] == [4, 2, 2, 1]
    assert [first[worker]["t"] for worker in range(4)] == [1.2, 1.0, 1.4, 1.5]


def test_the_result_does_not_depend_on_the_order_of_replies_or_on_node_ids() -> None:
    def run(**options: Any) -> tuple[bytes, list[Any]]:
        recorder = Recorder()
        with toy_grid(6, devices="adsp-ec2", **options) as grid:
            result = run_toy(adsp(recorder), grid, rounds=4, lr=0.1)
        return result.arrays["w"].data, recorder.records

    def dawdle(message: Message, context: Context) -> Message:
        time.sleep(0.002 * (context.node_id % 5))
        return app(message, context)

    expected = run()
    assert run() == expected
    assert run(node_ids=[7, 3, 900, 12, 5, 1]) == expected
    assert run(client_app=dawdle, node_ids=[4, 3, 2, 1, 9, 5], threads=6) == expected


def test_the_learning_rate_halves_by_the_clock_and_travels_with_the_assignment() -> None:
    seen: list[float] = []

    def watch(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train.commit":
            seen.append(float(message.content["config"]["lr"]))
            assert message.content["config"]["mine"] == "kept"
        return app(message, context)

    strategy = Bsp(loop=LoopOptions(network=Network(2.0), min_available_nodes=1))
    with toy_grid(1, client_app=watch, node_configs=[{"seconds_per_sample": 8.0}]) as grid:
        strategy.start(
            grid,
            toy_arrays(),
            num_rounds=3,
            train_config=ConfigRecord({"lr": 0.4, "lr-half-life": 10.0, "mine": "kept"}),
        )
    assert seen[:3] == pytest.approx([0.4, 0.2, 0.1])


@pytest.mark.parametrize("key", ["lr", "lr-half-life"])
@pytest.mark.parametrize("value", [0.0, -1.0, "fast"])
def test_a_learning_rate_must_be_above_zero(key: str, value: Any) -> None:
    with toy_grid(2) as grid, pytest.raises(ConfigError, match=f"{key}.*{value}.*above 0"):
        adsp().start(grid, toy_arrays(), train_config=ConfigRecord({key: value}))


# ------------------------------------------------------------------------------ evaluation and ends


def test_evaluation_is_at_fixed_times_and_sees_the_commits_until_then() -> None:
    recorder = Recorder()
    strategy = adsp(recorder, evaluate_every=0.25, network=Network(0.0))
    with toy_grid(2) as grid:
        result = run_toy(strategy, grid, rounds=2, evaluate_fn=evaluate_distance)
    evaluations = recorder.of("evaluation")
    assert [record["t"] for record in evaluations] == [0.25 * n for n in range(9)]
    for record in evaluations:
        before = [commit for commit in recorder.of("commit") if commit["t"] <= record["t"]]
        assert record["commits"] == len(before)
    assert set(result.evaluate_metrics_serverapp) == {0, 1, 2}


def test_without_a_period_the_model_is_evaluated_once_an_index() -> None:
    recorder = Recorder()
    with toy_grid(2) as grid:
        result = run_toy(
            Bsp(loop=LoopOptions(callbacks=[recorder])), grid, 3, evaluate_fn=evaluate_distance
        )
    assert [record["index"] for record in recorder.of("evaluation")] == [0, 1, 2, 3]
    assert list(result.evaluate_metrics_serverapp) == [0, 1, 2, 3]


def test_a_run_ends_at_its_greatest_time() -> None:
    recorder = Recorder()
    with toy_grid(2) as grid:
        run_toy(adsp(recorder, max_seconds=2.5), grid, rounds=100)
    assert recorder.of("end")[0]["t"] == 2.5
    assert recorder.closed == 1


def test_a_run_ends_when_the_smoothed_loss_reaches_the_target() -> None:
    recorder = Recorder()
    strategy = adsp(recorder, evaluate_every=0.5, target_loss=0.5, smoothing_seconds=2.0)
    with toy_grid(3) as grid:
        run_toy(strategy, grid, rounds=100, lr=0.1, evaluate_fn=evaluate_distance)
    last = recorder.of("evaluation")[-1]
    assert last["reached_target"]
    assert last["smoothed_loss"] <= 0.5
    losses = [(record["t"], record["loss"]) for record in recorder.of("evaluation")]
    window = [loss for at, loss in losses if last["t"] - 2.0 < at <= last["t"]]
    assert last["smoothed_loss"] == pytest.approx(sum(window) / len(window))
    assert all(
        record["smoothed_loss"] is None or record["smoothed_loss"] > 0.5
        for record in recorder.of("evaluation")[:-1]
    )


def test_the_trailing_mean_waits_until_its_window_is_filled() -> None:
    mean = TrailingMean(60.0)
    assert [mean.add(t, t) for t in (0.0, 30.0)] == [None, None]
    assert mean.add(60.0, 60.0) == 45.0  # over (0, 60]
    assert mean.add(90.0, 90.0) == 75.0


# ------------------------------------------------------------------------------------------ faults


def set_metric(key: str, value: Any) -> Callable[[Message], Message]:
    def change(reply: Message) -> Message:
        reply.content["metrics"][key] = value
        return reply

    return change


def drop(record: str) -> Callable[[Message], Message]:
    def change(reply: Message) -> Message:
        del reply.content[record]
        return reply

    return change


def set_w(array: Any) -> Callable[[Message], Message]:
    def change(reply: Message) -> Message:
        reply.content["arrays"]["w"] = Array(np.asarray(array))
        return reply

    return change


def fail(reply: Message) -> Message:
    raise RuntimeError("the device caught fire")


FAULTS = [
    (fail, "client-app-raised"),
    (drop("metrics"), "missing-key"),
    (drop("arrays"), "missing-key"),
    (set_metric("train-loss", float("nan")), "non-finite"),
    (set_metric("num-examples", -3), "count"),
    (set_metric("model-version", 10_000), "wrong-assignment"),
    (set_w([float("nan")]), "non-finite"),
    (set_w([float("inf")]), "non-finite"),
    (set_w([[1.0]]), "shape"),
    (set_w(np.array([1.0], np.float32)), "dtype"),
]


@pytest.mark.parametrize("strategy_type", [Adsp, Bsp])
@pytest.mark.parametrize(("fault", "kind"), FAULTS)
def test_a_faulty_reply_is_refused_and_counted_and_the_run_goes_on(
    fault: Callable[[Message], Message], kind: str, strategy_type: type[Any]
) -> None:
    recorder = Recorder()
    tries = 0

    def now_and_then(reply: Message) -> Message:
        nonlocal tries
        tries += 1
        return fault(reply) if tries % 3 == 0 else reply

    strategy = strategy_type(loop=LoopOptions(callbacks=[recorder]))
    if strategy_type is Adsp:
        strategy = adsp(recorder)
    with toy_grid(3, client_app=spoil(app, now_and_then)) as grid:
        result = run_toy(strategy, grid, rounds=6)
    refused = recorder.of("refused")
    assert len(refused) >= 3
    assert {record["kind"] for record in refused} == {kind}
    counted = sum(
        (worker.refused for worker in recorder.state.workers.values()),
        start=type(recorder.state.workers[0].refused)(),
    )
    assert counted == {kind: len(refused)}
    assert recorder.of("end")[0]["index"] == 6
    assert np.isfinite(weight(result.arrays))
    assert weight(result.arrays) > 0.5
    # The batches of a refused commit are trained again: no worker skips any.
    for worker in recorder.state.workers.values():
        steps = [r["steps"] for r in recorder.of("commit") if r["worker"] == worker.id]
        assert worker.steps == sum(steps)


def test_a_message_that_flower_does_not_take_is_refused() -> None:
    recorder = Recorder()

    class Picky(InProcessGrid):
        pushed = 0

        def push_messages(self, messages: Any) -> Any:
            messages = list(messages)
            self.pushed += 1
            if messages[0].metadata.message_type == "train.commit" and self.pushed % 4 == 0:
                return [None] if self.pushed % 8 else []
            return super().push_messages(messages)

    config = {"overrides": TOY, "devices": "uniform"}
    with Picky(app, 2, config) as grid:
        run_toy(adsp(recorder), grid, rounds=4)
    assert {record["kind"] for record in recorder.of("refused")} == {"not-sent"}
    assert len(recorder.of("refused")) >= 3


def test_a_reply_that_never_comes_is_given_up() -> None:
    recorder = Recorder()

    class Forgetful(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            return [
                reply
                for reply in super().pull_messages(message_ids)
                if not (
                    reply.metadata.src_node_id == 1001
                    and reply.metadata.message_type == "train.commit"
                )
            ]

    config = {"overrides": TOY, "devices": "uniform"}
    with Forgetful(app, 2, config) as grid:
        run_toy(adsp(recorder), grid, rounds=2, timeout=0.05)
    assert {record["kind"] for record in recorder.of("refused")} == {"timeout"}
    assert {record["worker"] for record in recorder.of("refused")} == {1}
    assert recorder.state.workers[0].commits > 0


def test_callbacks_are_closed_when_a_run_fails() -> None:
    recorder = Recorder()

    def broken(index: int, arrays: ArrayRecord) -> MetricRecord:
        raise RuntimeError("no data")

    with toy_grid(2) as grid, pytest.raises(RuntimeError, match="no data"):
        run_toy(adsp(recorder), grid, rounds=1, evaluate_fn=broken)
    assert recorder.closed == 1


# ------------------------------------------------------------------------------------------- nodes


def test_too_few_nodes_are_waited_for_and_then_named() -> None:
    start = time.monotonic()
    with toy_grid(2) as grid, pytest.raises(NodeCountError) as caught:
        run_toy(adsp(min_available_nodes=3, node_timeout=0.3), grid, rounds=1)
    assert "min_available_nodes = 3" in str(caught.value)
    assert "only 2 nodes" in str(caught.value)
    assert "num-supernodes=3" in str(caught.value)
    assert 0.3 <= time.monotonic() - start < 5


def test_nodes_that_appear_late_are_waited_for() -> None:
    class Slow(InProcessGrid):
        born = time.monotonic()

        def get_node_ids(self) -> Any:
            age = time.monotonic() - self.born
            return list(super().get_node_ids())[: 1 if age < 0.3 else 2 if age < 0.6 else 4]

    recorder = Recorder()
    Slow.born = time.monotonic()
    with Slow(app, 4, {"overrides": TOY, "devices": "uniform"}) as grid:
        run_toy(adsp(recorder), grid, rounds=1)
    assert len(recorder.state.workers) == 4


def test_a_node_that_fails_to_answer_is_asked_again_and_then_left_out() -> None:
    failures = {1000: 2, 1001: 99}

    def flaky(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "query.capability":
            failures[context.node_id] = failures.get(context.node_id, 0) - 1
            if failures[context.node_id] >= 0:
                raise RuntimeError("not yet")
        return app(message, context)

    recorder = Recorder()
    with toy_grid(3, client_app=flaky) as grid:
        run_toy(adsp(recorder), grid, rounds=1)
    assert list(recorder.state.workers) == [0, 2]


def test_a_partition_without_data_is_named() -> None:
    config = {"overrides": "task.target=tests.toy:build_empty", "devices": "uniform"}
    with InProcessGrid(app, 2, config) as grid, pytest.raises(DataError) as caught:
        run_toy(adsp(), grid, rounds=1)
    assert "partition-id = 0" in str(caught.value)
    assert "num-examples = 0" in str(caught.value)


def test_of_two_nodes_with_the_same_partition_one_is_left_out() -> None:
    recorder = Recorder()
    with toy_grid(3, node_configs=[{}, {"partition-id": 0}, {}]) as grid:
        run_toy(adsp(recorder), grid, rounds=1)
    assert [worker.node_id for worker in recorder.state.workers.values()] == [1000, 1002]


# --------------------------------------------------------------------- stock Flower on both ends


def stock_app(steps: int = 2) -> ClientApp:
    """Return an app as a user of Flower has it: it knows nothing of this project."""
    stock = ClientApp()

    @stock.train()
    def train(message: Message, context: Context) -> Message:
        w = message.content["arrays"]["w"].numpy().copy()
        target = context.node_config["partition-id"] + 1
        for _ in range(steps):
            w -= message.content["config"]["lr"] * (w - target)
        metrics = MetricRecord({"num-examples": 64, "train_loss": 0.5})
        content = RecordDict({"arrays": ArrayRecord({"w": Array(w)}), "metrics": metrics})
        return Message(content, reply_to=message)

    return stock


def test_adsp_runs_with_a_stock_client_app() -> None:
    recorder = Recorder()
    with InProcessGrid(stock_app(), 3) as grid:
        result = run_toy(adsp(recorder), grid, rounds=6)
    commits = recorder.of("commit")
    assert len(commits) >= 9
    assert {record["steps"] for record in commits} == {2}  # 64 examples in batches of 32
    # Each reply counts as its difference to the version that was sent: by hand, in order.
    w, sent = 0.0, [0.0, 0.0, 0.0]
    for record in commits:
        worker = record["worker"]
        after = (worker + 1) - (worker + 1 - sent[worker]) * 0.25
        w += (after - sent[worker]) / 3
        sent[worker] = w
    assert weight(result.arrays) == pytest.approx(w, rel=1e-12)


def test_bsp_runs_with_a_stock_client_app() -> None:
    with InProcessGrid(stock_app(steps=1), 2) as grid:
        result = run_toy(Bsp(), grid, rounds=3)
    w = 0.0
    for _ in range(3):
        w += sum(-0.5 * (w - target) for target in (1, 2)) / 2
    assert weight(result.arrays) == pytest.approx(w, rel=1e-12)


def test_a_stock_client_app_that_fails_is_refused() -> None:
    recorder = Recorder()
    stock = stock_app()

    def flaky(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train" and context.node_id == 1001:
            raise RuntimeError("out of memory")
        return stock(message, context)

    with InProcessGrid(flaky, 2) as grid:
        run_toy(adsp(recorder), grid, rounds=2)
    assert {(r["worker"], r["kind"]) for r in recorder.of("refused")} == {(1, "client-app-raised")}


def test_it_takes_the_place_of_fedavg_by_one_line() -> None:
    results = []
    for strategy in (FedAvg(fraction_evaluate=0.0), adsp(), Bsp()):
        with toy_grid(2) as grid:
            results.append(
                strategy.start(
                    grid=grid,
                    initial_arrays=toy_arrays(),
                    num_rounds=2,
                    timeout=60,
                    train_config=ConfigRecord({"lr": 0.5}),
                    evaluate_config=None,
                    evaluate_fn=evaluate_distance,
                )
            )
    for result in results:
        assert list(result.evaluate_metrics_serverapp) == [0, 1, 2]
        assert list(result.arrays) == ["w"]
        assert weight(result.arrays) > 0


def test_wrappers_that_need_rounds_are_refused_by_name() -> None:
    wrapper = DifferentialPrivacyServerSideFixedClipping(adsp(), 1.0, 1.0, 2)
    with toy_grid(2) as grid, pytest.raises(NotImplementedError, match=r"Adsp.*call its start"):
        wrapper.start(grid, toy_arrays(), num_rounds=1)


# -------------------------------------------------------------------------------------- wall clock


def test_in_real_time_devices_train_by_their_own_timer() -> None:
    recorder = Recorder()
    strategy = Adsp(
        check_period=0.5, commit_rate=2, loop=LoopOptions(clock="wall", callbacks=[recorder])
    )
    with toy_grid(3, threads=3) as grid:
        result = run_toy(strategy, grid, rounds=3, lr=0.01)
    end = recorder.of("end")[0]
    assert 1.5 <= end["t"] < 3
    for record in recorder.of("checkpoint")[1:]:
        assert max(record["commits"]) - min(record["commits"]) <= 1
    counts = [worker.commits for worker in recorder.state.workers.values()]
    assert min(counts) >= 4
    for worker in recorder.state.workers.values():
        computing, communicating, blocked = worker.spent(recorder.state.now)
        assert computing + communicating + blocked == recorder.state.now
        assert computing > 0.5 * recorder.state.now
    assert weight(result.arrays) > 0


def test_in_real_time_a_silent_device_is_given_up_and_the_others_go_on() -> None:
    recorder = Recorder()

    def hang(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train.commit" and context.node_id == 1001:
            time.sleep(0.6)
        return app(message, context)

    strategy = Adsp(
        check_period=0.4, commit_rate=2, loop=LoopOptions(clock="wall", callbacks=[recorder])
    )
    with toy_grid(2, client_app=hang, threads=4) as grid:
        run_toy(strategy, grid, rounds=2, timeout=0.3)
    assert {(r["worker"], r["kind"]) for r in recorder.of("refused")} == {(1, "timeout")}
    assert recorder.state.workers[0].commits >= 2
    assert recorder.state.workers[1].commits == 0


def test_in_real_time_a_device_that_keeps_failing_rests_between_tries() -> None:
    recorder = Recorder()

    def broken(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train.commit" and context.node_id == 1001:
            raise RuntimeError("broken")
        return app(message, context)

    strategy = Adsp(
        check_period=0.5, commit_rate=2, loop=LoopOptions(clock="wall", callbacks=[recorder])
    )
    with toy_grid(2, client_app=broken, threads=2) as grid:
        run_toy(strategy, grid, rounds=4)
    assert 3 <= len(recorder.of("refused")) <= 4  # three, and one after a second


def test_in_real_time_a_node_far_faster_than_its_profile_is_believed() -> None:
    recorder = Recorder()
    loop = LoopOptions(clock="wall", callbacks=[recorder])
    strategy = Adsp(check_period=0.5, commit_rate=2, loop=loop)
    with toy_grid(2, node_configs=[{"seconds_per_sample": 1000.0}] * 2, threads=2) as grid:
        run_toy(strategy, grid, rounds=2)
    assert not recorder.of("refused")
    assert all(worker.commits for worker in recorder.state.workers.values())


def test_a_loss_that_is_not_finite_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def evaluate(index: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"loss": 1.0 if index < 2 else float("nan")})

    with toy_grid(2) as grid:
        run_toy(adsp(Recorder()), grid, rounds=4, lr=0.125, evaluate_fn=evaluate)
    said = [r.getMessage() for r in caplog.records if "diverged" in r.getMessage()]
    assert len(said) == 1
    assert "the loss is nan at t = " in said[0]
    assert "lower learning rate (0.125 now)" in said[0]


# ------------------------------------------------------------------------------------------- mods


@pytest.mark.parametrize("mod", [LocalDpMod(0.25, 1e-3, 1e3, 1e-5), fixedclipping_mod])
def test_a_device_with_a_mod_that_subtracts_the_model_sends_its_whole_model(mod: Any) -> None:
    # Each local epoch moves w by more than 0.25, to which the mods clip it.
    client = register(ClientApp(mods=[mod]))
    recorder = Recorder()
    strategy = Bsp(loop=LoopOptions(callbacks=[recorder]))
    with toy_grid(2, client_app=client) as grid:
        result = strategy.start(
            grid,
            toy_arrays(),
            num_rounds=2,
            train_config=ConfigRecord({"lr": 0.5, "clipping_norm": 0.25}),
        )
    assert not recorder.of("refused")
    assert weight(result.arrays) == pytest.approx(0.5, abs=0.02)


def test_the_mod_that_logs_sizes_works() -> None:
    with toy_grid(2, client_app=register(ClientApp(mods=[message_size_mod]))) as grid:
        expected, found = (run_toy(Bsp(), each, rounds=2).arrays for each in (grid, toy_grid(2)))
    assert weight(found) == weight(expected)


def test_secaggplus_is_refused_with_the_reason() -> None:
    recorder = Recorder()
    client = register(ClientApp(mods=[secaggplus_mod]))
    with toy_grid(2, client_app=client) as grid:
        run_toy(Bsp(loop=LoopOptions(callbacks=[recorder])), grid, rounds=2)
    assert {record["kind"] for record in recorder.of("refused")} == {"secaggplus"}
    assert "needs rounds that all clients answer" in recorder.of("refused")[0]["detail"]


# ------------------------------------------------------------------------------------------ faults


def test_who_fails_three_times_rests_ever_longer() -> None:
    recorder = Recorder()

    def broken(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train.commit" and context.node_id == 1001:
            raise RuntimeError("broken")
        return app(message, context)

    loop = LoopOptions(callbacks=[recorder], network=Network(0.0))
    strategy = Adsp(check_period=10, commit_rate=5, loop=loop)
    configs = [{"seconds_per_sample": 1.0}] * 2
    with toy_grid(2, client_app=broken, node_configs=configs) as grid:
        run_toy(strategy, grid, rounds=10)
    times = [record["t"] for record in recorder.of("refused")]
    waits = [round(b - a) for a, b in itertools.pairwise(times)]
    assert waits[:2] == [2, 2]
    # A rest as long as the try before took, then two and four times; a try now has a timer of 10 s.
    assert waits[2:] == [2 + 10, 20 + 10, 40 + 10]
    assert recorder.state.workers[0].commits == 50


def test_after_three_engine_errors_the_run_ends_with_a_checkpoint(tmp_path: Path) -> None:
    calls = 0

    class DeadEngine(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            nonlocal calls
            for reply in super().pull_messages(message_ids):
                if "arrays" not in reply.content:  # it is not a commit
                    yield reply
                    continue
                calls += 1
                if calls <= 12:
                    yield reply
                    continue
                request = self.requests[reply.metadata.reply_to_message_id]
                failed = Message(Error(0, "ActorDiedError"), reply_to=request)
                failed.metadata.__dict__["_message_id"] = reply.metadata.message_id
                yield failed

        def push_messages(self, messages: Any) -> Any:
            kept = list(messages)
            ids = super().push_messages(kept)
            self.requests.update(zip(ids, kept, strict=True))
            return ids

        requests: ClassVar[dict[str, Message]] = {}

    path = tmp_path / "checkpoint.safetensors"
    recorder = Recorder()
    strategy = adsp(recorder, checkpoint=path)
    with (
        DeadEngine(app, 3, {"overrides": TOY, "devices": "uniform"}) as grid,
        pytest.raises(EngineFailed, match="last 3 answers"),
    ):
        run_toy(strategy, grid, rounds=50)
    assert strategy.state.commits == 12
    again = adsp(Recorder(), checkpoint=path, resume=path)
    with toy_grid(3) as grid:
        run_toy(again, grid, rounds=4)
    assert again.state.index == 4
    assert again.state.commits > 12


def test_an_answer_that_never_comes_is_missed_after_three_times_as_long() -> None:
    recorder = Recorder()
    grid_options = {"rate": 1.0, "kinds": ["node gone"]}
    loop = LoopOptions(
        callbacks=[recorder], network=Network(0.0), max_seconds=20, min_available_nodes=1
    )
    strategy = Adsp(check_period=4, commit_rate=1, loop=loop)
    config = {"overrides": TOY, "devices": "uniform"}
    with FaultyGrid(
        app, 1, config, node_configs=[{"seconds_per_sample": 1.0}], **grid_options
    ) as grid:
        run_toy(strategy, grid, rounds=9)
    assert next(record["t"] for record in recorder.of("refused")) == 12
    assert {record["kind"] for record in recorder.of("refused")} == {"node-unavailable"}


def test_an_update_far_out_of_line_is_refused() -> None:
    recorder = Recorder()
    number = 0

    def blow_up(reply: Message) -> Message:
        nonlocal number
        number += 1
        if number in (1, 20):
            reply.content["arrays"]["w"] = Array(1e3 * reply.content["arrays"]["w"].numpy())
        return reply

    strategy = Bsp(loop=LoopOptions(callbacks=[recorder], norm_limit=20))
    start = ArrayRecord({"w": Array(np.ones(1))})
    with toy_grid(3, client_app=spoil(app, blow_up)) as grid:
        run_toy(strategy, grid, rounds=10, lr=0.1, arrays=start)
    kinds = [(record["kind"], record["worker"]) for record in recorder.of("refused")]
    # Number 20 is worker 1's. Number 1 is worker 0's, which is at its best, so that 0 is sent.
    assert kinds == [("norm", 1)]


def test_a_first_update_larger_than_the_model_is_refused() -> None:
    recorder = Recorder()
    strategy = Bsp(loop=LoopOptions(callbacks=[recorder], norm_limit=20))
    start = ArrayRecord({"w": Array(np.full(1, 1.5))})
    with toy_grid(3) as grid:  # worker 2 takes a step of 4.5, the others of less than 1.5
        run_toy(strategy, grid, rounds=1, lr=3.0, arrays=start)
    assert [(r["kind"], r["worker"]) for r in recorder.of("refused")] == [("norm", 2)]
