"""Settings: ``conf/`` and Flower's run config, composed into one validated, typed `Config`.

A group's file names what it configures (``target: "package.module:name"``) and its settings. The
signature of the target is the schema: the names and types of its parameters are what the file,
and the overrides, may set. So a user's own strategy or task is configured like one of ours.
"""

import inspect
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from functools import lru_cache
from importlib import import_module
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf

import flower_adsp
from flower_adsp.devices import DeviceProfile, parse_preset
from flower_adsp.errors import ConfigError, require, unknown
from flower_adsp.messages import MOST_BYTES
from flower_adsp.network import Network

GROUPS = ("strategy", "devices", "task", "network", "plan")
LAYERS = ("auto", "stock", "memory-true")
TRACKING = (
    "progress", "report",
    "wandb", "wandb_project", "wandb_entity", "wandb_run_id", "wandb_sweep_id",
)  # fmt: skip
RUN_CONFIG_KEYS = (
    *GROUPS, "seed", "output", "resume", "initial_model", "probe", "overrides",
    *(f"tracking.{key}" for key in TRACKING),
)  # fmt: skip

_TRACKING_CHOICES = {
    "progress": ("lines", "off"),
    "report": ("html", "off"),
    "wandb": ("disabled", "offline", "online"),
}
_PLAIN_TYPES = (bool, int, float, str)
_SUPPLIED = {"seed", "with_momentum"}  # parameters that the run supplies, not the group's file


@dataclass
class RunSettings:
    """How a run goes; the comments in ``conf/config.yaml`` say what each setting means."""

    num_rounds: int = 20
    max_seconds: float | None = None
    target_loss: float | None = None
    smoothing_seconds: float = 60.0
    evaluate_every: float | None = None
    clock: str = "auto"
    weighting: str = "equal"
    min_available_nodes: int = 2
    node_timeout: float = 60.0
    reply_timeout: float = 600.0
    deadline_factor: float | None = 3.0
    failures_before_rest: int = 3
    norm_limit: float | None = None
    save_every: int | None = 1


@dataclass
class TrainSettings:
    """How devices train."""

    learning_rate: float = 0.1
    half_life: float | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    device: str = "auto"
    layers: str = "auto"


@dataclass
class ProbeSettings:
    """How links are measured; as for `flower_adsp.network.probe.measure_link`."""

    seconds: float = 5.0
    largest_mb: float = 64.0
    repeats: int = 3


@dataclass
class TrackingSettings:
    """What is shown while a run goes, and where.

    Attributes
    ----------
    progress : str
        ``lines``, one at each evaluation, or ``off``.
    report : str
        ``html``, made at the end of a run if matplotlib is installed, or ``off``.
    wandb : str
        Weights & Biases: ``disabled``, ``offline`` or ``online``.
    wandb_project, wandb_entity, wandb_run_id, wandb_sweep_id : str
        Weights & Biases' own terms; all but the project may be empty.
    """

    progress: str = "lines"
    report: str = "html"
    wandb: str = "disabled"
    wandb_project: str = "flower-adsp"
    wandb_entity: str = ""
    wandb_run_id: str = ""
    wandb_sweep_id: str = ""


@dataclass(frozen=True)
class Choice:
    """What a group's file configures.

    Parameters
    ----------
    name : str
        Name of the choice.
    target : Callable[..., Any]
        A class or function.
    settings : dict[str, Any]
        Arguments for it.
    group : str (default: "")
        The section that sets them, for messages.
    """

    name: str
    target: Callable[..., Any]
    settings: dict[str, Any]
    group: str = ""

    @property
    def keeps_time(self) -> bool:
        """Whether this strategy is one of this package's, which run on a clock."""
        return "loop" in inspect.signature(self.target).parameters

    def build(self, **supplied: Any) -> Any:
        """Call the target with its settings, and with those supplied that it takes."""
        takes = inspect.signature(self.target).parameters
        extra = {key: value for key, value in supplied.items() if key in takes}
        try:
            return self.target(**self.settings, **extra)
        except ConfigError as error:
            key = str(error).partition(" = ")[0]
            if self.group and key in takes:  # which it knows without its section
                raise ConfigError(f"{self.group}.{error}") from None
            raise


@dataclass(frozen=True)
class Devices:
    """The devices of a run: a preset, or none where they measure themselves."""

    name: str
    source: str
    profiles: list[tuple[DeviceProfile, int]] = field(default_factory=list)
    measure: bool = False


