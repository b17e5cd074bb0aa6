"""Memory-true layers: the same results as PyTorch's, keeping for backward only what it needs.

PyTorch's convolution keeps its input even if its weight is frozen, and so do BatchNorm in
evaluation mode, activations and pooling. So freezing layers with ``requires_grad_`` saves next to
nothing below the last layers. The layers here keep an input only where a weight that is trained
needs it (and of it only the channels that are trained), a mask of one byte an element for
activations, and one byte an output element for max-pooling.

`make_memory_true` changes the ``forward`` of a model's modules and `make_stock` undoes it; modules,
parameters and the keys of ``state_dict`` stay as they are. Further types of layer are added by the
`memory_true` decorator. See Bhatia and Dangel, "Lowering PyTorch's Memory Consumption for Selective
Differentiation", 2024, https://arxiv.org/abs/2404.12406.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Forward = Callable[[Any, Tensor], Tensor]

FORWARDS: dict[type[nn.Module], Forward] = {}
_FROZEN, _SLICE = "flower_adsp_is_frozen", "flower_adsp_slice"


class TrainedSlice:
    """The input channels of a layer's weight that are trained, and the leaf that is.

    Parameters
    ----------
    axis : int
        Along the input channels.
    channels : Tensor
        Their indices, int64, of shape ``(c,)``.
    leaf : nn.Parameter
        A copy of these channels of the weight; it is what the optimizer steps.
    """

    def __init__(self, axis: int, channels: Tensor, leaf: nn.Parameter) -> None:
        self.axis = axis
        self.channels = channels
        self.leaf = leaf

    def write(self, weight: Tensor) -> None:
        """Copy the slice into the weight."""
        with torch.no_grad():
            weight.index_copy_(self.axis, self.channels, self.leaf)

    def read(self, weight: Tensor) -> None:
        """Copy from the weight into the slice."""
        with torch.no_grad():
            self.leaf.copy_(weight.index_select(self.axis, self.channels))


def memory_true(*kinds: type[nn.Module]) -> Callable[[Forward], Forward]:
    """Register a memory-true forward for types of module."""

    def register(forward: Forward) -> Forward:
        for kind in kinds:
            FORWARDS[kind] = forward
        return forward

    return register


def make_memory_true(model: nn.Module) -> nn.Module:
    """Let a model's modules of the registered types use their memory-true forward."""
    for module in model.modules():
        forward = FORWARDS.get(type(module))
        if forward is not None:
            module.forward = MethodType(forward, module)
    return model


def make_stock(model: nn.Module) -> nn.Module:
    """Undo `make_memory_true`."""
    for module in model.modules():
        module.__dict__.pop("forward", None)
        module.__dict__.pop(_FROZEN, None)
        module.__dict__.pop(_SLICE, None)
    return model


def freeze_module(module: nn.Module, is_frozen: bool) -> None:
    """Say whether a module uses its running statistics whatever its mode, as frozen ones do."""
    module.__dict__[_FROZEN] = is_frozen


def is_frozen(module: nn.Module) -> bool:
    """Tell whether `freeze_module` froze a module."""
    return bool(module.__dict__.get(_FROZEN, False))


def set_slice(module: nn.Module, trained: TrainedSlice | None) -> None:
    """Let only some input channels of a layer's weight be trained; None for all or none."""
    module.__dict__[_SLICE] = trained


def slice_of(module: nn.Module) -> TrainedSlice | None:
    """Return what `set_slice` set."""
    return module.__dict__.get(_SLICE)


# ------------------------------------------------------------------------------------ convolution


