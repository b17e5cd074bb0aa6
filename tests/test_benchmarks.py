"""The benchmarks' own arithmetic, and that what the docs say is what was measured."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import layer_training, network, overlap, time_to_loss, write_docs
from benchmarks.time_to_loss import EC2_5, Cell, at_cell, savings
from flower_adsp.sparse.plan import LayerPlan, WorkerPlan
from flower_adsp.sparse.portions import WHOLE, Slice


def test_a_barrier_run_is_timed_as_the_event_loop_would(tmp_path: Path) -> None:
    """A barrier run on equal devices, computed for unequal ones, against the loop on these."""
    from flower_adsp.client_app import app
    from flower_adsp.config import load_config
    from flower_adsp.experiment import run_experiment
    from flower_adsp.testing import InProcessGrid

    def history(devices: str, overhead: float, every: str) -> list[dict[str, Any]]:
        settings = {
            "strategy": "fixed-adacomm",
            "devices": devices,
            "task": "digits-mlp",
            "network": "fixed",
            "output": str(tmp_path / f"{devices}{overhead}"),
            "tracking.progress": "off",
            "tracking.report": "off",
            "overrides": f"strategy.local_steps=2 network.overhead_s={overhead} task.batch_size=32 "
            f"run.num_rounds=40 run.evaluate_every={every}",
        }
        with InProcessGrid(app, 18, settings) as grid:
            run_experiment(grid, load_config(settings))
        path = Path(settings["output"]) / "history.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        return [record for record in records if record["event"] == "evaluation"]

    base = history("uniform", 0.0, "null")
    curve = [[record["index"], record["loss"], record["accuracy"]] for record in base]
    real = history("adsp-ec2", 5.0, "15.0")
    smoothed = [(r["t"], r["smoothed_loss"]) for r in real if r["smoothed_loss"] is not None]
    target = smoothed[len(smoothed) // 2][1]
    expected = next(t for t, loss in smoothed if loss <= target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time_to_loss, "TARGET", target)
        found = at_cell({"curve": curve, "bytes_up": 1, "commits": 1}, 2, EC2_5)
    assert found["seconds"] == expected
    assert found["compute_share"] + found["blocked_share"] == pytest.approx(8 / 13)


def test_savings_are_fractions_of_the_rival_s_time() -> None:
    cell = {"devices": "d", "overhead_s": 1.0, "learning_rate": 0.1, "H": 2.0}
    rows: list[dict[str, Any]] = [
        {"strategy": "adsp", "seconds_median": 25.0, **cell},
        {"strategy": "bsp", "seconds_median": 100.0, **cell},
        {"strategy": "never", "seconds_median": None, **cell},
        {"strategy": "bsp", "seconds_median": 30.0, **cell, "overhead_s": 2.0},
    ]
    (entry,) = savings(rows)
    assert entry["saving_vs"] == {"bsp": 0.75, "never": None}


def test_the_cells_are_those_of_the_presets() -> None:
    assert Cell("adsp-ec2-h320", 0.5).degree == pytest.approx(3.2, abs=1e-3)
    assert len(EC2_5.profiles()) == 18


def test_the_page_says_what_was_measured() -> None:
    assert write_docs.PAGE.read_text(encoding="utf-8") == write_docs.page()


def test_sets_of_trainers_share_out_all_that_is_trained() -> None:
    cut = Slice(1, np.array([0, 1]))
    plans = {
        0: WorkerPlan({}, {"a": WHOLE, "b": WHOLE}, (), 1.0, 0, 0),
        1: WorkerPlan({}, {"a": cut}, (), 1.0, 0, 0),
        2: WorkerPlan({}, {"b": WHOLE}, (), 1.0, 0, 0),
    }
    model = {"a": np.zeros((2, 4), np.float32), "b": np.zeros(3, np.float32)}
    plan = LayerPlan((), plans)
    sizes = layer_training.trainer_sets(plan, model)
    assert sizes == {frozenset({0, 1}): 16, frozenset({0}): 16, frozenset({0, 2}): 12}
    found = layer_training.aggregation(plan, model)
    rate, latency = 20e6 / 8, 0.01
    # Worker 0 sends 32 + 12 bytes; worker 1 needs all but what it alone trained, which is nothing.
    assert found["star"] == pytest.approx((44 + 44) / rate + 2 * latency)
    assert found["star_full"] == pytest.approx(2 * 44 / rate + 2 * latency)
    assert found["ring_full"] == pytest.approx(4 * (44 / 3 / rate + latency))
    rings = 2 * (8 / rate + latency) + 2 * (6 / rate + latency)
    assert found["groups"] == pytest.approx(rings + 44 / rate + 3 * latency)  # worker 0


def test_a_round_counts_once_the_mean_of_five_is_there() -> None:
    curve = [[index, value] for index, value in enumerate([0.9, 0.1, 0.5, 0.5, 0.5, 0.6, 0.9, 0.9])]
    assert layer_training.rounds_to(curve, 0.6) == 6
    assert layer_training.rounds_to(curve, 0.95) is None


def test_an_interval_of_ratios_is_around_their_geometric_mean() -> None:
    low, high = overlap.interval([0.5, 2.0, 1.0])
    assert low * high == pytest.approx(1.0)
    assert low < 1.0 < high


def test_models_of_p3s_paper_have_their_size_and_priority_is_never_slower() -> None:
    sizes = {
        name: sum(size for size, _ in network.torchvision_layers(name))
        for name in ("vgg19", "resnet50")
    }
    # torchvision's own figures, without ResNet-50's 53,120 parameters of BatchNorm.
    assert sizes == {"vgg19": 143_667_240, "resnet50": 25_557_032 - 53_120}
    macs = sum(count for _, count in network.torchvision_layers("vgg19"))
    assert macs == pytest.approx(19.63e9, rel=0.01)
    for row in network.slice_rows():
        assert row["p3_s"] <= row["fifo_slices_s"] <= row["whole_s"]
        assert row["p3_s"] >= row["compute_s"]
