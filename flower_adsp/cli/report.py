"""``flower-adsp report``."""

from pathlib import Path
from typing import Annotated

import typer

from flower_adsp.cli import common
from flower_adsp.report.page import write_report


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folder of a run; with several, they are compared.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="Where to write it; by default the first folder.")
    ] = None,
) -> None:
    """Write report.html and its figures about a run, or about several.

    The run may still go on, or have been cut off. Exits with 0, or with 2 if a folder holds no
    run that can be read.

    Example: flower-adsp report outputs/first outputs/second --output outputs/both
    """
    with common.exit_codes():
        target = output or folders[0]
        target.mkdir(parents=True, exist_ok=True)
        typer.echo(f"Report: {write_report(folders, target)}")
