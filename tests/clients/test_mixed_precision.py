"""Steps of which a part is trained in FP32 and the rest in INT8."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flower_adsp.client_app import app
from flower_adsp.int8 import make_int8, put_on_grid, scale_of
from flower_adsp.messages import Assignment, encode_assignment
from flower_adsp.seeding import integer_seed, stream
from flower_adsp.sparse.portions import Portion
from flower_adsp.tasks.batches import BatchStream, own_split
from flower_adsp.testing import InProcessGrid
from tests.clients.test_training import NODE, commit, send
from tests.conftest import toy_arrays, toy_grid


class Normalised:
    """A convolution, BatchNorm and a linear layer, on random images of two classes."""

    def __init__(self, seed: int = 0, batch_size: int = 8) -> None:
        self.batch_size = batch_size

    def build_model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)
        )

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def train_data(self, partition_id: int, num_partitions: int) -> TensorDataset:
        draws = stream(partition_id, "images")
        images = draws.normal(size=(40, 1, 6, 6)).astype(np.float32)
        return TensorDataset(torch.from_numpy(images), torch.arange(40) % 2)

    def held_out_data(self, split: str) -> TensorDataset:
        return self.train_data(99, 1)

    def metrics(self, model: nn.Module, data: TensorDataset) -> dict[str, float]:
        return {"loss": float(self.loss(model, data.tensors))}


def build(seed: int = 0, batch_size: int = 8) -> Normalised:
    return Normalised(seed, batch_size)


TARGET = f"task.target={__name__}:build"


def arrays() -> ArrayRecord:
    return ArrayRecord(Normalised().build_model().state_dict())


def trained(share: float | None, overrides: str = "", **settings: Any) -> Any:
    config = {"overrides": f"{TARGET} {overrides}", "devices": "uniform"}
    with InProcessGrid(app, 1, config) as grid:
        return commit(grid, arrays(), lr=0.1, fp32_share=share, **{"steps": 3, **settings})


def assert_same(first: Any, second: Any) -> None:
    assert first.train_loss == second.train_loss
    for kind in ("update", "buffers"):
        ours, theirs = getattr(first, kind), getattr(second, kind)
        assert ours.keys() == theirs.keys()
        for name, array in ours.items():
            assert array.tobytes() == theirs[name].tobytes(), name


@pytest.mark.parametrize("overrides", ["", "train.weight_decay=0.01", "task.batch_size=1"])
def test_a_share_of_one_is_training_as_ever(overrides: str) -> None:
    assert_same(trained(1.0, overrides), trained(None, overrides))


def test_a_mini_batch_of_one_example_is_trained_in_fp32() -> None:
    assert_same(trained(0.4, "task.batch_size=1"), trained(None, "task.batch_size=1"))


def test_it_is_reproducible_and_not_training_as_ever() -> None:
    first = trained(0.4)
    assert_same(first, trained(0.4))
    plain = trained(None)
    for name, array in first.update.items():
        assert np.abs(array - plain.update[name]).max() > 0, name
        assert np.abs(array - plain.update[name]).max() < 0.1, name


def test_memory_true_layers_give_the_same() -> None:
    assert_same(trained(0.4, "train.layers=memory-true"), trained(0.4))


def test_a_step_by_hand() -> None:
    """Of 8 examples 3 are trained in FP32, 5 in INT8, from the same model; then both are merged."""
    share, rate = 0.4, 0.1
    config = {"overrides": TARGET, "devices": "uniform"}
    with InProcessGrid(app, 1, config) as grid:
        done = commit(grid, arrays(), lr=rate, fp32_share=share, steps=1)
    task = Normalised()
    data = task.train_data(0, 1)
    x, y = BatchStream(data, own_split(40, 0, 0)[0], 8, 0, 0).batch(0)
    draws = torch.Generator().manual_seed(integer_seed(0, 0, "int8", 0))
    fp32, int8 = task.build_model(), make_int8(task.build_model(), draws)
    start = {name: tensor.clone() for name, tensor in fp32.state_dict().items()}
    losses = []
    for model, part in ((fp32, slice(0, 3)), (int8, slice(3, 8))):
        loss = task.loss(model, (x[part], y[part]))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= rate * parameter.grad
    put_on_grid(int8, draws)
    assert done.train_loss == pytest.approx((3 * losses[0] + 5 * losses[1]) / 8)
    ours, theirs = fp32.state_dict(), int8.state_dict()
    for name, update in done.update.items():
        expected = share * ours[name] + (1 - share) * theirs[name] - start[name]
        np.testing.assert_allclose(update, expected.numpy(), atol=1e-6)
    for name in ("1.running_mean", "1.running_var"):
        expected = share * ours[name] + (1 - share) * theirs[name]
        np.testing.assert_allclose(done.buffers[name], expected.numpy(), rtol=1e-6)
    assert done.buffers["1.num_batches_tracked"] == 1


def test_what_moves_by_less_than_a_step_of_the_grid_is_not_lost() -> None:
    """Merged and rounded to the nearest, weights would come back to the grid each time."""
    config = {"overrides": f"{TARGET} task.batch_size=36", "devices": "uniform"}
    with InProcessGrid(app, 1, config) as grid:
        plain, mixed = (
            commit(grid, arrays(), lr=0.002, steps=100, fp32_share=share).update["4.weight"]
            for share in (None, 0.6)
        )
    grid_step = scale_of(Normalised().build_model().get_parameter("4.weight"))
    assert np.abs(plain).max() / 100 < grid_step / 4
    part = float((mixed * plain).sum() / (plain * plain).sum())
    assert 0.6 < part < 1.4, part


@pytest.mark.parametrize(
    ("overrides", "changes", "said"),
    [
        ("train.momentum=0.5", {}, "train.momentum = 0.5 is not allowed; it must be 0 with mixed"),
        ("", {"portions": {"4": Portion()}}, "plan = .* it must be none with mixed precision"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    overrides: str, changes: dict[str, Any], said: str
) -> None:
    assignment = Assignment(0, 0, 0, 0.1, **{"steps": 1, "fp32_share": 0.5, **changes})
    config = {"overrides": f"{TARGET} {overrides}", "devices": "uniform"}
    with InProcessGrid(app, 1, config) as grid:
        reply = send(grid, encode_assignment(NODE, arrays(), assignment))
    assert reply.has_error()
    assert re.search(said, reply.error.reason), reply.error.reason


def test_a_layer_that_is_not_supported_is_named() -> None:
    assignment = Assignment(0, 0, 0, 0.1, 1, fp32_share=0.5)
    with toy_grid(1) as grid:
        reply = send(grid, encode_assignment(NODE, toy_arrays(), assignment))
    assert reply.has_error()
    assert "is a Point, which mixed precision does not support" in reply.error.reason
