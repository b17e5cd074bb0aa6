"""``flower-adsp network``."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flower_adsp.cli import common
from flower_adsp.config import load_config
from flower_adsp.devices import deal
from flower_adsp.network.collectives import COLLECTIVES, Collective, plan_collective

network = typer.Typer(help="How commits could travel.", no_args_is_help=True)


@network.callback()
def _of_its_own() -> None:
    """Have ``plan`` be a command below this one, although there is no other yet."""


@network.command("plan")
def plan_trees(
    devices: common.Devices = "rpi-mixed",
    links: Annotated[
        str, typer.Option("--network", help="A name in conf/network, or a YAML file.")
    ] = "shared-server",
    megabytes: Annotated[float, typer.Option(min=0.001, help="Size of the model.")] = 10.0,
    num_supernodes: common.NumSupernodes = 0,
    output: Annotated[
        Path | None, typer.Option(help="Folder for collective.json, trees.png and trees.svg.")
    ] = None,
) -> None:
    """Print how long a barrier takes along trees between devices, and along their rivals.

    Flower's nodes send to the server only: the star is what it does. The others are what a
    transport of one's own between the devices would gain, each of which can send to each.

    Example: flower-adsp network plan --devices rpi-mixed --network shared-server
    """
    with common.exit_codes():
        config = load_config({"devices": devices, "network": links})
        number = common.number_of_nodes(config, num_supernodes)
        cards = config.network.cards(deal(config.devices.profiles, number))
        plans = {kind: plan_collective(kind, cards) for kind in COLLECTIVES}
        size = round(megabytes * 1e6)
        common.print_table(
            ["collective", "trees", "reduce Mb/s", "broadcast Mb/s", f"s for {megabytes:g} MB"],
            [
                [
                    kind,
                    str(len(plan.trees) or "-"),
                    f"{plan.reduce_mbps:.4g}",
                    f"{plan.broadcast_mbps:.4g}",
                    f"{sum(plan.seconds(size, upload=way) for way in (True, False)):.2f}",
                ]
                for kind, plan in plans.items()
            ],
        )
        packed = plans["packed-trees"]
        typer.echo("Packed trees; 0 is the server, and device n is n + 1:")
        for tree, part in packed.trees:
            edges = ", ".join(f"{a}->{b}" for a, b in sorted(tree))
            typer.echo(f"  {100 * part:.0f} % of the data: {edges}")
        if output is not None:
            _write(output, plans)
            typer.echo(f"Written: {output / 'collective.json'}")


def _write(folder: Path, plans: dict[str, Collective]) -> None:
    from flower_adsp.report.figures import save_figure, trees_figure

    folder.mkdir(parents=True, exist_ok=True)
    described = {kind: plan.describe() for kind, plan in plans.items()}
    text = json.dumps(described, indent=1) + "\n"
    (folder / "collective.json").write_text(text, encoding="utf-8")
    save_figure(trees_figure(plans["packed-trees"].trees), folder, "trees")