@dataclass(frozen=True)
class Config:
    """All settings of a run, checked."""

    seed: int
    output: str
    resume: str
    initial_model: str
    strategy: Choice
    task: Choice
    devices: Devices
    network: Network
    network_name: str
    plan: Choice
    run: RunSettings
    train: TrainSettings
    tracking: TrackingSettings
    probe: str
    probing: ProbeSettings
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def is_virtual(self) -> bool:
        """Tell whether the run's time is simulated."""
        if self.run.clock == "auto":
            return not self.devices.measure
        return self.run.clock == "virtual"

    def describe(self) -> dict[str, Any]:
        """Return the settings as plain data, for the record."""
        return {
            "seed": self.seed,
            "strategy": {"name": self.strategy.name, **self.strategy.settings},
            "task": {"name": self.task.name, **self.task.settings},
            "devices": self.devices.name,
            "plan": {"name": self.plan.name, **self.plan.settings},
            "network": {"name": self.network_name, **self.network.describe()},
            "run": vars(self.run),
            "train": vars(self.train),
        }


def conf_folder() -> Path:
    """Return the folder with the configuration files."""
    package = Path(flower_adsp.__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def choices(group: str) -> list[str]:
    """Return the names that a group offers."""
    return sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))


def load_config(run_config: Mapping[str, Any]) -> Config:
    """Compose and check the settings of a run.

    Parameters
    ----------
    run_config : Mapping[str, Any]
        Flower's run config; keys that are absent take their defaults.

    Raises
    ------
    ConfigError
        If a key is unknown or a value of the wrong type or out of range; the message names the
        key, the value and what is allowed.
    """
    return _load(tuple(sorted((str(key), value) for key, value in run_config.items())))


@lru_cache(maxsize=32)
def _load(items: tuple[tuple[str, Any], ...]) -> Config:
    given = dict(items)
    for key in given:
        if key not in RUN_CONFIG_KEYS:
            raise unknown("run-config key", key, RUN_CONFIG_KEYS)
    seed = given.get("seed", 0)
    ok = isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0
    require(ok, "seed", seed, "an integer of at least 0")
    overrides = _parse_overrides(_string(given, "overrides", ""))

    base = read_yaml(conf_folder() / "config.yaml")
    defaults = TrackingSettings()
    base["tracking"] = {
        key: _string(given, f"tracking.{key}", getattr(defaults, key)) for key in TRACKING
    }
    names = {
        "strategy": _string(given, "strategy", "adsp"),
        "devices": _string(given, "devices", "adsp-ec2"),
        "task": _string(given, "task", "mnist-cnn"),
        "network": _string(given, "network", "links"),
        "plan": _string(given, "plan", "auto"),
    }
    if names["plan"] == "auto":
        names["plan"] = "dsparse" if names["strategy"] == "dsparse" else "none"
    sections = ("strategy", "task", "network", "plan", *base)
    for key in overrides:
        if str(key) not in sections:
            raise unknown("override section", key, sections)

    run = _typed(RunSettings, "run", base["run"], overrides)
    train = _typed(TrainSettings, "train", base["train"], overrides)
    tracking = _typed(TrackingSettings, "tracking", base["tracking"], overrides)
    network = _typed(Network, "network", _read_choice("network", names["network"]), overrides)
    probing = _typed(ProbeSettings, "probe", base["probe"], overrides)
    _check_run(run)
    _check_train(train)
    _check_probe(probing)
    for key, allowed in _TRACKING_CHOICES.items():
        if getattr(tracking, key) not in allowed:
            raise unknown(f"tracking.{key}", getattr(tracking, key), allowed)
    require(bool(tracking.wandb_project), "tracking.wandb_project", "", "a name")
    return Config(
        seed=seed,
        output=_string(given, "output", ""),
        resume=_string(given, "resume", ""),
        initial_model=_string(given, "initial_model", ""),
        strategy=_choice("strategy", names["strategy"], overrides),
        task=_choice("task", names["task"], overrides),
        devices=_devices(names["devices"]),
        network=network,
        network_name=names["network"],
        plan=_choice("plan", names["plan"], overrides),
        run=run,
        train=train,
        tracking=tracking,
        probe=_string(given, "probe", ""),
        probing=probing,
        given={key: value for key, value in given.items() if key not in ("output", "resume")},
    )


