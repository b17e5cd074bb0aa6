"""What the arrays of a commit travel as: as they are, or in fewer bytes.

``int8`` scales each array by its largest magnitude to −127 … 127 and rounds at random, up with a
probability of what is above the lower whole number, so that the mean is exact (stochastic rounding,
as in Alistarh, Grubic, Li, Tomioka and Vojnovic, "QSGD", NeurIPS 2017,
https://arxiv.org/abs/1610.02132). What rounding took away the device adds to its next update (error
feedback: Seide, Fu, Droppo, Li and Yu, "1-Bit Stochastic Gradient Descent", Interspeech 2014;
Karimireddy, Rebjock, Stich and Jaggi, ICML 2019, https://arxiv.org/abs/1901.09847).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from flower_adsp.arrays import Weights, is_averaged

AS_IT_IS = "float32"
CODECS = (AS_IT_IS, "float16", "int8")
_LARGEST = 127  # of int8, the same on both sides of zero
_TYPES: Mapping[str, DTypeLike] = {"float16": np.float16, "int8": np.int8}


@dataclass(frozen=True)
class Compressed:
    """An update as it travels.

    Attributes
    ----------
    arrays : dict[str, NDArray]
        By name, of the codec's type.
    scales : dict[str, float]
        With ``int8``, what to multiply each by; empty with others.
    lost : dict[str, NDArray]
        With ``int8``, what rounding took away, of the update's own type.
    """

    arrays: Weights
    scales: dict[str, float]
    lost: Weights


def compress(update: Weights, codec: str, draws: np.random.Generator) -> Compressed:
    """Return an update as it travels.

    Parameters
    ----------
    update : dict[str, NDArray]
        Floating-point arrays, by name.
    codec : str
        ``float32`` for as they are, ``float16`` or ``int8``.
    draws : np.random.Generator
        Decides how ``int8`` rounds.
    """
    if codec == AS_IT_IS:
        return Compressed(update, {}, {})
    if codec == "float16":
        largest = np.finfo(np.float16).max
        return Compressed(
            {
                name: np.clip(array, -largest, largest).astype(np.float16)
                for name, array in update.items()
            },
            {},
            {},
        )
    arrays, scales, lost = {}, {}, {}
    for name, array in update.items():
        scale = float(np.max(np.abs(array), initial=0.0) / array.dtype.type(_LARGEST))
        scaled = array / scale if scale else np.zeros_like(array)
        whole = np.floor(scaled)
        whole += draws.random(array.shape) < scaled - whole
        # Rounding of the quotient may leave a number a little beyond the largest.
        arrays[name] = np.clip(whole, -_LARGEST, _LARGEST).astype(np.int8)
        scales[name] = scale
        lost[name] = array - restore(arrays[name], scale, array.dtype)
    return Compressed(arrays, scales, lost)


def restore(array: NDArray[Any], scale: float, kind: DTypeLike) -> NDArray[Any]:
    """Return an array that has travelled, in its own type."""
    return np.asarray(array.astype(kind) * np.asarray(scale, kind))


def type_of(codec: str, own: DTypeLike) -> DTypeLike:
    """Return the type in which an array of a type of its own travels."""
    return _TYPES.get(codec, own)


def travelling_bytes(array: NDArray[Any], codec: str, size: int | None = None) -> int:
    """Return the bytes of an array's update as it travels.

    Parameters
    ----------
    array : NDArray
        The model's.
    codec : str
        The codec.
    size : int | None (default: None)
        How many of its elements travel; None for all.
    """
    kind = np.dtype(type_of(codec, array.dtype) if is_averaged(array) else array.dtype)
    return (array.size if size is None else size) * kind.itemsize
