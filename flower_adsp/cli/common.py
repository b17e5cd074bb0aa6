"""What the commands share: options, exit codes, and how a run is started and followed."""

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from flower_adsp.config import GROUPS, RUN_CONFIG_KEYS, Config, load_config
from flower_adsp.errors import ConfigError, FlowerAdspError, unknown
from flower_adsp.launch import LocalSuperLink, RunFailed, run_simulation

FAILED, WRONG, INTERRUPTED, TERMINATED = 1, 2, 130, 143
_DEFAULT_NODES = 18  # where a preset describes one device, or none

Strategy = Annotated[str, typer.Option(help="A name in conf/strategy, or a YAML file.")]
Devices = Annotated[str, typer.Option(help="A name in conf/devices, or a YAML file.")]
Task = Annotated[str, typer.Option(help="A name in conf/task, or a YAML file.")]
Network = Annotated[str, typer.Option(help="A name in conf/network, or a YAML file.")]
LayerPlan = Annotated[
    str, typer.Option("--plan", help="A name in conf/plan; auto: by the strategy.")
]
Seed = Annotated[int, typer.Option(help="Seed of every random draw.")]
Output = Annotated[Path | None, typer.Option(help="Folder for the files.")]
Overrides = Annotated[
    str, typer.Option(help='Such as "strategy.check_period=30 task.batch_size=64".')
]
NumSupernodes = Annotated[
    int, typer.Option(min=0, help="Simulated devices; 0 takes as many as the preset has.")
]
NumActors = Annotated[int, typer.Option(min=0, help="Ray actors; 0 takes one for each core.")]
App = Annotated[Path, typer.Option(help="Folder of the Flower app.")]


class _Terminated(BaseException):
    """SIGTERM came: what batch systems and ``timeout`` send."""


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Say what went wrong, and exit.

    With 1 for a failed run, 2 for wrong input, 130 for Ctrl-C, 143 for SIGTERM.
    """

    def terminate(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough, while all is stopped
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except FlowerAdspError as error:
        typer.secho(f"Error: {error}", fg="red", err=True)
        raise typer.Exit(FAILED if isinstance(error, RunFailed) else WRONG) from None
    except (KeyboardInterrupt, _Terminated) as error:
        typer.secho("Interrupted; what was started has been stopped", fg="red", err=True)
        code = TERMINATED if isinstance(error, _Terminated) else INTERRUPTED
        raise typer.Exit(code) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def new_folder(output: Path | None, name: str) -> Path:
    """Return the folder to write to: the one asked for, or one below ``outputs``."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return (output or Path("outputs") / f"{stamp}_{name}").absolute()


def with_settings(run_config: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """Lay settings of the form ``KEY=VALUE`` over a run config.

    Parameters
    ----------
    run_config : Mapping[str, Any]
        What Flower calls the run config.
    settings : Iterable[str]
        A key of the run config, or ``section.key`` as in its ``overrides``.

    Returns
    -------
    dict[str, Any]
        The run config with them.

    Raises
    ------
    ConfigError
        If one is not of that form, or its key does not exist.
    """
    merged = dict(run_config)
    overrides = [str(merged.get("overrides", ""))]
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise ConfigError(f"{setting!r} is not of the form KEY=VALUE, as in strategy=ssp")
        if key == "seed":
            if not value.isdecimal():
                raise ConfigError(f"seed = {value!r} is not allowed; it must be an integer >= 0")
            merged[key] = int(value)
        elif key in RUN_CONFIG_KEYS and key != "overrides":
            merged[key] = value
        elif "." in key:
            overrides.append(f"{key}={shlex.quote(value)}")
        else:
            raise unknown("setting", key, (*GROUPS, "seed", "section.key"))
    merged["overrides"] = " ".join(part for part in overrides if part)
    return merged


def checked(run_config: Mapping[str, Any]) -> Config:
    """Return the config, with its task and strategy tried, before Ray is started for it."""
    from flower_adsp.experiment import check_config

    config = load_config(run_config)
    check_config(config)
    return config


def number_of_nodes(config: Config, asked: int) -> int:
    """Return how many devices to simulate."""
    in_preset = sum(count for _, count in config.devices.profiles)
    return asked or (in_preset if in_preset > 1 else _DEFAULT_NODES)


def simulate(
    app: Path,
    run_config: Mapping[str, Any],
    num_supernodes: int,
    num_actors: int,
    live: bool | None = None,
    link: LocalSuperLink | None = None,
) -> dict[str, Any]:
    """Run a simulation to its end, and show it as it goes.

    Parameters
    ----------
    app : Path
        Folder of the Flower app.
    run_config : Mapping[str, Any]
        What Flower calls the run config; with an absolute ``output``.
    num_supernodes, num_actors : int
        Devices, and Ray actors that take turns in being one; 0 chooses.
    live : bool or None (default: None)
        A live table in place of log lines; None: if this is a terminal.
    link : LocalSuperLink or None (default: None)
        A SuperLink that serves several runs.

    Returns
    -------
    dict[str, Any]
        What the run's ``summary.json`` holds.
    """
    from flower_adsp.live import LiveView

    nodes = number_of_nodes(checked(run_config), num_supernodes)
    actors = num_actors or os.cpu_count() or 1
    if live is None:
        live = sys.stdout.isatty()
    if not live:
        return run_simulation(app.absolute(), run_config, nodes, actors, link=link)
    with LiveView(Path(run_config["output"])):
        return run_simulation(app.absolute(), run_config, nodes, actors, True, link)


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """Print a table, its first column to the left."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        typer.echo("  ".join(cells).rstrip())
