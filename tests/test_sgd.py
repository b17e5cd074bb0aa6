import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import flower_adsp
from flower_adsp.sgd import Sgd


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.7, 0.01)])
def test_its_steps_are_those_of_torch_bit_for_bit(momentum: float, decay: float) -> None:
    mine, other = net(), net()
    frozen = [model[0].bias for model in (mine, other)]
    for bias in frozen:
        bias.requires_grad_(False)
    optimizers = [
        Sgd(mine.parameters(), 0.3, momentum, decay),
        torch.optim.SGD(other.parameters(), 0.3, momentum, weight_decay=decay),
    ]
    draws = torch.Generator().manual_seed(1)
    for _ in range(6):
        batch = torch.randn(8, 5, generator=draws)
        for model, optimizer in zip((mine, other), optimizers, strict=True):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    for name, value in mine.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    kept = optimizers[0].momentum_buffers  # type: ignore[union-attr]
    assert len(kept) == (5 if momentum else 0)


def test_a_process_that_trains_does_not_load_the_compiler() -> None:
    program = """
import sys
from flower_adsp.clients.device import device_of
from flower_adsp.clients.training import make_optimizer, train
from flwr.app import Context, RecordDict
config = {"task": "digits-mlp", "devices": "measured", "strategy": "adsp"}
device = device_of(Context(1, 1, {"partition-id": 0, "num-partitions": 3}, RecordDict(), config))
model = device.task.build_model()
train(device, model, make_optimizer(device, model.parameters(), 0.1), 0, steps=2)
wanted = {"torch._dynamo", "datasets", "matplotlib", "wandb", "ray"}
print(sorted(wanted & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(flower_adsp.__file__).resolve().parent.parent,
    )
    assert done.stdout.strip() == "[]"