# ------------------------------------------------------------------------------------------ files


def _string(given: Mapping[str, Any], key: str, default: str) -> str:
    value = given.get(key, default)
    require(isinstance(value, str), key, value, "a string")
    return str(value)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a file that holds a mapping; interpolations such as ``${args}`` are left as they are.

    Raises
    ------
    ConfigError
        If it cannot be read, or holds something else.
    """
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # YAML parsers raise many kinds
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of settings")
    return {str(key): value for key, value in content.items()}


def _read_choice(group: str, name: str) -> dict[str, Any]:
    """Read a group's file by the name of a choice, or by a path that ends in ``.yaml``."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        require(path.is_file(), group, name, "a name or the path of an existing YAML file")
        return read_yaml(path)
    if name not in choices(group):
        raise unknown(group, name, choices(group))
    return read_yaml(conf_folder() / group / f"{name}.yaml")


def _parse_overrides(text: str) -> dict[str, Any]:
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"overrides = {text!r} cannot be split: {error}") from None
    for part in parts:
        key, separator, _ = part.partition("=")
        if not separator or "." not in key:
            raise ConfigError(
                f"override {part!r} is not of the form section.key=value, "
                'as in "strategy.check_period=30 task.batch_size=64"'
            )
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist(parts))
    except Exception as error:  # OmegaConf and YAML raise many kinds
        raise ConfigError(f"overrides = {text!r} cannot be read: {error}") from None
    assert isinstance(parsed, dict)
    return {str(key): value for key, value in parsed.items()}


# ----------------------------------------------------------------------------------------- typing


def _typed(
    schema: type[Any], section: str, settings: dict[str, Any], overrides: dict[str, Any]
) -> Any:
    """Merge a section's settings and overrides into its structured type."""
    merged = OmegaConf.structured(schema)
    OmegaConf.set_readonly(merged, False)  # a frozen schema is meant to be filled here
    OmegaConf.set_struct(merged, True)
    hints = {entry.name: entry.type for entry in fields(schema)}
    for source in (settings, overrides.get(section, {})):
        if not isinstance(source, Mapping):
            raise ConfigError(f"{section} = {source!r} must be a mapping of settings")
        for key, value in source.items():
            if key not in hints:
                raise unknown(
                    f"key of {section}", f"{section}.{key}", [f"{section}.{name}" for name in hints]
                )
            _set(merged, section, str(key), value, hints[key])
    values = OmegaConf.to_container(merged)
    assert isinstance(values, dict)
    return schema(**{str(key): value for key, value in values.items()})


def _accepts(hint: Any, value: Any) -> bool:
    """Tell whether a value is of a type; an integer will do for a float."""
    kinds = get_args(hint) or (hint,)
    if isinstance(value, int) and not isinstance(value, bool):
        return int in kinds or float in kinds
    return type(value) in kinds


def _set(target: DictConfig, section: str, key: str, value: Any, hint: Any) -> None:
    if not _accepts(hint, value):
        raise ConfigError(
            f"{section}.{key} = {value!r} is not allowed; it must be of type {_type_name(hint)}"
        )
    is_float = float in (get_args(hint) or (hint,))
    target[key] = float(value) if is_float and value is not None else value
    if isinstance(target[key], float):
        require(isfinite(target[key]), f"{section}.{key}", value, "a finite number")


def _type_name(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_type_name(part) for part in get_args(hint))
    return "null" if hint is NoneType else getattr(hint, "__name__", str(hint))


