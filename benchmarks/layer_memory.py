"""What training parts of a model saves in memory, and what it costs.

MobileNetV2 on 32×32 images in mini-batches of 32, SGD with momentum, seven devices whose budgets
are fractions of the metered peak of stock training. Each device's peak is measured in a process of
its own by a meter of live tensor storages, and checked against the growth of the process's resident
memory over one that stops before its first step, where the allocator gives back what is freed; the
growth with the allocator's defaults is shown beside it. Training itself, which takes much longer,
is on a smaller network: `benchmarks.layer_training`.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.layer_training import training
from benchmarks.report import arguments, peak_resident, print_table, write
from flower_adsp.config import load_config
from flower_adsp.sparse.freezing import make_portion, train_only
from flower_adsp.sparse.meters import PeakMeter, saved_bytes
from flower_adsp.sparse.ops import make_memory_true
from flower_adsp.sparse.plan import MIB, LayerPlanner, Member
from flower_adsp.sparse.portions import RATIOS
from flower_adsp.sparse.profile import ModelProfile, profile_model
from flower_adsp.sparse.units import Unit, split_into_units
from flower_adsp.tasks.base import Task
from flower_adsp.tasks.batches import collate
from flower_adsp.tasks.build import build_task
from flower_adsp.tasks.mobilenet import MobileNetV2

BUDGETS = (0.5, 0.4, 0.35, 0.3, 0.3, 0.25, 0.2)
ROUNDS = 8  # of a rotation
# By default glibc keeps what it has freed in a heap with holes. So each tensor is mapped apart.
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}
Portions = Mapping[str, Any]


def task_of(quick: bool) -> Task:
    """Return MobileNetV2; a narrow one for the quick version."""
    overrides = "task.width=0.35 task.image_size=16" if quick else ""
    return build_task(load_config({"task": "mobilenetv2", "overrides": overrides}))


def prepare(
    task: Task, ratios: Mapping[str, float] | None
) -> tuple[nn.Module, Mapping[str, nn.Parameter], Callable[[], Tensor], list[Tensor]]:
    """Return a model that trains these units (None: all, with stock layers), and its loss."""
    torch.set_num_threads(1)
    model = task.build_model().train()
    # Noise in place of images: loading these would take more memory than some plans do.
    assert isinstance(task, MobileNetV2)
    shape = (task.batch_size, 3, task.image_size, task.image_size)
    batch = [torch.randn(shape), torch.arange(task.batch_size) % 10]
    if ratios is None:
        return model, dict(model.named_parameters()), lambda: task.loss(model, batch), batch
    make_memory_true(model)
    units = split_into_units(model)
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    portions = {
        unit.name: make_portion(model, unit, ratios[unit.name], weights)
        for unit in units
        if unit.name in ratios
    }
    return model, train_only(model, units, portions), lambda: task.loss(model, batch), batch


def stepper(
    trained: Mapping[str, nn.Parameter], loss: Callable[[], Tensor]
) -> tuple[Callable[[], None], torch.optim.SGD]:
    """Return a function that takes one step, and its optimizer."""
    optimizer = torch.optim.SGD(trained.values(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step, optimizer


def metered_peak(task: Task, ratios: Mapping[str, float] | None) -> int:
    """Return the bytes alive at the peak of a step, all that the device holds counted.

    That is the model, the mini-batch, momentum, and for a plan the start of what it trains, from
    which the update is measured.
    """
    model, trained, loss, batch = prepare(task, ratios)
    step, optimizer = stepper(trained, loss)
    step()
    start = [] if ratios is None else [p.detach().clone() for p in trained.values()]
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    optimizer.zero_grad()
    held = [*model.parameters(), *model.buffers(), *trained.values(), *batch, *momenta, *start]
    with PeakMeter(held) as meter:
        step()
    return meter.peak


def child(ratios: Mapping[str, float] | None, kind: str, quick: bool) -> None:
    """Measure in this process, which is a fresh one, and print the bytes."""
    task = task_of(quick)
    if kind == "meter":
        print(metered_peak(task, ratios))
        return
    model, trained, loss, batch = prepare(task, ratios)
    with torch.no_grad():
        model.eval()(batch[0][:1])  # what the first use of an operator loads is not the step's
    model.train()
    step, _ = stepper(trained, loss)
    start = [p.detach().clone() for p in trained.values()]
    if kind == "steps":
        step()
        step()
    assert start
    print(peak_resident())


def measured(
    ratios: Mapping[str, float] | None, kind: str, quick: bool, env: Mapping[str, str] | None = None
) -> int:
    """Return what `child` prints, from a process of its own."""
    command = [sys.executable, __file__, "--child", kind]
    options = ["--quick"] if quick else []
    result = subprocess.run(
        [*command, *options, json.dumps(ratios)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
    )
    return int(result.stdout.split()[-1])


def memory_rows(quick: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row for each device and one for stock training, and what they come to."""
    task = task_of(quick)
    stock = measured(None, "meter", quick)
    members = [
        Member(index, f"budget {budget}", budget * stock / MIB, 500, task.batch_size)
        for index, budget in enumerate(BUDGETS)
    ]
    weights = {name: tensor.numpy() for name, tensor in task.build_model().state_dict().items()}
    planner = LayerPlanner(task, with_momentum=True, channels=True, rotate=True)
    plan = planner.make(members, weights)
    trained: dict[str, set[int]] = {name: set() for name in weights}
    rotation = [plan, *(planner.make(members, weights) for _ in range(ROUNDS - 1))]
    for turn in rotation:
        for id_, worker in turn.workers.items():
            for name in worker.slices:
                trained[name].add(id_)
    parameters = dict(task.build_model().named_parameters())
    over = sum(
        worker.peak_bytes > member.memory_mib * MIB
        for turn in rotation
        for member, worker in zip(members, turn.workers.values(), strict=True)
    )
    rows = []
    for member, budget in zip(members, BUDGETS, strict=True):
        worker = plan.workers[member.id]
        ratios = {name: portion.ratio for name, portion in worker.portions.items()}
        peak = measured(ratios, "meter", quick)
        resident, by_default = (
            measured(ratios, "steps", quick, env) - measured(ratios, "nothing", quick, env)
            for env in (GIVEN_BACK, {})
        )
        before = sum(p.nbytes for p in parameters.values())
        rows.append(
            {
                "device": member.id,
                "budget": budget,
                "budget_mib": member.memory_mib,
                "peak_mib": peak / MIB,
                "modelled_mib": worker.peak_bytes / MIB,
                "model_error": worker.peak_bytes / peak - 1,
                "resident_mib": resident / MIB,
                "resident_default_mib": by_default / MIB,
                "beyond_model_mib": (peak - before) / MIB,
                "units": len(ratios),
                "time_share": worker.time_share,
                "ratios": ratios,
            }
        )
    peaks = [row["peak_mib"] for row in rows]
    summary = {
        "stock_mib": stock / MIB,
        "over_budget": over + sum(row["peak_mib"] > row["budget_mib"] for row in rows),
        "uncovered": sum(not trained[name] for name in parameters),
        "mean_reduction": 1 - statistics.fmean(peaks) * MIB / stock,
        "resident_disagrees": sum(
            abs(row["resident_mib"] - row["beyond_model_mib"])
            > max(30, 0.25 * row["beyond_model_mib"])
            for row in rows
        ),
    }
    return rows, summary


