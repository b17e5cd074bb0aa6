"""One run from its settings to its files."""

import json
import os
import shutil
import time
from dataclasses import asdict
from datetime import datetime
from importlib.util import find_spec
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from omegaconf import OmegaConf
from safetensors.numpy import load_file, save_file

from flower_adsp.arrays import decode, encode
from flower_adsp.config import Config
from flower_adsp.errors import ConfigError, NodeCountError, require
from flower_adsp.messages import software_versions
from flower_adsp.network.slices import WHOLE
from flower_adsp.sparse.profile import LayerCost, layer_costs
from flower_adsp.tasks.base import Task
from flower_adsp.tasks.batches import first_batch
from flower_adsp.tasks.build import build_task
from flower_adsp.tasks.validation import Validation
from flower_adsp.tracking.files import CHECKPOINT, CONFIG, HISTORY, HOST, MODEL, SUMMARY
from flower_adsp.tracking.history import History
from flower_adsp.tracking.progress import Progress
from flower_adsp.tracking.summary import Summary, format_summary

# What a resumed run may have otherwise than the run that it goes on with.
_FREE = {
    "num_rounds", "max_seconds", "target_loss", "min_available_nodes", "node_timeout",
    "reply_timeout", "save_every",
}  # fmt: skip


def run_experiment(grid: Grid, config: Config) -> dict[str, Any]:
    """Run what a config asks for, and write the run's folder.

    Parameters
    ----------
    grid : Grid
        Flower's way to the nodes.
    config : Config
        All settings.

    Returns
    -------
    dict[str, Any]
        What ``summary.json`` holds.
    """
    began = time.time()
    torch.set_num_threads(1)
    task = build_task(config)
    arrays = _initial_arrays(task, config.initial_model)
    folder = _output_folder(config)
    saved = _saved_run(config, folder)
    if saved is None:
        for name in (HISTORY, CHECKPOINT, SUMMARY):
            (folder / name).unlink(missing_ok=True)
    _write_json(folder / CONFIG, {"run_config": config.given, "settings": config.describe()})
    summary = Summary()
    callbacks: list[Any] = [History(folder / HISTORY), summary]
    if config.tracking.progress == "lines":
        callbacks.append(Progress())
    tracker = None
    if config.tracking.wandb != "disabled":
        from flower_adsp.tracking.wandb import WandbTracker

        tracker = WandbTracker(config.tracking, folder, config.describe())
        callbacks.append(tracker)
    strategy = _build_strategy(config, task, callbacks, folder / CHECKPOINT, saved)
    log(INFO, "The files of this run go to %s", folder)
    try:
        numbers = _train(grid, config, task, strategy, arrays, folder, summary)
        if tracker is not None:
            tracker.complete(numbers)
    finally:
        if tracker is not None:
            tracker.abandon()
    _write_json(folder / HOST, {"began": began, "seconds": time.time() - began})
    return numbers


def run_probe(grid: Grid, config: Config) -> None:
    """Measure the links of all nodes, and write a device preset with what was found.

    Parameters
    ----------
    grid : Grid
        Flower's way to the nodes.
    config : Config
        Settings; ``probe`` is the file.

    Raises
    ------
    ConfigError
        If ``probe`` is no place for a file.
    NodeCountError
        If too few nodes answered.
    """
    from flower_adsp.strategies.options import LoopOptions
    from flower_adsp.strategies.probe import describe, probe_links

    path = Path(config.probe).expanduser()
    ok = path.suffix in (".yaml", ".yml") and path.parent.is_dir()
    require(ok, "probe", config.probe, "the path of a .yaml file in a folder that exists")
    run, probing = config.run, config.probing
    options = LoopOptions(
        clock="wall",
        seed=config.seed,
        min_available_nodes=run.min_available_nodes,
        node_timeout=run.node_timeout,
    )
    found = probe_links(
        grid, options, run.reply_timeout,
        probing.seconds, round(probing.largest_mb * 1e6), probing.repeats,
    )  # fmt: skip
    if not found:
        raise NodeCountError("no node answered with a payload; see the warnings above")
    profiles = [asdict(each.profile) for each in found]
    source = "Measured by flower-adsp network probe, latencies with Flower's own share:\n"
    lines = "\n".join(describe(each) for each in found)
    preset = OmegaConf.create({"source": f"{source}{lines}", "profiles": profiles})
    OmegaConf.save(preset, path)
    log(INFO, "Written: %s", path)


