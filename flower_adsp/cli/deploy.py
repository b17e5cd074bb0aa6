"""``flower-adsp deploy-demo``."""

from pathlib import Path
from typing import Annotated

import typer

from flower_adsp.cli import common


def deploy_demo(
    seconds: Annotated[float, typer.Option(min=10, help="Real time to train for.")] = 120.0,
    output: common.Output = None,
    app: common.App = Path("."),
) -> None:
    """Train for two minutes on three real SuperNodes of unequal speed and memory, on this machine.

    A SuperLink with TLS that knows its SuperNodes by their keys, ADSP, and a layer plan. All is
    stopped at the end. Exits as ``run`` does.
    """
    with common.exit_codes():
        from flower_adsp.deployment import demonstrate

        for line in demonstrate(app.absolute(), common.new_folder(output, "deploy-demo"), seconds):
            typer.echo(line)
