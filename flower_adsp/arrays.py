"""Models as dictionaries of NumPy arrays: conversion, checks and the arithmetic of commits.

Parameters travel as *updates* (differences) and buffers, such as BatchNorm's running statistics,
as *values*: adding differences of a running variance could make it negative.
"""

from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.common.constant import SType
from numpy.lib.format import header_data_from_array_1_0, write_array_header_1_0
from numpy.typing import NDArray

Weights = dict[str, NDArray[Any]]

_BATCHNORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def decode(record: ArrayRecord) -> Weights:
    """Return the arrays of a record by name."""
    return {name: array.numpy() for name, array in record.items()}


def encode(weights: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return a record with copies of the arrays."""
    return ArrayRecord({name: _encode(array) for name, array in weights.items()})


def _encode(array: NDArray[Any]) -> Array:
    """Return what ``Array(array)`` does, which copies the data twice."""
    array = np.asarray(array, order="C")
    header = BytesIO()
    write_array_header_1_0(header, header_data_from_array_1_0(array))
    data = b"".join((header.getvalue(), array.data))
    return Array(str(array.dtype), array.shape, SType.NUMPY, data)


def num_bytes(weights: Mapping[str, NDArray[Any]]) -> int:
    """Return the size in bytes of the arrays, without any framing."""
    return sum(array.nbytes for array in weights.values())


def is_finite(array: NDArray[Any]) -> bool:
    """Tell whether an array holds neither NaN nor infinity.

    A sum is finite only if all its terms are, and needs no second array; only where it is not
    finite (which large finite terms can also cause) is each element looked at.
    """
    if not np.issubdtype(array.dtype, np.inexact):
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.reduce(array, axis=None)
    return bool(np.isfinite(total)) or bool(np.isfinite(array).all())


def is_averaged(array: NDArray[Any]) -> bool:
    """Tell whether an array may be averaged or scaled: only floating-point ones may."""
    return bool(np.issubdtype(array.dtype, np.floating))


def is_buffer_name(name: str) -> bool:
    """Tell whether a name is that of a BatchNorm buffer, for replies that do not say it."""
    return name.rsplit(".", 1)[-1] in _BATCHNORM_BUFFERS


def add_scaled(weights: Weights, update: Weights, scale: float) -> None:
    """Do W += scale · U in place. `update` is used as scratch space and must not be used after."""
    for name, delta in update.items():
        target = weights[name]
        np.multiply(delta, target.dtype.type(scale), out=delta)
        np.add(target, delta, out=target)


def mix_buffers(weights: Weights, values: Weights, rate: float) -> None:
    """Do buffer += rate · (value − buffer) in place; of integer buffers keep the larger."""
    for name, value in values.items():
        target = weights[name]
        if is_averaged(target):
            target += target.dtype.type(rate) * (value - target)
        else:
            np.maximum(target, value, out=target)


def weighted_mean(items: Iterable[Weights], shares: Iterable[float]) -> Weights:
    """Return Σ share · arrays; integer arrays are not averaged but the largest is kept.

    Parameters
    ----------
    items : Iterable[Weights]
        Dictionaries with the same names and shapes.
    shares : Iterable[float]
        One factor an item; they should add up to one.
    """
    mean: Weights = {}
    for arrays, share in zip(items, shares, strict=True):
        for name, array in arrays.items():
            if not is_averaged(array):
                mean[name] = np.maximum(mean[name], array) if name in mean else array
            elif name in mean:
                mean[name] = mean[name] + array * array.dtype.type(share)
            else:
                mean[name] = array * array.dtype.type(share)
    return mean
