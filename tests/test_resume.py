"""A run that is cut off and resumed equals one that is not, bit for bit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flower_adsp.client_app import app
from flower_adsp.config import load_config
from flower_adsp.errors import ConfigError, NodeCountError
from flower_adsp.experiment import run_experiment
from flower_adsp.testing import InProcessGrid

Run = Callable[..., Path]

FILES = ("history.jsonl", "summary.json", "model.safetensors")
BASE = "run.num_rounds=5 run.evaluate_every=7 train.learning_rate=0.05"
SHORT = "strategy.check_period=20"
RINGS = "run.num_rounds=4 strategy.num_groups=2 strategy.interval=0.25 network.collective=ring"
SLICES = "network.schedule=p3 network.slice_size=200"
MIXED = "strategy.mixed_precision=true"
CASES = {
    "adsp": (SHORT, {}),
    "adsp, jitter and momentum": (
        f"{SHORT} strategy.server_momentum=0.5 train.momentum=0.9",
        {"devices": "lognormal"},
    ),
    "adsp-search": (f"{SHORT} strategy.reward_target=0.5 strategy.epoch=60", {}),
    "adsp-guarded": (f"{SHORT} strategy.guard=1.0", {}),
    "adsp-overlap": (f"{SHORT} train.momentum=0.5", {}),
    "adsp-plus": (SHORT, {}),
    "adsp, coming and going": (SHORT, {"devices": "coming-and-going"}),
    "adsp, shared links": (
        f"{SHORT} network.server_up_mbps=0.2 network.site_down_mbps=0.3",
        {"devices": "coming-and-going"},
    ),
    "adsp, int8": (f"{SHORT} network.codec=int8 train.momentum=0.5", {}),
    "bsp": ("run.num_rounds=30", {}),
    "bsp, slices": ("run.num_rounds=20 network.overhead_s=4 " + SLICES, {"network": "fixed"}),
    "ssp": ("run.num_rounds=20 strategy.pull=blocked strategy.staleness=2", {}),
    "adacomm": ("strategy.interval=10 run.num_rounds=12", {}),
    "batchtune": ("run.num_rounds=12", {}),
    "fedasync": (SHORT, {}),
    "fedbuff": (f"{SHORT} strategy.buffer_size=3", {}),
    "fedcompass": (SHORT, {}),
    "socflow": ("run.num_rounds=4 strategy.num_groups=2 strategy.rebalances=true", {}),
    "socflow, mixed precision": (
        f"run.num_rounds=5 strategy.num_groups=2 strategy.rebalances=true {MIXED}",
        {"devices": "soc-cluster"},
    ),
    "socflow, number of groups tried": (
        f"{RINGS} strategy.num_groups=null {MIXED}",
        {"devices": "soc-cluster"},
    ),
    "socflow, rings in turn": (
        f"{RINGS} network.site_up_mbps=0.3 network.site_down_mbps=0.3",
        {"devices": "coming-and-going"},
    ),
    "dsparse": (
        f"run.num_rounds=8 plan.rotate=true plan.period=2 plan.channels=true {SLICES}",
        {"task": "mnist-resnet"},
    ),
}


def run(folder: Path, settings: dict[str, Any], after: int | None = None) -> None:
    """Run, or die at the handling of a message."""
    calls = 0

    def dying(message: Any, context: Any) -> Any:
        nonlocal calls
        calls += 1
        if after is not None and calls > after:
            raise KeyboardInterrupt
        return app(message, context)

    given = {**settings, "output": str(folder)}
    with InProcessGrid(dying, 4, given) as grid:
        run_experiment(grid, load_config(given))


def settings_of(case: str) -> dict[str, Any]:
    overrides, more = CASES[case]
    return {
        "strategy": case.partition(",")[0],
        "task": "digits-mlp",
        "devices": "adsp-ec2",
        "tracking.progress": "off",
        "tracking.report": "off",
        "overrides": f"{BASE} {overrides}",
        **more,
    }


@pytest.mark.parametrize("case", list(CASES))
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, case: str) -> None:
    settings = settings_of(case)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole, settings)
    commits = sum('"commit"' in line for line in (whole / "history.jsonl").open())
    for share in (0.35, 0.8):
        with pytest.raises(KeyboardInterrupt):
            run(cut, settings, 4 + int(share * commits))
        run(cut, {**settings, "resume": str(cut)})
        for name in FILES:
            assert (cut / name).read_bytes() == (whole / name).read_bytes(), (share, name)
        shutil.rmtree(cut)


def test_a_run_that_has_ended_can_last_longer(tmp_path: Path) -> None:
    settings = settings_of("adsp")
    run(tmp_path / "whole", settings)
    shorter = {**settings, "overrides": f"{settings['overrides']} run.num_rounds=2"}
    run(tmp_path / "run", shorter)
    run(tmp_path / "run", {**settings, "resume": str(tmp_path / "run")})
    whole, after = (
        [json.loads(line) for line in (tmp_path / name / "history.jsonl").open()]
        for name in ("whole", "run")
    )
    assert after == whole


def test_a_run_is_resumed_in_another_folder(tmp_path: Path) -> None:
    settings = settings_of("fedbuff")
    run(tmp_path / "whole", settings)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", settings, 30)
    before = (tmp_path / "cut" / "history.jsonl").read_bytes()
    run(tmp_path / "other", {**settings, "resume": str(tmp_path / "cut")})
    for name in FILES:
        assert (tmp_path / "other" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert (tmp_path / "cut" / "history.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"overrides": "train.learning_rate=0.2"}, "train.learning_rate = 0.2 is not allowed"),
        ({"strategy": "bsp"}, "strategy"),
        ({"seed": 3}, "seed = 3 is not allowed; it must be 0"),
        ({"strategy": "fedavg"}, "strategy"),
    ],
)
def test_another_run_cannot_be_resumed(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    settings = settings_of("adsp") | {"overrides": "run.num_rounds=1"}
    run(tmp_path, settings)
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, {**settings, **change, "resume": str(tmp_path)})
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_what_is_no_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resume = .* folder of a run that has checkpoint"):
        run(tmp_path / "run", {**settings_of("adsp"), "resume": str(tmp_path)})


def test_it_takes_as_many_nodes(tmp_path: Path) -> None:
    settings = settings_of("adsp") | {"overrides": "run.num_rounds=1"}
    run(tmp_path, settings)
    given = {**settings, "overrides": "run.num_rounds=2", "output": str(tmp_path)}
    given["resume"] = str(tmp_path)
    with (
        InProcessGrid(app, 3, given) as grid,
        pytest.raises(NodeCountError, match="partition-id 3"),
    ):
        run_experiment(grid, load_config(given))