def resolve(group: str, target: Any) -> Callable[..., Any]:
    """Import what ``package.module:name`` names.

    Raises
    ------
    ConfigError
        If the text has another form, the module cannot be imported or has no such name.
    """
    module_name, separator, name = str(target).partition(":")
    key = f"{group}.target"
    require(bool(separator and module_name and name), key, target, 'like "package.module:name"')
    try:
        found = getattr(import_module(module_name), name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigError(
            f"{key} = {target!r} cannot be imported: {type(error).__name__}: {error}; it must name "
            'a class or function as "package.module:name"'
        ) from None
    require(callable(found), key, target, "a class or function")
    return found  # type: ignore[no-any-return]


def _schema(target: Callable[..., Any]) -> type[Any]:
    """Return a dataclass with the parameters of `target` that a file can set."""
    constructor = target.__init__ if inspect.isclass(target) else target
    hints = get_type_hints(constructor)
    entries: list[tuple[str, Any, Any]] = []
    for parameter in inspect.signature(target).parameters.values():
        hint = hints.get(parameter.name, str)
        plain = all(part in (*_PLAIN_TYPES, NoneType) for part in (get_args(hint) or (hint,)))
        keyword = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if plain and keyword and parameter.name not in _SUPPLIED:
            has_default = parameter.default is not parameter.empty
            default = parameter.default if has_default else "???"  # OmegaConf: must be given
            entries.append((parameter.name, hint, field(default=default)))
    return make_dataclass(f"{getattr(target, '__name__', 'target')}Settings", entries)


def _choice(group: str, name: str, overrides: dict[str, Any]) -> Choice:
    given = dict(overrides.get(group, {}))
    if "target" in given:  # another target: the file's settings are not its own
        settings = {"target": given.pop("target")}
        name = str(settings["target"])
    else:
        settings = _read_choice(group, name)
    if "target" not in settings:
        raise ConfigError(f'{group} {name!r} has no target: it must name "package.module:name"')
    target = resolve(group, settings.pop("target"))
    typed = _typed(_schema(target), group, settings, {group: given})
    for key, value in vars(typed).items():
        require(value != "???", f"{group}.{key}", None, "given: it has no default")
    return Choice(name, target, vars(typed), group)


def _devices(name: str) -> Devices:
    content = _read_choice("devices", name)
    allowed = ("source", "profiles", "measure")
    for key in content:
        if key not in allowed:
            raise unknown(f"key of device preset {name!r}", key, allowed)
    measure = content.get("measure", False)
    require(isinstance(measure, bool), f"measure of device preset {name!r}", measure, "a bool")
    profiles = [] if measure else parse_preset(name, content.get("profiles") or [])
    return Devices(name, str(content.get("source", "")), profiles, measure)


# ----------------------------------------------------------------------------------------- ranges


def _check_run(run: RunSettings) -> None:
    require(run.num_rounds >= 1, "run.num_rounds", run.num_rounds, "at least 1")
    require(
        run.min_available_nodes >= 1,
        "run.min_available_nodes",
        run.min_available_nodes,
        "at least 1",
    )
    for key in ("smoothing_seconds", "node_timeout", "reply_timeout"):
        require(getattr(run, key) > 0, f"run.{key}", getattr(run, key), "above 0")
    least = run.failures_before_rest
    require(least >= 1, "run.failures_before_rest", least, "at least 1")
    every = run.save_every
    require(every is None or every >= 1, "run.save_every", every, "null or at least 1")
    for key in ("deadline_factor", "norm_limit"):
        value = getattr(run, key)
        require(value is None or value > 1, f"run.{key}", value, "null or above 1")
    for key in ("max_seconds", "evaluate_every"):
        value = getattr(run, key)
        require(value is None or value > 0, f"run.{key}", value, "null or above 0")
    if run.clock not in ("auto", "virtual", "wall"):
        raise unknown("run.clock", run.clock, ("auto", "virtual", "wall"))
    if run.weighting not in ("equal", "examples"):
        raise unknown("run.weighting", run.weighting, ("equal", "examples"))


def _check_train(train: TrainSettings) -> None:
    rate = train.learning_rate
    require(rate > 0, "train.learning_rate", rate, "above 0")
    half_life = train.half_life
    ok = half_life is None or half_life > 0
    require(ok, "train.half_life", half_life, "null or above 0")
    require(0 <= train.momentum < 1, "train.momentum", train.momentum, "at least 0 and below 1")
    require(train.weight_decay >= 0, "train.weight_decay", train.weight_decay, "at least 0")
    if train.device not in ("auto", "cpu", "cuda", "mps"):
        raise unknown("train.device", train.device, ("auto", "cpu", "cuda", "mps"))
    if train.layers not in LAYERS:
        raise unknown("train.layers", train.layers, LAYERS)


def _check_probe(probing: ProbeSettings) -> None:
    most = MOST_BYTES / 1e6
    require(probing.seconds > 0, "probe.seconds", probing.seconds, "above 0")
    ok = 0 < probing.largest_mb <= most
    require(ok, "probe.largest_mb", probing.largest_mb, f"above 0 and at most {most:g}")
    require(probing.repeats >= 1, "probe.repeats", probing.repeats, "at least 1")
