"""Flower strategies for unequal devices, all of them one event loop with different rules."""

from flower_adsp.strategies.adacomm import Adacomm, FixedAdacomm
from flower_adsp.strategies.adsp import Adsp
from flower_adsp.strategies.adsp_guarded import AdspGuarded
from flower_adsp.strategies.adsp_overlap import AdspOverlap
from flower_adsp.strategies.adsp_plus import AdspPlus
from flower_adsp.strategies.base import CommitStrategy
from flower_adsp.strategies.batchtune import BatchTune
from flower_adsp.strategies.bsp import Bsp
from flower_adsp.strategies.dsparse import DSparse
from flower_adsp.strategies.fedasync import FedAsync
from flower_adsp.strategies.fedbuff import FedBuff
from flower_adsp.strategies.fedcompass import FedCompass
from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.socflow import Socflow
from flower_adsp.strategies.ssp import Ssp

__all__ = [
    "Adacomm",
    "Adsp",
    "AdspGuarded",
    "AdspOverlap",
    "AdspPlus",
    "BatchTune",
    "Bsp",
    "CommitStrategy",
    "DSparse",
    "FedAsync",
    "FedBuff",
    "FedCompass",
    "FixedAdacomm",
    "LoopOptions",
    "Socflow",
    "Ssp",
]
