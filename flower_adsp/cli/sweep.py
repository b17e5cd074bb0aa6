"""``flower-adsp sweep``."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from flower_adsp.cli import common
from flower_adsp.errors import ConfigError
from flower_adsp.launch import LocalSuperLink, RunFailed
from flower_adsp.sweeps import Sweep, check_metric, figure, read_sweep
from flower_adsp.tasks.build import build_task

TABLE = "sweep.csv"


def sweep(
    file: Annotated[str, typer.Argument(help="A W&B sweep file, or a name in conf/sweep.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that all runs have."),
    ] = None,
    runs: Annotated[
        int, typer.Option(min=0, help="The most runs; 0: all of a grid, run_cap for draws.")
    ] = 0,
    seed: common.Seed = 0,
    output: common.Output = None,
    num_supernodes: common.NumSupernodes = 0,
    num_actors: common.NumActors = 0,
    app: common.App = Path("."),
) -> None:
    """Run a sweep file without any server, as a grid or at random; the results in one table.

    Exits with 0, 1 if a run failed, 2 when the file or a setting is wrong.

    Example: flower-adsp sweep strategies run.max_seconds=120
    """
    with common.exit_codes():
        chosen = read_sweep(file)
        combinations = chosen.combinations(runs or None, seed)
        folder = common.new_folder(output, f"sweep-{chosen.name}")
        base = common.with_settings({"seed": seed}, settings or [])
        run_configs: list[dict[str, Any]] = []
        for number, values in enumerate(combinations):
            given = [f"{key}={_text(value)}" for key, value in values.items()]
            run_config = common.with_settings(base, given)
            config = common.checked(run_config)  # before the first of them takes its time
            if not run_configs:
                check_metric(chosen.metric, build_task(config))
            run_configs.append(run_config | {"output": str(folder / f"run-{number}")})
        rows: list[dict[str, Any]] = []
        with LocalSuperLink() as link:
            for number, values in enumerate(combinations):
                shown = ", ".join(f"{key}={_text(value)}" for key, value in values.items())
                typer.echo(f"Run {number + 1} of {len(combinations)}: {shown}")
                try:
                    summary = common.simulate(
                        app, run_configs[number], num_supernodes, num_actors, link=link
                    )
                    found, state = figure(summary, chosen.metric), "finished"
                except RunFailed as error:
                    typer.secho(f"Error: {error}", fg="red", err=True)
                    found, state = None, "failed"
                rows.append(
                    {"run": f"run-{number}", **values, chosen.metric: found, "state": state}
                )
                _save(folder / TABLE, rows)
        _show(chosen, rows)
        typer.echo(f"Table: {folder / TABLE}")
    if any(row["state"] == "failed" for row in rows):
        raise typer.Exit(common.FAILED)


def _show(chosen: Sweep, rows: list[dict[str, Any]]) -> None:
    """Print the table, the best run first."""
    sign = 1 if chosen.goal == "minimize" else -1

    def rank(row: Mapping[str, Any]) -> tuple[bool, float]:
        value = row[chosen.metric]
        return value is None, 0.0 if value is None else sign * value

    head = list(rows[0])
    cells = [["-" if row[key] is None else _text(row[key]) for key in head] for row in
             sorted(rows, key=rank)]  # fmt: skip
    typer.echo("")
    common.print_table(head, cells)


def _save(path: Path, rows: list[dict[str, Any]]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ConfigError(f"output = {str(path.parent)!r} cannot be written: {error}") from None


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
