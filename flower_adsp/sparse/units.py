"""A model as an ordered list of units: the layers or blocks that are trained or frozen as one."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from flower_adsp.errors import ConfigError

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


@dataclass(frozen=True)
class Unit:
    """A part of a model that is trained or frozen as one.

    Parameters
    ----------
    name : str
        Name of its first module with parameters.
    modules : tuple[str, ...]
        Names of its modules; a module without parameters belongs to the unit before it.
    parameters, buffers : tuple[str, ...]
        Names of its parameters and buffers, as in the model's ``state_dict``.
    """

    name: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


def split_into_units(model: nn.Module) -> list[Unit]:
    """Split a model into units, in the order in which its modules were registered.

    Opened are the model itself, containers (exactly ``Sequential``, ``ModuleList`` or
    ``ModuleDict``), and a module with more than half of all parameters if most of these are in one
    of its containers. What is left whole is a unit, such as a layer or a residual block. A
    normalisation that directly follows a layer belongs to its unit, and parameters that an opened
    module owns itself to the next unit.

    Parameters
    ----------
    model : nn.Module
        Any model whose parts run in the order of their registration.

    Returns
    -------
    list[Unit]
        Each parameter and each buffer is in exactly one.

    Raises
    ------
    ConfigError
        If the model has no parameters, or one that two modules share.
    """
    total = _size(model)
    if not total:
        raise ConfigError(
            f"the model, a {type(model).__name__}, has no parameters: there is nothing to train"
        )
    _check_ties(model)
    units: list[Unit] = []
    pending: list[str] = []  # modules and parameters that wait for the unit they belong to
    owned: list[str] = []
    for name, module, is_open in _parts(model, "", total):
        if is_open:
            owned += [_join(name, key) for key, _ in module.named_parameters(recurse=False)]
            owned += [_join(name, key) for key, _ in module.named_buffers(recurse=False)]
            continue
        has_parameters = any(True for _ in module.parameters())
        follows = units and isinstance(module, _NORMS) and not any(True for _ in module.children())
        if units and (follows or not has_parameters):
            units[-1] = _extended(units[-1], name, model)
        elif not has_parameters:
            pending.append(name)
        else:
            units.append(_unit(name, (*pending, name), tuple(owned), model))
            pending, owned = [], []
    if owned and units:
        last = units[-1]
        units[-1] = _unit(last.name, last.modules, (*_own(last, model), *owned), model)
    if not units:  # the model is one layer
        names = tuple(key for key, _ in model.named_parameters())
        units = [Unit("model", ("",), names, tuple(key for key, _ in model.named_buffers()))]
    return units


def _own(unit: Unit, model: nn.Module) -> tuple[str, ...]:
    inside = {key for name in unit.modules for key in _names(model, name)}
    return tuple(key for key in (*unit.parameters, *unit.buffers) if key not in inside)


def _names(model: nn.Module, name: str) -> list[str]:
    module = model.get_submodule(name)
    found = [_join(name, key) for key, _ in module.named_parameters()]
    return found + [_join(name, key) for key, _ in module.named_buffers()]


def _parts(module: nn.Module, name: str, total: int) -> Iterator[tuple[str, nn.Module, bool]]:
    """Walk over the modules, saying of each whether it is opened."""
    children = list(module.named_children())
    # A module around a container of most of its parameters is a backbone; one around layers and
    # perhaps a shortcut is a block.
    is_backbone = 2 * _size(module) > total and any(
        type(child) in _CONTAINERS and 2 * _size(child) > _size(module) for _, child in children
    )
    is_open = bool(children) and (not name or type(module) in _CONTAINERS or is_backbone)
    yield name, module, is_open or not name
    if is_open:
        for key, child in children:
            yield from _parts(child, _join(name, key), total)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _unit(name: str, modules: tuple[str, ...], owned: tuple[str, ...], model: nn.Module) -> Unit:
    parameters = dict(model.named_parameters())
    inside = [*owned, *(key for each in modules for key in _names(model, each))]
    return Unit(
        name,
        modules,
        tuple(key for key in inside if key in parameters),
        tuple(key for key in inside if key not in parameters),
    )


def _extended(unit: Unit, name: str, model: nn.Module) -> Unit:
    return _unit(unit.name, (*unit.modules, name), _own(unit, model), model)


def _check_ties(model: nn.Module) -> None:
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), name)
        if first != name:
            raise ConfigError(
                f"parameters {first!r} and {name!r} of the model are one tensor; units that share "
                "weights cannot be trained apart: untie them, or train without a plan"
            )
