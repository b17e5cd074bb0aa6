"""Sweep files of Weights & Biases, run without any server.

A file names parameters and their values; each combination, or each draw, is a run. The format is
W&B's own, https://docs.wandb.ai/guides/sweeps/sweep-config-keys: what is read here is ``method``
(``grid`` or ``random``), ``parameters`` (``value``, ``values``, or a ``distribution``), ``metric``
and ``run_cap``.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flower_adsp.config import conf_folder, read_yaml
from flower_adsp.errors import ConfigError, require, unknown
from flower_adsp.seeding import stream
from flower_adsp.tasks.base import Task
from flower_adsp.tracking.summary import NUMBERS

_KEYS = {
    "command", "description", "entity", "method", "metric", "name", "parameters", "program",
    "project", "run_cap",
}  # fmt: skip
_GOALS = ("minimize", "maximize")
_Draw = Callable[[np.random.Generator], Any]
# The variables by which `wandb agent` says which run of which sweep it has started.
_AGENT = {
    "WANDB_RUN_ID": "tracking.wandb_run_id",
    "WANDB_SWEEP_ID": "tracking.wandb_sweep_id",
    "WANDB_PROJECT": "tracking.wandb_project",
    "WANDB_ENTITY": "tracking.wandb_entity",
}


@dataclass(frozen=True)
class Sweep:
    """A sweep file.

    Attributes
    ----------
    name : str
        Its name.
    method : str
        ``grid`` or ``random``.
    metric : str
        A figure of ``summary.json``, such as ``seconds_to_target`` or ``test.loss``.
    goal : str
        ``minimize`` or ``maximize``.
    parameters : Mapping[str, Mapping[str, Any]]
        By setting, its values or its distribution.
    run_cap : int or None
        The most runs that the file allows.
    """

    name: str
    method: str
    metric: str
    goal: str
    parameters: Mapping[str, Mapping[str, Any]]
    run_cap: int | None

    def combinations(self, number: int | None, seed: int) -> list[dict[str, Any]]:
        """Return the settings of each run.

        Parameters
        ----------
        number : int or None
            The most runs; None: all of a grid, as many as ``run_cap`` for random draws.
        seed : int
            Seed of the draws.

        Raises
        ------
        ConfigError
            If draws have neither a number nor a ``run_cap``, or a grid holds a distribution.
        """
        caps = [cap for cap in (number, self.run_cap) if cap is not None]
        if self.method == "grid":
            return list(itertools.islice(self._grid(), min(caps, default=None)))
        if not caps:
            raise ConfigError(
                f"sweep {self.name!r} draws at random without end; --runs says how many, or "
                "run_cap in its file"
            )
        draws = {key: _draw(key, entry) for key, entry in self.parameters.items()}
        numbers = stream(seed, 0, "sweep")
        return [{key: draw(numbers) for key, draw in draws.items()} for _ in range(min(caps))]

    def _grid(self) -> Iterator[dict[str, Any]]:
        values = []
        for key, entry in self.parameters.items():
            if "value" in entry:
                values.append([entry["value"]])
            elif "values" in entry:
                values.append(list(entry["values"]))
            else:
                raise ConfigError(
                    f"parameters.{key} of sweep {self.name!r} has no values; a grid needs them"
                )
        for chosen in itertools.product(*values):
            yield dict(zip(self.parameters, chosen, strict=True))


def read_sweep(file: str) -> Sweep:
    """Read a sweep file.

    Parameters
    ----------
    file : str
        Its path, or a name in ``conf/sweep``.

    Raises
    ------
    ConfigError
        If it cannot be read, or asks for what is not known.
    """
    path = _path(file)
    content = read_yaml(path)
    for key in content:
        if key not in _KEYS:
            raise unknown(f"key of sweep {path.name}", key, _KEYS)
    method = content.get("method")
    if method == "bayes":
        raise ConfigError(
            f"method = 'bayes' of sweep {path.name} needs W&B's server (wandb sweep, wandb agent); "
            "without it: grid, random"
        )
    require(method in ("grid", "random"), f"method of sweep {path.name}", method, "grid or random")
    parameters = content.get("parameters")
    has_some = isinstance(parameters, dict) and len(parameters) > 0
    require(has_some, f"parameters of sweep {path.name}", parameters, "a mapping, not empty")
    assert isinstance(parameters, dict)
    for key, entry in parameters.items():
        _check_parameter(str(key), entry)
    metric = content.get("metric") or {}
    require(isinstance(metric, dict), f"metric of sweep {path.name}", metric, "a mapping")
    goal = metric.get("goal", "minimize")
    if goal not in _GOALS:
        raise unknown(f"metric.goal of sweep {path.name}", goal, _GOALS)
    cap = content.get("run_cap")
    ok = cap is None or (isinstance(cap, int) and cap > 0)
    require(ok, f"run_cap of sweep {path.name}", cap, "an integer of at least 1")
    return Sweep(
        str(content.get("name", path.stem)),
        str(method),
        str(metric.get("name", "test.loss")),
        goal,
        {str(key): entry for key, entry in parameters.items()},
        cap,
    )


def figure(summary: Mapping[str, Any], name: str) -> float | None:
    """Return a figure of a summary by its dotted name; None if the run has none.

    Raises
    ------
    ConfigError
        If there is nothing of that name.
    """
    found: Any = summary
    for part in name.replace("/", ".").split("."):
        if not isinstance(found, Mapping) or part not in found:
            allowed = [
                k for k, v in found.items() if v is None or isinstance(v, int | float | dict)
            ]
            raise unknown("metric", name, allowed)
        found = found[part]
    ok = found is None or isinstance(found, int | float)
    require(ok, "metric", name, "the name of one number")
    return None if found is None else float(found)


def check_metric(name: str, task: Task) -> None:
    """See that runs of a task will have a figure, before the first of them takes its time.

    Raises
    ------
    ConfigError
        If there is nothing of that name.
    """
    metrics = task.metrics(task.build_model(), task.held_out_data("validation"))
    figure({**dict.fromkeys(NUMBERS), "test": metrics, "validation": metrics}, name)


def settings_of_agent(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the run config that ties a run to the sweep whose ``wandb agent`` has started it.

    The ServerApp runs in a process of the SuperLink's, so what the agent says by its environment
    is handed on in the run config.
    """
    if "WANDB_SWEEP_ID" not in environment:
        return {}
    return {key: environment[name] for name, key in _AGENT.items() if environment.get(name)}


