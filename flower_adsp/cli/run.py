"""``flower-adsp run`` and ``resume``."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from flower_adsp.cli import common
from flower_adsp.experiment import saved_settings
from flower_adsp.sweeps import settings_of_agent
from flower_adsp.tracking.files import REPORT

Live = Annotated[
    bool | None,
    typer.Option("--live/--lines", help="A live table or log lines; by default as it fits."),
]


def run(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Any setting, such as strategy=ssp or strategy.staleness=10; goes before options.",
        ),
    ] = None,
    strategy: common.Strategy = "adsp",
    devices: common.Devices = "adsp-ec2",
    task: common.Task = "mnist-cnn",
    network: common.Network = "links",
    layer_plan: common.LayerPlan = "auto",
    seed: common.Seed = 0,
    output: common.Output = None,
    initial_model: Annotated[
        str, typer.Option(help="Folder of an earlier run, whose model to begin with.")
    ] = "",
    overrides: common.Overrides = "",
    num_supernodes: common.NumSupernodes = 0,
    num_actors: common.NumActors = 0,
    app: common.App = Path("."),
    live: Live = None,
) -> None:
    """Run a simulation through ``flwr run``, with a SuperLink of its own.

    Exits with 0 when the run completed, 1 when it failed, 2 when the settings are wrong, 130 when
    it was interrupted.

    Example: flower-adsp run --strategy ssp --devices rpi-mixed --overrides run.num_rounds=50
    """
    with common.exit_codes():
        run_config: dict[str, Any] = {
            "strategy": strategy,
            "devices": devices,
            "task": task,
            "network": network,
            "plan": layer_plan,
            "seed": seed,
            "initial_model": str(Path(initial_model).absolute()) if initial_model else "",
            "overrides": overrides,
        }
        run_config |= settings_of_agent(os.environ)
        run_config = common.with_settings(run_config, settings or [])
        name = Path(run_config["strategy"]).stem
        given = run_config.get("output")
        folder = common.new_folder(Path(given) if given else output, name)
        run_config["output"] = str(folder)
        _run(app, run_config, num_supernodes, num_actors, live)


def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of a run that did not come to its end.")],
    overrides: Annotated[
        str, typer.Option(help='What is to be otherwise, such as "run.num_rounds=40".')
    ] = "",
    num_actors: common.NumActors = 0,
    app: common.App = Path("."),
    live: Live = None,
) -> None:
    """Go on with a simulation that was cut off, or with one that is to last longer.

    Settings, devices and data are those of the run; exits as ``run`` does.

    Example: flower-adsp resume outputs/first --overrides run.num_rounds=40
    """
    with common.exit_codes():
        run_config, num_workers = saved_settings(folder)
        run_config |= {"output": str(folder.absolute()), "resume": str(folder.absolute())}
        run_config["overrides"] = f"{run_config.get('overrides', '')} {overrides}".strip()
        _run(app, run_config, num_workers, num_actors, live)


def _run(app: Path, run_config: dict[str, Any], nodes: int, actors: int, live: bool | None) -> None:
    folder = Path(run_config["output"])
    numbers = common.simulate(app, run_config, nodes, actors, live)
    figures = ", ".join(f"{key} {value:.4f}" for key, value in numbers["test"].items())
    typer.echo(f"Test: {figures}. The files are in {folder}")
    if (folder / REPORT).is_file():
        typer.echo(f"Report: {folder / REPORT}")
