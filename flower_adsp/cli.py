"""The ``flower-adsp`` command."""

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from flower_adsp.config import load_config
from flower_adsp.errors import FlowerAdspError
from flower_adsp.experiment import check_config, saved_settings
from flower_adsp.launch import run_simulation
from flower_adsp.plan_table import plan_table

main = typer.Typer(
    no_args_is_help=True,
    help="Train one model across unequal edge devices with Flower.",
    pretty_exceptions_enable=False,
)

_INTERRUPTED = 130


@main.command()
def run(
    strategy: Annotated[
        str, typer.Option(help="A name in conf/strategy, or a YAML file.")
    ] = "adsp",
    devices: Annotated[str, typer.Option(help="A name in conf/devices.")] = "adsp-ec2",
    task: Annotated[str, typer.Option(help="A name in conf/task.")] = "mnist-cnn",
    network: Annotated[str, typer.Option(help="A name in conf/network.")] = "links",
    layer_plan: Annotated[
        str, typer.Option("--plan", help="A name in conf/plan; auto: by the strategy.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of every random draw.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Folder of the run's files.")] = None,
    initial_model: Annotated[
        str, typer.Option(help="Folder of an earlier run, whose model to begin with.")
    ] = "",
    overrides: Annotated[
        str, typer.Option(help='Such as "strategy.check_period=30 task.batch_size=64".')
    ] = "",
    num_supernodes: Annotated[int, typer.Option(min=1, help="Simulated devices.")] = 18,
    num_actors: Annotated[
        int, typer.Option(min=0, help="Ray actors; 0 takes one for each core.")
    ] = 0,
    app: Annotated[Path, typer.Option(help="Folder of the Flower app.")] = Path("."),
) -> None:
    """Run a simulation through ``flwr run``, with a SuperLink of its own.

    Exits with 0 when the run completed, 1 when it failed, 2 when the settings are wrong, 130 when
    it was interrupted.
    """
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = (output or Path("outputs") / f"{stamp}_{Path(strategy).stem}").absolute()
    run_config = {
        "strategy": strategy,
        "devices": devices,
        "task": task,
        "network": network,
        "plan": layer_plan,
        "seed": seed,
        "output": str(folder),
        "initial_model": str(Path(initial_model).absolute()) if initial_model else "",
        "overrides": overrides,
    }
    _simulate(app, run_config, num_supernodes, num_actors)


@main.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of a run that did not come to its end.")],
    overrides: Annotated[
        str, typer.Option(help='What is to be otherwise, such as "run.num_rounds=40".')
    ] = "",
    num_actors: Annotated[
        int, typer.Option(min=0, help="Ray actors; 0 takes one for each core.")
    ] = 0,
    app: Annotated[Path, typer.Option(help="Folder of the Flower app.")] = Path("."),
) -> None:
    """Go on with a simulation that was cut off, or with one that is to last longer.

    Settings, devices and data are those of the run; exits as ``run`` does.
    """
    try:
        run_config, num_workers = saved_settings(folder)
    except FlowerAdspError as error:
        typer.secho(f"Error: {error}", fg="red", err=True)
        raise typer.Exit(2) from None
    run_config |= {"output": str(folder.absolute()), "resume": str(folder.absolute())}
    run_config["overrides"] = f"{run_config.get('overrides', '')} {overrides}".strip()
    _simulate(app, run_config, num_workers, num_actors)


def _simulate(app: Path, run_config: dict[str, Any], num_supernodes: int, num_actors: int) -> None:
    """Run a simulation, and exit with the code for what came of it."""
    folder = run_config["output"]
    try:
        check_config(load_config(run_config))  # said at once, not after Ray has started
    except FlowerAdspError as error:
        typer.secho(f"Error: {error}", fg="red", err=True)
        raise typer.Exit(2) from None
    try:
        numbers = run_simulation(
            app.absolute(), run_config, num_supernodes, num_actors or os.cpu_count() or 1
        )
    except FlowerAdspError as error:
        typer.secho(f"Error: {error}", fg="red", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.secho("Interrupted; the run was stopped", fg="red", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    figures = ", ".join(f"{key} {value:.4f}" for key, value in numbers["test"].items())
    typer.echo(f"Test: {figures}. The files are in {folder}")


@main.command()
def deploy_demo(
    seconds: Annotated[float, typer.Option(min=10, help="Real time to train for.")] = 120.0,
    output: Annotated[Path | None, typer.Option(help="Folder of the run's files.")] = None,
    app: Annotated[Path, typer.Option(help="Folder of the Flower app.")] = Path("."),
) -> None:
    """Train for two minutes on three real SuperNodes of unequal speed and memory, on this machine.

    A SuperLink with TLS that knows its SuperNodes by their keys, ADSP, and a layer plan. All is
    stopped at the end. Exits with 0 when the run completed, 1 when it failed.
    """
    from flower_adsp.deployment import demonstrate

    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = (output or Path("outputs") / f"{stamp}_deploy-demo").absolute()
    try:
        lines = demonstrate(app.absolute(), folder, seconds)
    except FlowerAdspError as error:
        typer.secho(f"Error: {error}", fg="red", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.secho("Interrupted; all processes were stopped", fg="red", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    for line in lines:
        typer.echo(line)


@main.command()
def plan(
    task: Annotated[str, typer.Option(help="A name in conf/task.")] = "mobilenetv2",
    devices: Annotated[str, typer.Option(help="A name in conf/devices.")] = "dsparse-seven",
    layer_plan: Annotated[str, typer.Option("--plan", help="A name in conf/plan.")] = "dsparse",
    seed: Annotated[int, typer.Option(help="Seed of the task.")] = 0,
    overrides: Annotated[
        str, typer.Option(help='Such as "plan.channels=false train.momentum=0.9".')
    ] = "",
    num_supernodes: Annotated[
        int, typer.Option(min=0, help="Devices; 0 takes as many as the preset has.")
    ] = 0,
) -> None:
    """Print which device would train which layers, and the memory that takes.

    Exits with 0 if every layer is trained by some device, 1 if not, 2 when the settings are wrong.
    """
    settings = {
        "task": task,
        "devices": devices,
        "plan": layer_plan,
        "seed": seed,
        "overrides": overrides,
    }
    try:
        lines, uncovered = plan_table(load_config(settings), num_supernodes)
    except FlowerAdspError as error:
        typer.secho(f"Error: {error}", fg="red", err=True)
        raise typer.Exit(2) from None
    for line in lines:
        typer.echo(line)
    if uncovered:
        raise typer.Exit(1)
