"""Training in INT8, emulated: 8-bit whole numbers, carried by floating-point tensors.

A tensor on the grid is q · 2^e, with whole numbers q from −127 to 127 and one scale a tensor, a
power of two: the smallest at which the tensor's largest magnitude fits. That is the format of
Wang, Rasoulinezhad, Leong and So, "NITI: Training Integer Neural Networks Using Integer-Only
Arithmetic", IEEE Transactions on Parallel and Distributed Systems 2022,
https://arxiv.org/abs/2009.13108.

In a model that `make_int8` has changed, each convolution and linear layer multiplies the whole
numbers of its input and of its weight, and its errors, which backward brings, are rounded to whole
numbers too, at random, so that their mean is exact. Sums are formed in ``float64``, which holds all
that a 32-bit accumulator does, so that they are those of integer arithmetic to the bit; only on
MPS, which lacks it, in ``float32``, which does so up to 2^24.

What is not as in NITI: what is no convolution or linear layer (activations, pooling,
normalisations, the loss) is computed in floating point, and so are biases; and a step has the run's
learning rate, before `put_on_grid` rounds the weights, where NITI rounds gradients to so few bits
that their rate follows. It shows what INT8 does to a model; it is slower than ``float32``.
"""

from collections.abc import Callable
from math import frexp, isfinite, ldexp
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from flower_adsp.errors import ConfigError

_LARGEST = 127
_LEAST_EXPONENT = -126  # below which float32 loses digits

Forward = Callable[[Any, Tensor], Tensor]


def scale_of(tensor: Tensor) -> float:
    """Return 2^e, the smallest power of two that times 127 reaches all elements' magnitudes.

    It is 1 for a tensor of zeros, and NaN for one that holds NaN or infinity.
    """
    largest = float(tensor.detach().abs().max()) if tensor.numel() else 0.0
    if not isfinite(largest):
        return float("nan")
    if not largest:
        return 1.0
    mantissa, exponent = frexp(largest)  # largest = mantissa · 2^exponent, mantissa below 1
    exponent -= 7 if mantissa * 128 <= _LARGEST else 6
    return ldexp(1.0, max(exponent, _LEAST_EXPONENT))


def quantise(tensor: Tensor, draws: torch.Generator | None = None) -> Tensor:
    """Put a tensor on its grid.

    Parameters
    ----------
    tensor : Tensor
        Floating-point numbers.
    draws : torch.Generator | None (default: None)
        Of the tensor's device. It rounds at random, up with a probability of what is above the
        lower whole number, so that the mean is exact; None rounds to the nearest, and lets
        gradients pass as they are.

    Returns
    -------
    Tensor
        Of the same shape and type. What is on a grid already stays what it is.
    """
    scale = scale_of(tensor)
    if not isfinite(scale):
        return tensor * scale
    if draws is None:
        return torch.fake_quantize_per_tensor_affine(tensor, scale, 0, -_LARGEST, _LARGEST)
    scaled = tensor / scale
    whole = scaled.floor()
    drawn = torch.rand(tensor.shape, generator=draws, dtype=tensor.dtype, device=tensor.device)
    return (whole + (drawn < scaled - whole)) * scale


# ------------------------------------------------------------------------------------------ layers


class _RoundErrors(torch.autograd.Function):
    """Leaves a layer's output as it is, and puts the errors that come back on their grid."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, draws: torch.Generator | None) -> Tensor:
        ctx.draws = draws
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, errors: Tensor) -> tuple[Tensor, None]:
        return quantise(errors, ctx.draws), None


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64


def _conv2d(layer: nn.Conv2d, x: Tensor) -> Tensor:
    kind = _wide(x)
    bias = None if layer.bias is None else layer.bias.to(kind)
    weight = quantise(layer.weight).to(kind)
    output: Tensor = layer._conv_forward(quantise(x).to(kind), weight, bias)
    return output


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    kind = _wide(x)
    bias = None if layer.bias is None else layer.bias.to(kind)
    return nn.functional.linear(quantise(x).to(kind), quantise(layer.weight).to(kind), bias)


_FORWARDS: dict[type[nn.Module], Forward] = {nn.Conv2d: _conv2d, nn.Linear: _linear}
_STAY_FLOAT = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def check_layers(model: nn.Module) -> None:
    """See that a model's weights are in layers that can be trained in INT8, or may stay in FP32.

    Raises
    ------
    ConfigError
        If there is no convolution and no linear layer, or a layer of another type has weights.
    """
    supported = "Conv2d and Linear in INT8, and normalisations in FP32"
    modules = dict(model.named_modules())
    for name, module in modules.items():
        has_own = next(module.parameters(recurse=False), None) is not None
        if has_own and not (type(module) in _FORWARDS or isinstance(module, _STAY_FLOAT)):
            kind = type(module).__name__
            raise ConfigError(
                f"layer {name or 'of the model itself'!r} is a {kind}, which mixed precision does "
                f"not support; supported are {supported}"
            )
    if not any(type(module) in _FORWARDS for module in modules.values()):
        raise ConfigError(
            f"the model, a {type(model).__name__}, has no layer to train in INT8; mixed precision "
            f"supports {supported}"
        )


def make_int8(model: nn.Module, draws: torch.Generator | None = None) -> nn.Module:
    """Let a model's convolutions and linear layers compute in INT8, and return it.

    Parameters
    ----------
    model : nn.Module
        The model, which is changed; its parameters and the keys of its state stay as they are.
    draws : torch.Generator | None (default: None)
        Rounds errors; None rounds them to the nearest.

    Raises
    ------
    ConfigError
        As `check_layers`.
    """
    check_layers(model)
    for module in model.modules():
        forward = _FORWARDS.get(type(module))
        if forward is not None:
            module.forward = MethodType(_with_rounded_errors(forward, draws), module)
    return model


def _with_rounded_errors(forward: Forward, draws: torch.Generator | None) -> Forward:
    def rounded(layer: Any, x: Tensor) -> Tensor:
        output: Tensor = _RoundErrors.apply(forward(layer, x).to(x.dtype), draws)
        return output

    return rounded


@torch.no_grad()
def put_on_grid(model: nn.Module, draws: torch.Generator | None = None) -> None:
    """Put the weights of convolutions and linear layers on their grids, as after a step."""
    for module in model.modules():
        if type(module) in _FORWARDS:
            assert isinstance(module.weight, Tensor)
            module.weight.copy_(quantise(module.weight, draws))
