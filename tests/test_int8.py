"""INT8 emulated in floating point equals integer arithmetic, and rounds as it should."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from flower_adsp.errors import ConfigError
from flower_adsp.int8 import check_layers, make_int8, put_on_grid, quantise, scale_of
from flower_adsp.seeding import stream


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.from_numpy(stream(seed, "numbers").normal(0, scale, shape).astype(np.float32))


def whole(tensor: Tensor) -> tuple[Any, float]:
    """Return the integers that a tensor on its grid stands for, and their scale."""
    scale = scale_of(tensor)
    quotients = tensor.detach().double().numpy() / scale
    np.testing.assert_array_equal(quotients, np.rint(quotients))
    assert np.abs(quotients).max() <= 127
    return quotients.astype(np.int32), scale


floats = st.floats(-(2.0**100), 2.0**100, width=32)


@given(st.lists(floats, min_size=1, max_size=20))
def test_the_scale_is_the_smallest_power_of_two_that_fits(values: list[float]) -> None:
    tensor = torch.tensor(values)
    scale, largest = scale_of(tensor), float(tensor.abs().max())
    assert np.frexp(scale)[0] == 0.5
    assert largest <= 127 * scale
    if largest > 127 * 2.0**-126:
        assert largest > 127 * scale / 2


@pytest.mark.parametrize("at_random", [False, True])
@given(st.lists(floats, min_size=1, max_size=20), st.integers(0, 2**31))
def test_quantising_is_close_and_done_once(at_random: bool, values: list[float], seed: int) -> None:
    tensor = torch.tensor(values)
    generator = draws(seed) if at_random else None
    on_grid = quantise(tensor, generator)
    whole(on_grid)
    distance = (on_grid.double() - tensor.double()).abs().max()
    assert distance <= scale_of(tensor) * (1.0 if at_random else 0.5)
    for again in (None, generator):
        assert torch.equal(quantise(on_grid, again), on_grid)


def test_rounding_at_random_has_the_mean_and_is_seeded() -> None:
    tensor = torch.tensor([127.0, 0.25, -0.25, 3.9, -100.5, 0.0]).repeat(20_000, 1)
    rounded = quantise(tensor, draws(1))
    spread = 0.5 / np.sqrt(len(tensor))
    assert (rounded.mean(0) - tensor[0]).abs().max() < 5 * spread
    assert set(rounded[:, 1].tolist()) == {0.0, 1.0}
    assert set(rounded[:, 2].tolist()) == {-1.0, 0.0}
    assert torch.equal(rounded, quantise(tensor, draws(1)))
    assert not torch.equal(rounded, quantise(tensor, draws(2)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at_random", [False, True])
def test_what_is_not_finite_stays_so(bad: float, at_random: bool) -> None:
    tensor = quantise(torch.tensor([1.0, bad]), draws() if at_random else None)
    assert not tensor.isfinite().any()


def test_zeros_stay_zeros() -> None:
    assert not quantise(torch.zeros(3)).any()
    assert not quantise(torch.zeros(3), draws()).any()


# ------------------------------------------------------------------------------------------ layers


def convolved(x: Any, weight: Any, stride: int, padding: int) -> Any:
    """Return a convolution by its definition, in 32-bit integers."""
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    size = weight.shape[2]
    places = (x.shape[2] - size) // stride + 1
    result = np.zeros((len(x), len(weight), places, places), np.int32)
    for row in range(places):
        for column in range(places):
            top, left = row * stride, column * stride
            patch = x[:, :, top : top + size, left : left + size]
            result[:, :, row, column] = np.einsum("bihw,oihw->bo", patch, weight, dtype=np.int32)
    return result


def test_a_linear_layer_computes_with_integers() -> None:
    """Of 4,000 inputs, whose sums in float32 would not be exact."""
    layer = nn.Linear(4000, 5, bias=False)
    x = numbers(7, 4000).abs()
    with torch.no_grad():
        layer.weight.copy_(numbers(5, 4000, seed=1).abs())
    (q, a), (w, b) = whole(quantise(x)), whole(quantise(layer.weight))
    expected = (q @ w.T).astype(np.float64) * a * b
    assert (q.astype(np.int64) @ w.T.astype(np.int64)).max() < 2**31
    got = make_int8(layer)(x).detach().numpy()
    np.testing.assert_array_equal(got, expected.astype(np.float32))


@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 0)])
def test_a_convolution_computes_with_integers(stride: int, padding: int) -> None:
    layer = nn.Conv2d(3, 4, 3, stride, padding)
    x = numbers(2, 3, 9, 9)
    (q, a), (w, b) = whole(quantise(x)), whole(quantise(layer.weight))
    assert layer.bias is not None
    bias = layer.bias.detach().double().numpy()[:, None, None]
    expected = convolved(q, w, stride, padding).astype(np.float64) * a * b + bias
    got = make_int8(layer)(x).detach().numpy()
    np.testing.assert_array_equal(got, expected.astype(np.float32))


@pytest.mark.parametrize("at_random", [False, True])
def test_backward_computes_with_integer_errors(at_random: bool) -> None:
    layer = nn.Linear(30, 5)
    x, errors = numbers(8, 30).requires_grad_(), numbers(8, 5, seed=2)
    generator = draws(4) if at_random else None
    make_int8(layer, generator)(x).backward(errors)
    again = None if generator is None else draws(4)
    (e, c), (q, a) = whole(quantise(errors, again)), whole(quantise(x))
    w, b = whole(quantise(layer.weight))
    assert x.grad is not None
    for gradient, sums, scale in (
        (x.grad, e @ w, c * b),
        (layer.weight.grad, e.T @ q, c * a),
        (layer.bias.grad, e.sum(0), c),
    ):
        assert gradient is not None
        expected = (sums.astype(np.float64) * scale).astype(np.float32)
        np.testing.assert_array_equal(gradient.numpy(), expected)


def test_the_gradient_of_a_convolution_is_of_integers() -> None:
    layer = nn.Conv2d(2, 3, 3, padding=1, bias=False)
    x, errors = numbers(2, 2, 6, 6), numbers(2, 3, 6, 6, seed=2)
    make_int8(layer)(x).backward(errors)
    (e, c), (q, a) = whole(quantise(errors)), whole(quantise(x))
    # Σ over examples and places: a convolution in which channels and examples change places.
    sums = convolved(q.swapaxes(0, 1), e.swapaxes(0, 1), 1, 1).swapaxes(0, 1)
    expected = (sums.astype(np.float64) * a * c).astype(np.float32)
    assert layer.weight.grad is not None
    np.testing.assert_array_equal(layer.weight.grad.numpy(), expected)


def test_weights_are_put_on_their_grids_and_the_rest_is_left() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    put_on_grid(model, draws())
    for name, value in model.state_dict().items():
        if name in ("0.weight", "3.weight"):
            whole(value)
            assert not torch.equal(value, before[name])
        else:
            assert torch.equal(value, before[name]), name


def test_a_layer_that_is_not_supported_is_named() -> None:
    model = nn.ModuleDict({"lstm": nn.LSTM(4, 4), "head": nn.Linear(4, 2)})
    with pytest.raises(ConfigError, match=r"layer 'lstm' is a LSTM.*supported are Conv2d and Lin"):
        check_layers(model)
    with pytest.raises(ConfigError, match=r"Sequential, has no layer to train in INT8"):
        check_layers(nn.Sequential(nn.BatchNorm1d(3)))
    with pytest.raises(ConfigError, match="Conv2d and Linear"):
        make_int8(nn.Sequential(nn.Linear(2, 2), nn.PReLU()))
