import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flower_adsp.sparse.meters import saved_bytes
from flower_adsp.sparse.ops import (
    TrainedSlice,
    channel_axis,
    freeze_module,
    make_memory_true,
    make_stock,
    set_slice,
)

LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "conv": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 5, 6)),
    "conv without bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), (2, 4, 5, 6)),
    "strided": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2), (2, 4, 9, 8)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 5, 6)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), (2, 4, 5, 6)),
    "pointwise": (lambda: nn.Conv2d(4, 6, 1), (2, 4, 3, 3)),
    "same": (lambda: nn.Conv2d(4, 6, (4, 3), padding="same"), (2, 4, 5, 6)),
    "reflect": (
        lambda: nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="reflect"), (2, 4, 5, 6)
    ),
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "linear over a sequence": (lambda: nn.Linear(4, 3, bias=False), (2, 5, 4)),
    "batch norm": (lambda: nn.BatchNorm2d(4), (3, 4, 2, 2)),
    "relu": (lambda: nn.ReLU(), (3, 7)),
    "relu6": (lambda: nn.ReLU6(), (3, 7)),
    "hardtanh": (lambda: nn.Hardtanh(-0.5, 0.7), (3, 7)),
    "leaky relu": (lambda: nn.LeakyReLU(0.2), (3, 7)),
    "max pool": (lambda: nn.MaxPool2d(3, 2, padding=1), (2, 3, 7, 9)),
    "max pool, dilated": (lambda: nn.MaxPool2d((2, 3), (1, 2), dilation=2), (2, 3, 7, 9)),
    "max pool, ceil": (lambda: nn.MaxPool2d(2, 2, ceil_mode=True), (2, 3, 7, 9)),
    "average pool": (lambda: nn.AvgPool2d(3, 2, padding=1, ceil_mode=True), (2, 3, 7, 9)),
}  # fmt: skip


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    make, shape = LAYERS[name]
    return make().double(), 3 * torch.randn(shape, dtype=torch.float64)


def gradients(module: nn.Module, x: Tensor) -> list[Tensor | None]:
    x = x.clone().requires_grad_()
    out = module(x)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weights).sum().backward()
    return [out.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients_are_pytorch_s(name: str) -> None:
    stock, x = build(name)
    ours = make_memory_true(copy.deepcopy(stock))
    for mine, theirs in zip(gradients(ours, x), gradients(stock, x), strict=True):
        assert theirs is not None
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert ours.state_dict().keys() == stock.state_dict().keys()


@pytest.mark.parametrize("name", [n for n in LAYERS if n != "batch norm"])
def test_gradcheck(name: str) -> None:
    module, x = build(name)
    make_memory_true(module)
    assert torch.autograd.gradcheck(module, (x.requires_grad_(),), atol=1e-6)


@pytest.mark.parametrize("name", [n for n in LAYERS if n != "reflect"])  # that keeps what it pads
def test_with_frozen_weights_next_to_nothing_is_kept(name: str) -> None:
    module, x = build(name)
    module.requires_grad_(False)
    expected = gradients(module.eval(), x)
    make_memory_true(module.train())
    freeze_module(module, True)
    x.requires_grad_()
    kept = saved_bytes(lambda: module(x).sum(), module)
    out = module(x)
    most = out.numel() if name.startswith(("relu", "hard", "leaky", "max")) else 8 * 8
    most = max(most, x.numel()) if "pool" not in name else most
    assert kept <= (0 if name.startswith(("conv", "linear", "average")) else most)
    found = gradients(module, x.detach())
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["conv", "strided", "depthwise", "pointwise", "linear",
                                  "linear over a sequence"])  # fmt: skip
def test_a_slice_has_the_gradient_of_these_channels_and_keeps_only_them(name: str) -> None:
    stock, x = build(name)
    whole = gradients(stock, x)
    module = make_memory_true(copy.deepcopy(stock))
    channels = torch.tensor([1, 3])
    axis = channel_axis(module)
    assert axis is not None
    weight = module.weight
    module.requires_grad_(False)
    part = nn.Parameter(weight.detach().index_select(axis, channels))
    set_slice(module, TrainedSlice(axis, channels, part))
    found = gradients(module, x)
    torch.testing.assert_close(found[:2], whole[:2], rtol=1e-12, atol=1e-12)
    assert whole[2] is not None
    torch.testing.assert_close(part.grad, whole[2].index_select(axis, channels))
    kept = saved_bytes(lambda: module(x.requires_grad_()).sum(), module, exclude=[part])
    indices = 0 if name.startswith("linear") else 2 * 8
    assert kept == x.numel() // 4 * 2 * 8 + indices  # half of the input
    with torch.no_grad():
        part.zero_()
    module(x)
    assert not weight.index_select(axis, channels).any()
    assert weight.any()


def test_it_is_undone() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU())
    make_memory_true(model)
    freeze_module(model[1], True)
    make_stock(model)
    x = torch.randn(2, 1, 5, 5)
    before = model[1].running_mean.clone()
    model.train()(x)
    assert not torch.equal(before, model[1].running_mean)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_relu_in_place_leaves_a_leaf_alone() -> None:
    module = make_memory_true(nn.ReLU(inplace=True))
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    module(x).sum().backward()
    assert x.tolist() == [-1.0, 2.0]
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 1.0]


def test_other_layers_stay_as_they_are() -> None:
    module = make_memory_true(nn.GELU())
    assert "forward" not in module.__dict__
    assert channel_axis(nn.Conv2d(4, 6, 3, groups=2)) is None