def _path(file: str) -> Path:
    folder = conf_folder() / "sweep"
    if file.endswith((".yaml", ".yml")):
        path = Path(file).expanduser()
        require(path.is_file(), "sweep", file, "the path of a file, or a name in conf/sweep")
        return path
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if file not in names:
        raise unknown("sweep", file, names)
    return folder / f"{file}.yaml"


def _check_parameter(key: str, entry: Any) -> None:
    where = f"parameters.{key}"
    require(isinstance(entry, dict), where, entry, "a mapping with value, values or distribution")
    if "values" in entry:
        ok = isinstance(entry["values"], list) and len(entry["values"]) > 0
        require(ok, f"{where}.values", entry["values"], "a list, not empty")
    elif "value" not in entry:
        _draw(key, entry)


def _draw(key: str, entry: Mapping[str, Any]) -> _Draw:
    """Return what draws a value of a parameter."""
    if "value" in entry:
        value = entry["value"]
        return lambda numbers: value
    if "values" in entry:
        values = list(entry["values"])
        return lambda numbers: values[int(numbers.integers(len(values)))]
    kinds = ("uniform", "int_uniform", "log_uniform_values", "q_uniform")
    low, high = entry.get("min"), entry.get("max")
    for name, bound in (("min", low), ("max", high)):
        ok = isinstance(bound, int | float) and math.isfinite(bound)
        require(ok, f"parameters.{key}.{name}", bound, "a number")
    assert low is not None
    assert high is not None
    require(low < high, f"parameters.{key}.max", high, f"above min, {low}")
    whole = isinstance(low, int) and isinstance(high, int)
    kind = entry.get("distribution", "int_uniform" if whole else "uniform")
    if kind == "int_uniform":
        return lambda numbers: int(numbers.integers(int(low), int(high) + 1))
    if kind == "uniform":
        return lambda numbers: float(numbers.uniform(low, high))
    if kind == "q_uniform":
        step = entry.get("q", 1)
        ok = isinstance(step, int | float) and step > 0
        require(ok, f"parameters.{key}.q", step, "a number above 0")
        return lambda numbers: float(round(numbers.uniform(low, high) / step) * step)
    if kind == "log_uniform_values":
        require(low > 0, f"parameters.{key}.min", low, "above 0")
        return lambda numbers: float(math.exp(numbers.uniform(math.log(low), math.log(high))))
    raise unknown(f"parameters.{key}.distribution", kind, kinds)
