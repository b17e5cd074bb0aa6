"""``flower-adsp compare``."""

from pathlib import Path
from typing import Annotated

import typer

from flower_adsp.cli import common
from flower_adsp.errors import ConfigError
from flower_adsp.launch import LocalSuperLink
from flower_adsp.report.page import comparison_rows, write_report
from flower_adsp.report.runs import read_run

_NO_END = 1_000_000_000  # rounds: the clock ends these runs


def compare(
    strategies: Annotated[
        str, typer.Option(help="Names in conf/strategy, or YAML files, with commas between them.")
    ] = "adsp,bsp,ssp,fedasync",
    seconds: Annotated[
        float, typer.Option(min=1, help="Time that each gets, on the run's clock.")
    ] = 300.0,
    target_loss: Annotated[
        float, typer.Option(min=0, help="End a run that has come down to this loss; 0: none does.")
    ] = 0.0,
    devices: common.Devices = "adsp-ec2",
    task: common.Task = "mnist-cnn",
    network: common.Network = "links",
    layer_plan: common.LayerPlan = "none",
    seed: common.Seed = 0,
    output: common.Output = None,
    overrides: common.Overrides = "",
    num_supernodes: common.NumSupernodes = 0,
    num_actors: common.NumActors = 0,
    app: common.App = Path("."),
) -> None:
    """Run several strategies on the same devices, data and seed, and compare them in a report.

    Each gets the same time of the run's clock. Exits as ``run`` does.

    Example: flower-adsp compare --strategies adsp,bsp,ssp,fedasync --devices adsp-ec2 --seed 0
    """
    with common.exit_codes():
        names = [name.strip() for name in strategies.split(",") if name.strip()]
        if len(names) < 2 or len(set(names)) < len(names):
            raise ConfigError(
                f"strategies = {strategies!r} is not allowed; it must be two or more different "
                "names with commas between them"
            )
        folder = common.new_folder(output, "compare")
        ends = f"run.num_rounds={_NO_END} run.max_seconds={seconds}"
        if target_loss:
            ends += f" run.target_loss={target_loss}"
        run_configs = [
            {
                "strategy": name,
                "devices": devices,
                "task": task,
                "network": network,
                "plan": layer_plan,
                "seed": seed,
                "output": str(folder / Path(name).stem),
                "overrides": f"{ends} {overrides}".strip(),
            }
            for name in names
        ]
        for run_config in run_configs:  # before the first of them takes its time
            config = common.checked(run_config)
            if not config.strategy.keeps_time:
                raise ConfigError(
                    f"strategies: {config.strategy.name!r} is one of Flower's own, which keep no "
                    "time; fixed-adacomm is FedAvg with a number of local steps"
                )
        with LocalSuperLink() as link:
            for run_config in run_configs:
                typer.echo(f"{run_config['strategy']}:")
                common.simulate(app, run_config, num_supernodes, num_actors, link=link)
        folders = [Path(str(run_config["output"])) for run_config in run_configs]
        head, rows = comparison_rows([read_run(each) for each in folders])
        typer.echo("")
        common.print_table(head, rows)
        typer.echo(f"Report: {write_report(folders, folder)}")
