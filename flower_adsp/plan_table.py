"""A layer plan as a table, for the command line."""

from flower_adsp.arrays import decode
from flower_adsp.config import Config, choices
from flower_adsp.devices import deal
from flower_adsp.errors import require
from flower_adsp.sparse.plan import MIB, LayerPlan, LayerPlanner, Member
from flower_adsp.tasks.build import build_task

_MARKS = {1.0: "1", 0.5: "1/2", 0.25: "1/4", 0.125: "1/8"}


def plan_table(config: Config, num_devices: int = 0) -> tuple[list[str], tuple[str, ...]]:
    """Plan for a preset's devices, without starting anything.

    Parameters
    ----------
    config : Config
        Task, devices and plan.
    num_devices : int (default: 0)
        Devices; 0 for as many as the preset has.

    Returns
    -------
    tuple[list[str], tuple[str, ...]]
        The lines of a table of units and devices, and the units that nobody trains whole.

    Raises
    ------
    ConfigError
        If there is no plan to print, or it cannot be made.
    """
    from flwr.app import ArrayRecord

    preset = config.devices.profiles
    require(bool(preset), "devices", config.devices.name, "a preset with profiles")
    task = build_task(config)
    planner = config.plan.build(task=task, with_momentum=config.train.momentum > 0)
    plans = ", ".join(name for name in choices("plan") if name != "none")
    require(isinstance(planner, LayerPlanner), "plan", config.plan.name, f"one of {plans}")
    number = num_devices or sum(count for _, count in preset)
    members = [
        Member(
            index, profile.name, profile.memory_mib,
            len(task.train_data(index, number)), task.batch_size,
        )
        for index, profile in enumerate(deal(preset, number))
    ]  # fmt: skip
    weights = decode(ArrayRecord(task.build_model().state_dict()))
    plan = planner.make(members, weights)
    return _format(planner, plan, members), plan.uncovered


def _mib(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _format(planner: LayerPlanner, plan: LayerPlan, members: list[Member]) -> list[str]:
    units, profile = planner.profiled()
    width = max(len(unit.name) for unit in units) + 2
    columns = [f"{member.id}" for member in members]
    full = profile.peak_bytes(dict.fromkeys(range(len(units)), 1.0)) / MIB
    size = profile.model_bytes / MIB
    lines = [
        f"{len(units)} units, {_mib(size)} MiB; to train all takes {_mib(full)} MiB at the peak",
        "unit".ljust(width) + "".join(column.rjust(8) for column in columns),
    ]
    for unit in units:
        portions = [plan.workers[member.id].portions.get(unit.name) for member in members]
        marks = ["-" if p is None else _MARKS.get(p.ratio, f"{p.ratio:.2f}") for p in portions]
        missing = "   NOT COVERED" if unit.name in plan.uncovered else ""
        lines.append(unit.name.ljust(width) + "".join(m.rjust(8) for m in marks) + missing)
    peaks = [plan.workers[member.id].peak_bytes / MIB for member in members]
    shares = [plan.workers[member.id].time_share for member in members]
    for name, values, text in (
        ("peak, MiB", peaks, _mib),
        ("budget, MiB", [member.memory_mib for member in members], _mib),
        ("step, of full", shares, "{:.0%}".format),
    ):
        lines.append(name.ljust(width) + "".join(text(v).rjust(8) for v in values))
    lines.append(
        "not covered: " + ", ".join(plan.uncovered)
        if plan.uncovered
        else "every unit is trained whole by some device"
    )
    return lines