def _train(
    grid: Grid,
    config: Config,
    task: Task,
    strategy: Strategy,
    arrays: ArrayRecord,
    folder: Path,
    summary: Summary,
) -> dict[str, Any]:
    """Train, evaluate, and write the run's model, summary and report."""
    evaluate = _Evaluator(task, folder / MODEL)
    result = strategy.start(
        grid,
        arrays,
        num_rounds=config.run.num_rounds,
        timeout=config.run.reply_timeout,
        train_config=_train_config(config),
        evaluate_fn=evaluate.validation,
    )
    final = result.arrays or arrays
    numbers: dict[str, Any] = {
        "config": config.describe(),
        "versions": software_versions(),
        **(summary.numbers or _rounds(result.evaluate_metrics_serverapp)),
        "test": evaluate.metrics(final, "test"),
    }
    _save_model(folder / MODEL, final)
    _write_json(folder / SUMMARY, numbers)  # last: it says that the run is whole
    if config.tracking.report == "html":
        _report(folder)
    for line in format_summary(numbers):
        log(INFO, "%s", line)
    return numbers


def _report(folder: Path) -> None:
    """Write the report, unless what draws it is not installed or there is no history."""
    if not (folder / HISTORY).is_file() or find_spec("matplotlib") is None:
        return
    from flower_adsp.report.page import write_report

    try:
        write_report([folder], folder)
    except Exception as error:  # a run that is whole is not to fail for a picture
        log(WARNING, "No report was made: %s: %s", type(error).__name__, error)


def saved_settings(folder: Path) -> tuple[dict[str, Any], int]:
    """Return the run config of the run in a folder, and the number of its workers.

    Raises
    ------
    ConfigError
        If the folder does not hold a run that can be resumed.
    """
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"resume = {str(folder)!r} holds no {CONFIG}; it must be the folder of a run that can "
            "be resumed"
        )
    try:
        saved = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["run_config"]
        with (folder / HISTORY).open(encoding="utf-8") as lines:
            workers = json.loads(next(lines))["workers"]
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise ConfigError(
            f"resume = {str(folder)!r} is not the folder of a run that can be resumed: "
            f"{type(error).__name__}: {error}"
        ) from None
    return dict(saved), len(workers)


def check_config(config: Config) -> None:
    """Build the task and the strategy that a config asks for, to see that they can be.

    Raises
    ------
    ConfigError
        If a value is out of range.
    """
    _build_strategy(config, build_task(config), [])


class _Evaluator:
    """Evaluates models on the server's data; one module serves all evaluations.

    What is evaluated during a run is saved too, so that a run that breaks off leaves a model.
    """

    def __init__(self, task: Task, path: Path) -> None:
        self._task = task
        self._path = path
        self._model = task.build_model()

    def metrics(self, arrays: ArrayRecord, split: Any) -> dict[str, float]:
        self._model.load_state_dict(arrays.to_torch_state_dict())
        return self._task.metrics(self._model, self._task.held_out_data(split))

    def validation(self, index: int, arrays: ArrayRecord) -> MetricRecord:
        _save_model(self._path, arrays)
        return MetricRecord(dict(self.metrics(arrays, "validation")))


def _build_strategy(
    config: Config,
    task: Task,
    callbacks: list[Any],
    checkpoint: Path | None = None,
    resume: Path | None = None,
) -> Strategy:
    # Late: what a user's own Flower strategy does not need is not imported.
    from flower_adsp.strategies.options import LoopOptions

    run = config.run
    planner = config.plan.build(task=task, with_momentum=config.train.momentum > 0)
    loop = LoopOptions(
        clock="virtual" if config.is_virtual else "wall",
        seed=config.seed,
        network=config.network,
        layers=_layers(task) if config.is_virtual and config.network.schedule != WHOLE else (),
        weighting=run.weighting,
        evaluate_every=run.evaluate_every,
        max_seconds=run.max_seconds,
        target_loss=run.target_loss,
        smoothing_seconds=run.smoothing_seconds,
        min_available_nodes=run.min_available_nodes,
        node_timeout=run.node_timeout,
        stock_profiles=[profile for profile, count in config.devices.profiles for _ in range(count)]
        or LoopOptions().stock_profiles,
        planner=planner,
        callbacks=callbacks,
        checkpoint=None if run.save_every is None else checkpoint,
        save_every=run.save_every or 1,
        resume=resume,
        deadline_factor=run.deadline_factor,
        failures_before_rest=run.failures_before_rest,
        norm_limit=run.norm_limit,
    )
    if config.strategy.settings.get("mixed_precision"):
        momentum = config.train.momentum
        require(momentum == 0, "train.momentum", momentum, "0 with strategy.mixed_precision")
    strategy = config.strategy.build(loop=loop, validation=Validation(task))
    require(
        planner is None or config.strategy.keeps_time,
        "plan",
        config.plan.name,
        f"none with the strategy {config.strategy.name!r}, which trains whole models",
    )
    require(
        resume is None or config.strategy.keeps_time,
        "resume",
        config.resume,
        f"empty with the strategy {config.strategy.name!r}, which keeps no checkpoints; "
        "initial_model begins with the model of an earlier run",
    )
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"strategy.target = {config.strategy.name!r} made a {type(strategy).__name__}, which "
            "is not a flwr.serverapp.strategy.Strategy"
        )
    return strategy


