"""``flower-adsp devices``."""

import textwrap

import typer

from flower_adsp.cli import common
from flower_adsp.config import choices, load_config
from flower_adsp.devices import deal, heterogeneity, measure, not_waiting_limit

devices = typer.Typer(help="The devices that a run can be simulated on.", no_args_is_help=True)


@devices.command("list")
def list_presets() -> None:
    """List the presets, with their number of devices and how unequal these are."""
    head, rows = ["preset", "devices", "H", "slowest", "fastest", "memory, MiB"], []
    for name in choices("devices"):
        preset = load_config({"devices": name}).devices.profiles
        number = sum(count for _, count in preset)
        if not number:
            rows.append([name, "-", "-", "-", "-", "as measured"])
            continue
        profiles = deal(preset, number)
        speeds = [profile.speed(_BATCH) for profile in profiles]
        memory = [profile.memory_mib for profile in profiles]
        rows.append(
            [
                name,
                str(number),
                f"{heterogeneity(speeds):.2f}",
                f"{min(speeds):.3g}",
                f"{max(speeds):.3g}",
                _mib(min(memory)) if min(memory) == max(memory) else
                f"{_mib(min(memory))} to {_mib(max(memory))}",
            ]
        )  # fmt: skip
    common.print_table(head, rows)
    typer.echo(f"Speeds in steps per second with mini-batches of {_BATCH}, before the task's cost.")


_BATCH = 32


def _mib(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


@devices.command()
def show(name: str) -> None:
    """Show one preset: its devices, their links, and where the figures come from."""
    with common.exit_codes():
        chosen = load_config({"devices": name}).devices
        typer.echo("\n".join(textwrap.wrap(chosen.source, 90)))
        if not chosen.profiles:
            return
        head = ["device", "count", "s/sample", "up Mb/s", "down Mb/s", "latency s", "memory MiB",
                "jitter", "there s", "away s", "NPU x"]  # fmt: skip
        rows = [
            [
                profile.name,
                str(count),
                f"{profile.seconds_per_sample:.4g}",
                f"{profile.up_mbps:g}",
                f"{profile.down_mbps:g}",
                f"{profile.latency_s:g}",
                _mib(profile.memory_mib),
                f"{profile.jitter:g}",
                f"{profile.available_s:g}",
                f"{profile.away_s:g}",
                "" if profile.npu_speedup is None else f"{profile.npu_speedup:g}",
            ]
            for profile, count in chosen.profiles
        ]
        common.print_table(head, rows)
        number = sum(count for _, count in chosen.profiles)
        degree = heterogeneity([p.speed(_BATCH) for p in deal(chosen.profiles, number)])
        limit = 100 * not_waiting_limit(degree)
        typer.echo(f"H = {degree:.2f}; not waiting can save at most 1 - 1/H = {limit:.1f} %")


@devices.command("measure")
def measure_this(task: common.Task = "mnist-cnn", overrides: common.Overrides = "") -> None:
    """Measure this machine on a task, as a SuperNode measures itself; print it as a preset."""
    with common.exit_codes():
        from flower_adsp.tasks.build import build_task

        profile = measure(build_task(load_config({"task": task, "overrides": overrides})))
        typer.echo(f"source: Measured on {profile.name} with the task {task}.")
        typer.echo("profiles:")
        typer.echo(
            f"  - {{name: {profile.name}, seconds_per_sample: {profile.seconds_per_sample:.6g}, "
            f"memory_mib: {profile.memory_mib:.0f}, count: 1}}"
        )
