"""Mixed precision over two processors: one replica in FP32 on a CPU, one in INT8 on an NPU.

Xu and others, "SoCFlow: Efficient and Scalable DNN Training on SoC-Clustered Edge Servers", ASPLOS
2024, https://doi.org/10.1145/3617232.3624847, section 3.2. Each mini-batch is split between the
two, both take a step on their part from the same model, and the models are merged.
"""

from collections.abc import Iterable
from math import exp, isfinite, sqrt

import torch
from torch import Tensor

from flower_adsp.errors import require


def similarity(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return α = cos(logits of FP32, logits of INT8), over all examples as one vector.

    Parameters
    ----------
    pairs : Iterable[tuple[Tensor, Tensor]]
        The logits of both, a batch at a time, of the same shape.

    Returns
    -------
    float
        From −1 to 1; 0 where the logits of either are all zero or not finite.

    Notes
    -----
    Source: SoCFlow, equation 4.
    """
    dot = first = second = 0.0
    for ours, theirs in pairs:
        a, b = ours.flatten().double(), theirs.flatten().double()
        dot, first, second = dot + float(a @ b), first + float(a @ a), second + float(b @ b)
    norm = sqrt(first) * sqrt(second)
    if not isfinite(norm) or not isfinite(dot) or not norm:
        return 0.0
    return min(max(dot / norm, -1.0), 1.0)


def npu_part(npu: float, cpu: float = 1.0) -> float:
    """Return β = T_NPU/(T_NPU + T_CPU), the NPU's part of what both compute.

    Parameters
    ----------
    npu, cpu : float
        Throughputs, such as examples per second. β is to approach 1 as the NPU becomes stronger,
        so T cannot be times.

    Notes
    -----
    Source: SoCFlow, equation 6.
    """
    require(npu > 0 and cpu > 0, "throughputs", (npu, cpu), "above 0")
    return npu / (npu + cpu)


def fp32_share(alpha: float, beta: float) -> float:
    """Return max(e^−α, 1 − β), the part of a mini-batch that is trained in FP32; at most 1.

    For α from 0 to 1 it is at least e^−1 = 0.368, however fast the NPU is. From α = 0 down, where
    INT8 is of no use, all is FP32.

    Notes
    -----
    Source: SoCFlow, sections 3.2 and equations 5 and 6. Equation 5 merges by e^−α and its authors'
    talk by this share, so that an example counts the same in either part; it is this that `merged`
    gets here. They differ only where the NPU is so slow that 1 − β > e^−α.
    """
    return min(max(exp(-alpha), 1.0 - beta), 1.0)


def time_share(share: float, speedup: float) -> float:
    """Return the time of a step as a part of one in FP32 alone: max(γ, (1 − γ)/speed-up).

    Parameters
    ----------
    share : float
        γ, the part in FP32.
    speedup : float
        Throughput of the NPU over that of the CPU; both compute at the same time.
    """
    return max(share, (1.0 - share) / speedup)


def fp32_examples(examples: int, share: float) -> int:
    """Return how many of a mini-batch's examples are trained in FP32.

    At least one example is in each part, unless there is only one or the share is 1: these are
    trained in FP32.
    """
    if share >= 1.0 or examples < 2:
        return examples
    return min(max(round(share * examples), 1), examples - 1)


def merged(fp32: Tensor, int8: Tensor, share: float) -> Tensor:
    """Return γ·w_FP32 + (1 − γ)·w_INT8; integers are those of FP32.

    Where both are the same, so is the result, bit for bit (but for the sign of a zero).

    Notes
    -----
    Source: SoCFlow, equation 5; see `fp32_share`.
    """
    if not fp32.is_floating_point():
        return fp32
    return torch.lerp(int8, fp32, share)
