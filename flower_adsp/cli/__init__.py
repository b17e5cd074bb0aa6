"""The ``flower-adsp`` command; one module for each of its parts."""

import typer

from flower_adsp.cli.compare import compare
from flower_adsp.cli.deploy import deploy_demo
from flower_adsp.cli.devices import devices
from flower_adsp.cli.network import network
from flower_adsp.cli.plan import plan
from flower_adsp.cli.report import report
from flower_adsp.cli.run import resume, run
from flower_adsp.cli.sweep import sweep

main = typer.Typer(
    no_args_is_help=True,
    help="Train one model across unequal edge devices with Flower.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run, resume, compare, report, plan, sweep, deploy_demo):
    main.command()(command)
main.add_typer(devices, name="devices")
main.add_typer(network, name="network")
