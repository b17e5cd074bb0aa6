"""``flower-adsp plan``."""

from typing import Annotated

import typer

from flower_adsp.cli import common
from flower_adsp.config import load_config
from flower_adsp.plan_table import plan_table


def plan(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings, such as plan.channels=true."),
    ] = None,
    task: common.Task = "mobilenetv2",
    devices: common.Devices = "dsparse-seven",
    layer_plan: Annotated[str, typer.Option("--plan", help="A name in conf/plan.")] = "dsparse",
    seed: common.Seed = 0,
    overrides: common.Overrides = "",
    num_supernodes: common.NumSupernodes = 0,
) -> None:
    """Print which device would train which layers, and the memory that takes.

    Exits with 0 if every layer is trained by some device, 1 if not, 2 when the settings are wrong.

    Example: flower-adsp plan --task mobilenetv2 --devices dsparse-seven plan.channels=true
    """
    run_config = {
        "task": task,
        "devices": devices,
        "plan": layer_plan,
        "seed": seed,
        "overrides": overrides,
    }
    with common.exit_codes():
        config = load_config(common.with_settings(run_config, settings or []))
        typer.echo("Profiling the model, layer by layer", err=True)
        lines, uncovered = plan_table(config, num_supernodes)
        for line in lines:
            typer.echo(line)
    if uncovered:
        raise typer.Exit(common.FAILED)
