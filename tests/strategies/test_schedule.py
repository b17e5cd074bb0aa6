"""Slices sent by priority: the same model, in less time."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flower_adsp.strategies import Adsp, Bsp, LoopOptions

from flower_adsp.client_app import app
from flower_adsp.config import load_config
from flower_adsp.errors import ConfigError
from flower_adsp.network import Network
from flower_adsp.network.slices import SCHEDULES, Layer, Link, iteration_seconds
from flower_adsp.sparse.profile import layer_costs
from flower_adsp.tasks.batches import first_batch
from flower_adsp.tasks.build import build_task
from tests.conftest import Recorder, run_toy, spoil, toy_grid, weight

Run = Callable[..., Path]

# Small slices and slow links: the model of 4,810 parameters takes 0.15 s to 0.8 s each way.
SLOW = "network.slice_size=200 run.evaluate_every=5"


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


@pytest.mark.parametrize(
    ("strategy", "task", "more"),
    [
        ("bsp", "digits-mlp", "strategy.local_steps=1 run.num_rounds=12"),
        ("fixed-adacomm", "digits-mlp", "strategy.local_steps=3 run.num_rounds=6"),
        ("dsparse", "mnist-resnet", "run.num_rounds=3"),
    ],
)
def test_barriers_make_the_same_model_and_priority_is_fastest(
    run_folder: Run, strategy: str, task: str, more: str
) -> None:
    folders = {
        schedule: run_folder(
            schedule,
            strategy=strategy,
            task=task,
            devices="phones",
            overrides=f"{SLOW} {more} network.schedule={schedule}",
        )
        for schedule in SCHEDULES
    }
    models = {(folder / "model.safetensors").read_bytes() for folder in folders.values()}
    assert len(models) == 1
    seconds = {name: summary(folder)["seconds"] for name, folder in folders.items()}
    assert seconds["p3"] < seconds["fifo"] == seconds["reverse"] < seconds["whole"]


RATES = (0.02, 0.04, 0.04, 0.06)  # Mbit/s up: slices of the last layer wait for the first


def started(folder: Path, worker: int = 0) -> list[float]:
    records = map(json.loads, (folder / "history.jsonl").open())
    return [r["started"] for r in records if r["event"] == "commit" and r["worker"] == worker]


@pytest.mark.parametrize("schedule", ["fifo", "p3", "reverse"])
@pytest.mark.parametrize("window", [1, 3])
def test_equal_workers_take_an_iteration_each(run_folder: Run, schedule: str, window: int) -> None:
    link = {"up_mbps": 0.2, "down_mbps": 0.3, "latency_s": 0.01}
    folder = run_folder(
        "equal",
        strategy="bsp",
        devices="uniform",
        grid_options={"node_configs": [link] * 4},
        overrides=f"{SLOW} run.num_rounds=5 network.schedule={schedule} network.window={window} "
        "strategy.local_steps=1 task.batch_size=16",
    )
    task = build_task(load_config({"task": "digits-mlp"}))
    batch = first_batch(task)
    costs = layer_costs(task.build_model(), lambda model: task.loss(model, batch))
    state = task.build_model().state_dict()
    step = 16 * 0.03125
    layers = [
        Layer(
            sum(state[name].numel() for name in cost.names),
            cost.share * step / 3,
            cost.share * step * 2 / 3,
        )
        for cost in costs
    ]
    expected = iteration_seconds(layers, Link(0.2, 0.3, 0.01), schedule, 200, window)
    periods = [b - a for a, b in itertools.pairwise(started(folder))]
    assert periods == pytest.approx([expected] * len(periods), abs=1e-5)
    for device in summary(folder)["devices"]:
        shares = [device[key] for key in ("computing", "communicating", "blocked")]
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0


def test_slices_go_on_at_once_unless_a_commit_is_lost(run_folder: Run) -> None:
    def lose(message: Any) -> Any:
        metrics = message.content["metrics"]
        if metrics["assignment-id"] == 5:  # the second of a worker
            metrics["num-examples"] = 0
        return message

    common = f"{SLOW} run.num_rounds=5 network.schedule=p3 strategy.local_steps=1"
    early = []
    for name, client in (("all", app), ("one lost", spoil(app, lose))):
        options = {"strategy": "bsp", "devices": "uniform", "overrides": common}
        grid_options = {"node_configs": [{"up_mbps": rate, "latency_s": 0.01} for rate in RATES]}
        folder = run_folder(name, client=client, grid_options=grid_options, **options)
        records = [json.loads(line) for line in (folder / "history.jsonl").open()]
        commits = [r for r in records if r["event"] == "commit"]
        assert sum(r["event"] == "refused" for r in records) == (name != "all")
        rounds = sorted({r["released"] for r in commits})
        early.append(
            [any(r["started"] < r["released"] for r in commits if r["released"] == at)
             for at in rounds]
        )  # fmt: skip
    # The first model comes from the server; after the round with the loss all wait for its end.
    assert early == [[False, True, True, True, True], [False, True, False, True, True]]


def test_what_adsp_hides_is_not_communicating(run_folder: Run) -> None:
    def run(schedule: str) -> dict[str, Any]:
        return summary(
            run_folder(
                schedule,
                strategy="adsp",
                devices="phones",
                overrides=f"{SLOW} run.num_rounds=3 network.schedule={schedule}",
            )
        )

    whole, p3 = run("whole"), run("p3")
    for before, after in zip(whole["devices"], p3["devices"], strict=True):
        assert after["communicating"] < before["communicating"]
        assert after["blocked"] == 0
    assert abs(whole["commits"] - p3["commits"]) <= len(p3["devices"])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("network.schedule=lifo", r"network\.schedule.*lifo.*p3"),
        ("network.slice_size=0", r"network\.slice_size = 0 .* at least 1"),
        ("network.window=0", r"network\.window = 0"),
        ("network.collective=rings", r"network\.collective.*rings.*ring"),
        ("network.collective=ring network.schedule=p3", r"network\.collective = 'ring'"),
        ("network.schedule=p3 network.server_up_mbps=9.0", r"network\.schedule = 'p3'.*shared"),
    ],
)
def test_settings_that_cannot_be_are_refused(overrides: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config({"overrides": overrides})


def test_slices_need_layers_and_virtual_time() -> None:
    with pytest.raises(ConfigError, match="layers"):
        LoopOptions(network=Network(schedule="p3"))
    with pytest.raises(ConfigError, match="whole messages"):
        LoopOptions(network=Network(schedule="p3"), clock="wall")


def test_a_collective_changes_the_time_of_a_barrier_and_not_its_model() -> None:
    # 64 bits at 64 bits a second: 1 s each way for each of three devices alone.
    link = {"seconds_per_sample": 0.5, "latency_s": 0.0, "up_mbps": 64e-6, "down_mbps": 64e-6}
    found = {}
    for collective, server in (
        ("star", None),
        ("star", 64e-6),
        ("ring", None),
        ("best-tree", None),
    ):
        recorder = Recorder()
        network = Network(collective=collective, server_up_mbps=server, server_down_mbps=server)
        loop = LoopOptions(network=network, callbacks=[recorder], min_available_nodes=3)
        with toy_grid(3, node_configs=[link] * 3) as grid:
            result = run_toy(Bsp(local_steps=4, loop=loop), grid, rounds=2)
        last = max(record["t"] for record in recorder.of("commit"))
        found[collective, server] = (weight(result.arrays), last)
    models, seconds = zip(*found.values(), strict=True)
    assert len(set(models)) == 1
    # Links of their own: 1 + 2 + 1, twice. One card for all: 3 + 2 + 3. A ring of four cards: three
    # steps of a quarter each way. The star, where the server's card has no limit.
    assert seconds == pytest.approx((8, 16, 7, 8), abs=1e-4)


def test_a_collective_needs_barriers() -> None:
    loop = LoopOptions(network=Network(collective="ring"), min_available_nodes=2)
    with toy_grid(2) as grid, pytest.raises(ConfigError, match=r"network\.collective = 'ring'"):
        run_toy(Adsp(check_period=1, commit_rate=1, loop=loop), grid, rounds=1)
