"""Train one model across unequal edge devices with Flower.

The package is the core; ``flower_adsp.strategies`` is the server half and ``flower_adsp.clients``
the device half. In a checkout, and in the app bundle that ``flwr run`` builds, both lie beside
this folder; in a wheel they lie inside it. Either way they are imported under this one name.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_HERE = Path(__file__).resolve().parent
if not (_HERE / "strategies").is_dir():
    __path__.append(str(_HERE.parent))

_PUBLIC = {
    "Adsp": "flower_adsp.strategies",
    "Bsp": "flower_adsp.strategies",
    "CommitStrategy": "flower_adsp.strategies",
    "DSparse": "flower_adsp.strategies",
    "DSparsePlan": "flower_adsp.sparse.plan",
    "LayerPlanner": "flower_adsp.sparse.plan",
    "LoopOptions": "flower_adsp.strategies",
    "DeviceProfile": "flower_adsp.devices",
    "Network": "flower_adsp.network",
    "register": "flower_adsp.clients",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that a device loads only its half."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