def _layers(task: Task) -> tuple[LayerCost, ...]:
    batch = first_batch(task)
    return layer_costs(task.build_model(), lambda model: task.loss(model, batch))


def _train_config(config: Config) -> ConfigRecord:
    record = ConfigRecord({"lr": config.train.learning_rate})
    if config.train.half_life is not None:
        record["lr-half-life"] = config.train.half_life
    return record


def _initial_arrays(task: Task, given: str) -> ArrayRecord:
    """Return the task's initial model, or the one that an earlier run left in its folder."""
    initial = ArrayRecord(task.build_model().state_dict())
    if not given:
        return initial
    path = Path(given).expanduser() / MODEL
    require(path.is_file(), "initial_model", given, f"the folder of a run that has {MODEL}")
    try:
        weights = load_file(path)
    except Exception as error:  # safetensors raises its own kinds
        raise ConfigError(f"initial_model = {given!r}: cannot read {path}: {error}") from None
    expected = {name: array.shape for name, array in decode(initial).items()}
    found = {name: array.shape for name, array in weights.items()}
    require(found == expected, "initial_model", given, "the folder of a run with the same model")
    return encode({name: weights[name] for name in expected})


def _saved_run(config: Config, folder: Path) -> Path | None:
    """Return the checkpoint to go on from, in the run's folder; None for a new run.

    Where that is not the folder of the run to resume, its files are copied.
    """
    if not config.resume:
        return None
    source = Path(config.resume).expanduser().resolve()
    require(
        (source / CHECKPOINT).is_file() and (source / CONFIG).is_file(),
        "resume",
        config.resume,
        f"the folder of a run that has {CHECKPOINT}; initial_model begins a new run with the "
        "model of an earlier one",
    )
    try:
        earlier = json.loads((source / CONFIG).read_text(encoding="utf-8"))["settings"]
        was, now = _flat(earlier), _flat(config.describe())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"resume = {config.resume!r}: cannot read {CONFIG}: {error}") from None
    for key in sorted(was.keys() | now.keys()):
        if key.partition(".")[2] not in _FREE:
            require(
                was.get(key) == now.get(key),
                key,
                now.get(key),
                f"{was.get(key)!r}, as in the run to resume, {config.resume}",
            )
    if source != folder:
        for name in (HISTORY, CHECKPOINT, MODEL):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    return folder / CHECKPOINT


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return nested settings by ``section.key``."""
    flat: dict[str, Any] = {}
    for section, content in settings.items():
        if isinstance(content, dict):
            flat |= {f"{section}.{key}": value for key, value in content.items()}
        else:
            flat[section] = content
    return flat


def _output_folder(config: Config) -> Path:
    if config.output or config.resume:
        folder = Path(config.output or config.resume).expanduser()
    else:
        stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        folder = Path("outputs") / f"{stamp}_{config.strategy.name.replace(':', '.')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output = {config.output!r} cannot be made: {error}") from None
    require(os.access(folder, os.W_OK), "output", str(folder), "a folder that can be written")
    return folder.resolve()


def _rounds(evaluations: dict[int, MetricRecord]) -> dict[str, Any]:
    """Sum up a run of one of Flower's own strategies, which keep no time."""
    last = max(evaluations, default=0)
    return {
        "rounds": last,
        "validation": dict(evaluations.get(last, {})),
        "evaluations": {str(index): dict(record) for index, record in evaluations.items()},
    }


def _save_model(path: Path, arrays: ArrayRecord) -> None:
    """Write a model whole or not at all."""
    temporary = path.with_suffix(".partial")
    save_file(decode(arrays), temporary)
    temporary.replace(path)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