class _Convolution(torch.autograd.Function):
    """A convolution that keeps its input only if the weight, or a slice of it, is trained."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        part: Tensor | None,
        channels: Tensor | None,
        settings: tuple[Any, ...],
    ) -> Tensor:
        stride, padding, dilation, groups = settings
        ctx.settings, ctx.shape = settings, x.shape
        ctx.has_bias = bias is not None
        ctx.part_shape = None if part is None else part.shape
        kept = None
        if ctx.needs_input_grad[1]:
            kept = x
        elif channels is not None and ctx.needs_input_grad[3]:
            kept = x.index_select(1, channels)
        ctx.save_for_backward(kept, weight if ctx.needs_input_grad[0] else None, channels)
        ctx.weight_shape = weight.shape
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, channels = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_part = ctx.needs_input_grad[:4]
        needs_bias = needs_bias and ctx.has_bias
        grads: list[Tensor | None] = [None, None, None]
        if needs_x or needs_weight or needs_bias:
            grads = _convolution_backward(
                grad,
                _unused(grad, ctx.shape) if x is None or not needs_weight else x,
                _unused(grad, ctx.weight_shape) if weight is None else weight,
                ctx.settings,
                (needs_x, needs_weight, needs_bias),
            )
        part = None
        if needs_part:
            stride, padding, dilation, groups = ctx.settings
            if groups > 1:  # depthwise: its outputs are the same channels
                grad, groups = grad.index_select(1, channels), len(channels)
            part = _convolution_backward(
                grad,
                x,
                _unused(grad, ctx.part_shape),
                (stride, padding, dilation, groups),
                (False, True, False),
            )[1]
        return grads[0], grads[1], grads[2], part, None, None


def _unused(like: Tensor, shape: torch.Size) -> Tensor:
    """Return a tensor of a shape, of which nobody reads the values, without memory of its own."""
    return like.new_zeros(1).expand(shape)


def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    settings: tuple[Any, ...],
    mask: tuple[bool, bool, bool],
) -> list[Tensor | None]:
    stride, padding, dilation, groups = settings
    found = torch.ops.aten.convolution_backward(
        grad,
        x,
        weight,
        [weight.shape[0]],
        list(stride),
        list(padding),
        list(dilation),
        False,
        [0, 0],
        groups,
        list(mask),
    )
    return [tensor if wanted else None for tensor, wanted in zip(found, mask, strict=True)]


@memory_true(nn.Conv2d)
def conv2d(module: nn.Conv2d, x: Tensor) -> Tensor:
    """Convolve, keeping of the input what a trained weight needs."""
    padding: Any = module.padding
    if module.padding_mode != "zeros" or isinstance(padding, str):
        x = F.pad(
            x,
            module._reversed_padding_repeated_twice,
            "constant" if module.padding_mode == "zeros" else module.padding_mode,
        )
        padding = (0, 0)
    settings = (module.stride, padding, module.dilation, module.groups)
    part, channels = _synchronised_slice(module)
    result: Tensor = _Convolution.apply(x, module.weight, module.bias, part, channels, settings)
    return result


def _synchronised_slice(module: nn.Conv2d | nn.Linear) -> tuple[Tensor | None, Tensor | None]:
    """Copy a trained slice into the weight that the forward uses."""
    trained = slice_of(module)
    if trained is None:
        return None, None
    trained.write(module.weight)
    return trained.leaf, trained.channels


def channel_axis(module: nn.Module) -> int | None:
    """Return the axis of a layer's weight along its input channels; None where it has none.

    A grouped convolution that is not depthwise has none: its inputs are not cut.
    """
    if isinstance(module, nn.Linear):
        return 1
    if isinstance(module, nn.Conv2d) and type(module) in FORWARDS:
        if module.groups == 1:
            return 1
        return 0 if _is_depthwise(module) else None
    return None


def _is_depthwise(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv2d):
        return False
    return 1 < module.groups == module.in_channels == module.out_channels


# ----------------------------------------------------------------------------------------- linear


class _Linear(torch.autograd.Function):
    """A linear layer that keeps its input only if the weight, or a slice of it, is trained."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        part: Tensor | None,
        channels: Tensor | None,
    ) -> Tensor:
        kept = None
        if ctx.needs_input_grad[1]:
            kept = x
        elif channels is not None and ctx.needs_input_grad[3]:
            kept = x.index_select(-1, channels)
        ctx.save_for_backward(kept, weight if ctx.needs_input_grad[0] else None)
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_part = ctx.needs_input_grad[:4]
        rows = grad.reshape(-1, grad.shape[-1])
        by_weight = None
        if needs_weight or needs_part:
            by_weight = rows.t() @ x.reshape(-1, x.shape[-1])
        return (
            grad @ weight if needs_x else None,
            by_weight if needs_weight else None,
            rows.sum(0) if needs_bias and ctx.has_bias else None,
            by_weight if needs_part else None,
            None,
        )


@memory_true(nn.Linear)
def linear(module: nn.Linear, x: Tensor) -> Tensor:
    """Multiply, keeping of the input what a trained weight needs."""
    part, channels = _synchronised_slice(module)
    result: Tensor = _Linear.apply(x, module.weight, module.bias, part, channels)
    return result


# ---------------------------------------------------------------------------------- normalisation


