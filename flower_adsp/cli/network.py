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


@network.command("probe")
def probe_links(
    superlink: Annotated[
        str, typer.Argument(help="The connection's name in Flower's config.toml, as of flwr run.")
    ],
    output: Annotated[
        Path, typer.Option(help="YAML file for the preset; on the machine of the SuperLink.")
    ] = Path("links.yaml"),
    nodes: Annotated[int, typer.Option(min=1, help="How many nodes to wait for.")] = 2,
    task: common.Task = "mnist-cnn",
    overrides: common.Overrides = "",
    app: common.App = Path("."),
) -> None:
    """Measure the links between a SuperLink and its SuperNodes, and write a device preset.

    Each node in turn is sent payloads that are timed, and sends some; probe.seconds,
    probe.largest_mb and probe.repeats say how long. The preset holds what each node says of its
    speed and memory, too: ``network plan``, ``plan`` and ``run`` take it as their devices.

    Example: flower-adsp network probe edge --nodes 3 --output links.yaml
    """
    from flower_adsp.launch import SuperLink

    with common.exit_codes():
        path = output.absolute()
        settings = {
            "devices": "measured",
            "task": task,
            "probe": str(path),
            "overrides": f"run.min_available_nodes={nodes} {overrides}".strip(),
        }
        load_config(settings)
        path.unlink(missing_ok=True)  # one of an earlier probe would hide a failure
        with SuperLink(superlink) as link:
            link.finish(link.start(app.absolute(), settings))
        if path.is_file():
            profiles = load_config({"devices": str(path)}).devices.profiles
            common.print_table(
                ["device", "up Mbit/s", "down Mbit/s", "latency s"],
                [
                    [each.name, f"{each.up_mbps:.3g}", f"{each.down_mbps:.3g}",
                     f"{each.latency_s:.2f}"]
                    for each, _ in profiles
                ],
            )  # fmt: skip
        else:
            typer.echo(f"{path} is on the machine of the SuperLink")


def _write(folder: Path, plans: dict[str, Collective]) -> None:
    from flower_adsp.report.figures import save_figure, trees_figure

    folder.mkdir(parents=True, exist_ok=True)
    described = {kind: plan.describe() for kind, plan in plans.items()}
    text = json.dumps(described, indent=1) + "\n"
    (folder / "collective.json").write_text(text, encoding="utf-8")
    save_figure(trees_figure(plans["packed-trees"].trees), folder, "trees")