def model_errors(quick: bool) -> dict[str, Any]:
    """Compare saved bytes and peaks with what the model says, on random plans."""
    torch.set_num_threads(1)
    task = build_task(
        load_config(
            {
                "task": "mobilenetv2",
                "overrides": "task.batch_size=4"
                + (" task.width=0.35 task.image_size=16" if quick else ""),
            }
        )
    )
    units, profile = profiled(task)
    draws = random.Random(0)
    number, wrong, errors = (10 if quick else 100), 0, []
    for _ in range(number):
        part = draws.choice([0.2, 0.5, 0.9])
        choice = {u: draws.choice(RATIOS) for u in range(len(units)) if draws.random() < part}
        choice = choice or {draws.randrange(len(units)): 1.0}
        ratios = {units[u].name: ratio for u, ratio in choice.items()}
        model, trained, loss, _ = prepare(task, ratios)
        wrong += saved_bytes(loss, model, trained.values()) != profile.saved_bytes(choice)
        errors.append(abs(profile.peak_bytes(choice) / metered_peak(task, ratios) - 1))
    return {"random_plans": number, "saved_bytes_wrong": wrong, "peak_error_most": max(errors)}


def profiled(task: Task) -> tuple[list[Unit], ModelProfile]:
    """Return the units of a task's model and their profile, with momentum."""
    data = task.held_out_data("validation")
    batch = collate(data, np.arange(task.batch_size))
    model = task.build_model()
    return profile_model(model, lambda m: task.loss(m, batch), batch, True)


def step_times(quick: bool, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Time steps of the prepared model against stock, and of plans against the arithmetic."""
    task = task_of(quick)
    names = [unit.name for unit in split_into_units(task.build_model())]
    everything = dict.fromkeys(names, 1.0)
    cases: list[tuple[str, Mapping[str, float] | None]] = [("stock", None), ("all", everything)]
    cases += [(f"device {row['device']}", row["ratios"]) for row in rows]
    steps = {name: stepper(*prepare(task, ratios)[1:3])[0] for name, ratios in cases}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(3 if quick else 8):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    least = {name: min(values) for name, values in seconds.items()}
    for row in rows:
        share = least[f"device {row['device']}"] / least["all"]
        row["step_share"] = share
        row["step_over_arithmetic"] = share / row["time_share"]
    return {
        "step_ratio": least["all"] / least["stock"],
        "step_seconds": least,
        "step_over_arithmetic_most": max(row["step_over_arithmetic"] for row in rows),
    }


def main() -> None:
    if "--child" in sys.argv:
        kind = sys.argv[sys.argv.index("--child") + 1]
        child(json.loads(sys.argv[-1]), kind, "--quick" in sys.argv)
        return
    options = arguments("Memory, time and accuracy of training parts of a model.")
    rows, summary = memory_rows(options.quick)
    summary |= model_errors(options.quick)
    summary |= step_times(options.quick, rows)
    print_table(
        rows,
        ["device", "budget", "budget_mib", "peak_mib", "modelled_mib", "resident_mib", "units",
         "time_share", "step_share"],
    )  # fmt: skip
    seeds, trained, more = training(options.quick)
    summary |= more
    for key, value in summary.items():
        print(f"{key}: {value}")
    write(options.json, seeds, rows=rows, training=trained, **summary)


if __name__ == "__main__":
    main()