@memory_true(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm(module: nn.modules.batchnorm._BatchNorm, x: Tensor) -> Tensor:
    """Normalise; where frozen, or not training, by a scale and a shift that keep no input."""
    mean, variance = module.running_mean, module.running_var
    uses_batch = (module.training and not is_frozen(module)) or mean is None or variance is None
    is_trained = module.affine and module.weight.requires_grad
    if uses_batch or is_trained:
        stock: Tensor = type(module).forward(module, x)
        return stock
    assert mean is not None
    assert variance is not None
    with torch.no_grad():
        scale = torch.rsqrt(variance + module.eps)
        if module.affine:
            scale = scale * module.weight
        shift = -mean * scale
        if module.affine:
            shift = shift + module.bias
        shape = [1, -1] + [1] * (x.dim() - 2)
        scale, shift = scale.view(shape), shift.view(shape)
    return torch.addcmul(shift, x, scale)


# ------------------------------------------------------------------------------------- activations


class _Clamp(torch.autograd.Function):
    """An activation that is linear on an interval and constant elsewhere; keeps a bool mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float, inplace: bool) -> Tensor:
        if ctx.needs_input_grad[0]:
            mask = x > low
            if high != float("inf"):
                mask &= x < high
            ctx.save_for_backward(mask)
        if inplace:
            ctx.mark_dirty(x)
            return x.clamp_(low, high)
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return grad * mask, None, None, None


def _clamp(x: Tensor, low: float, high: float, inplace: bool) -> Tensor:
    is_leaf = x.is_leaf and x.requires_grad
    result: Tensor = _Clamp.apply(x, low, high, inplace and not is_leaf)
    return result


@memory_true(nn.ReLU)
def relu(module: nn.ReLU, x: Tensor) -> Tensor:
    """Return max(x, 0)."""
    return _clamp(x, 0.0, float("inf"), module.inplace)


@memory_true(nn.ReLU6, nn.Hardtanh)
def hardtanh(module: nn.Hardtanh, x: Tensor) -> Tensor:
    """Return x, cut off at both ends."""
    return _clamp(x, module.min_val, module.max_val, module.inplace)


class _LeakyReLU(torch.autograd.Function):
    """Leaky ReLU; keeps a bool mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        ctx.slope = slope
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(x > 0)
        return F.leaky_relu(x, slope)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return torch.where(mask, grad, grad * ctx.slope), None


@memory_true(nn.LeakyReLU)
def leaky_relu(module: nn.LeakyReLU, x: Tensor) -> Tensor:
    """Return x where it is above 0, else a fraction of it."""
    result: Tensor = _LeakyReLU.apply(x, module.negative_slope)
    return result


# ------------------------------------------------------------------------------------------ pooling


class _MaxPool(torch.autograd.Function):
    """Max-pooling that keeps one byte an output element: the place within the window."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: tuple[Any, ...]) -> Tensor:
        kernel, stride, padding, dilation, ceil_mode = settings
        pooled, places = F.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil_mode)
        if ctx.needs_input_grad[0]:
            ctx.settings, ctx.shape = settings, x.shape
            row, column = _corner(places, settings)
            rows = (places // x.shape[-1] - row) // dilation[0]
            columns = (places % x.shape[-1] - column) // dilation[1]
            ctx.save_for_backward((rows * kernel[1] + columns).to(torch.uint8))
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (within,) = ctx.saved_tensors
        kernel, _, _, dilation, _ = ctx.settings
        row, column = _corner(within, ctx.settings)
        within = within.long()
        places = (row + within // kernel[1] * dilation[0]) * ctx.shape[-1]
        places += column + within % kernel[1] * dilation[1]
        flat = grad.new_zeros((*ctx.shape[:-2], ctx.shape[-2] * ctx.shape[-1]))
        flat.scatter_add_(-1, places.flatten(-2), grad.flatten(-2))
        return flat.view(ctx.shape), None


def _corner(pooled: Tensor, settings: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return the first row and column of each output element's window."""
    _, stride, padding, _, _ = settings
    rows = torch.arange(pooled.shape[-2], device=pooled.device)[:, None] * stride[0] - padding[0]
    columns = torch.arange(pooled.shape[-1], device=pooled.device) * stride[1] - padding[1]
    return rows, columns


@memory_true(nn.MaxPool2d)
def max_pool2d(module: nn.MaxPool2d, x: Tensor) -> Tensor:
    """Pool by the maximum."""
    kernel, stride, padding, dilation = (
        (value, value) if isinstance(value, int) else tuple(value)
        for value in (module.kernel_size, module.stride, module.padding, module.dilation)
    )
    if module.return_indices or kernel[0] * kernel[1] > 256:
        stock: Tensor = nn.MaxPool2d.forward(module, x)
        return stock
    settings = (kernel, stride, padding, dilation, module.ceil_mode)
    result: Tensor = _MaxPool.apply(x, settings)
    return result


class _AveragePool(torch.autograd.Function):
    """Average pooling that keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: tuple[Any, ...]) -> Tensor:
        ctx.settings, ctx.shape = settings, x.shape
        pooled: Tensor = F.avg_pool2d(x, *settings)
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kernel, stride, padding, ceil_mode, count_padding, divisor = ctx.settings
        found: Tensor = torch.ops.aten.avg_pool2d_backward(
            grad,
            _unused(grad, ctx.shape),
            kernel,
            stride,
            padding,
            ceil_mode,
            count_padding,
            divisor,
        )
        return found, None


@memory_true(nn.AvgPool2d)
def avg_pool2d(module: nn.AvgPool2d, x: Tensor) -> Tensor:
    """Pool by the mean."""
    kernel, stride, padding = (
        (value, value) if isinstance(value, int) else tuple(value)
        for value in (module.kernel_size, module.stride, module.padding)
    )
    settings = (
        kernel, stride, padding, module.ceil_mode, module.count_include_pad,
        module.divisor_override,
    )  # fmt: skip
    result: Tensor = _AveragePool.apply(x, settings)
    return result
