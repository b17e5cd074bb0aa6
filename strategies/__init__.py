"""Flower strategies for unequal devices, all of them one event loop with different rules."""

from flower_adsp.strategies.adsp import Adsp
from flower_adsp.strategies.base import CommitStrategy
from flower_adsp.strategies.bsp import Bsp
from flower_adsp.strategies.options import LoopOptions

__all__ = ["Adsp", "Bsp", "CommitStrategy", "LoopOptions"]
