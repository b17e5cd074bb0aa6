"""Local training: plain mini-batch SGD for a number of steps or seconds."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from flower_adsp.clients.device import Device
from torch import Tensor, nn

from flower_adsp.seeding import integer_seed
from flower_adsp.sgd import Sgd
from flower_adsp.tasks.batches import Batch

TakeStep = Callable[[Batch, int], float]


@dataclass(frozen=True)
class Trained:
    """What a stretch of training did.

    Parameters
    ----------
    steps : int
        Steps done.
    seconds : float
        Seconds they took.
    mean_loss : float
        Mean of the steps' losses.
    """

    steps: int
    seconds: float
    mean_loss: float

    def then(self, other: "Trained") -> "Trained":
        """Return this stretch and another as one."""
        steps = self.steps + other.steps
        loss = self.steps * self.mean_loss + other.steps * other.mean_loss
        return Trained(steps, self.seconds + other.seconds, loss / steps)


def train(
    device: Device,
    model: nn.Module,
    optimizer: Sgd,
    first_step: int,
    steps: int | None = None,
    seconds: float | None = None,
    penalty: Callable[[nn.Module], Tensor] | None = None,
    batch_size: int | None = None,
    take_step: TakeStep | None = None,
) -> Trained:
    """Train a model in place.

    Parameters
    ----------
    device : Device
        Task, mini-batches and seeds.
    model : nn.Module
        The model, on the device's accelerator.
    optimizer : Sgd
        Steps the model's parameters.
    first_step : int
        Number of the first step, which says which mini-batches to use.
    steps : int | None (default: None)
        Number of steps.
    seconds : float | None (default: None)
        Where `steps` is None: train until the end of the first step at or after so many seconds
        of a monotonic timer; at least one step.
    penalty : Callable[[nn.Module], Tensor] | None (default: None)
        A term added to the loss, such as FedProx's.
    batch_size : int | None (default: None)
        Examples in a mini-batch; None for the task's.
    take_step : TakeStep | None (default: None)
        Takes a step in another way, without the penalty: it gets the mini-batch and the number of
        the step, and returns the loss.

    Returns
    -------
    Trained
        Counts and the mean loss.
    """
    model.train()
    accelerator = device.accelerator
    started = time.monotonic()
    # In virtual time a device is as slow as its profile says, and need not be.
    slowdown = 1.0 if device.config.is_virtual else device.slowdown
    losses: list[float] = []
    while True:
        began = time.monotonic()
        step = first_step + len(losses)
        _seed(accelerator, integer_seed(device.config.seed, device.partition_id, "step", step))
        batch = [tensor.to(accelerator) for tensor in device.train.batch(step, batch_size)]
        losses.append(
            sgd_step(device, model, optimizer, batch, penalty)
            if take_step is None
            else take_step(batch, step)
        )
        if slowdown > 1:
            time.sleep((slowdown - 1) * (time.monotonic() - began))
        elapsed = time.monotonic() - started
        if len(losses) >= steps if steps is not None else elapsed >= (seconds or 0.0):
            return Trained(len(losses), elapsed, sum(losses) / len(losses))


def sgd_step(
    device: Device,
    model: nn.Module,
    optimizer: Sgd,
    batch: Batch,
    penalty: Callable[[nn.Module], Tensor] | None = None,
) -> float:
    """Take one step on a mini-batch; return its loss, without the penalty."""
    optimizer.zero_grad()
    loss = device.task.loss(model, batch)
    objective = loss if penalty is None else loss + penalty(model)
    objective.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


def _seed(accelerator: torch.device, seed: int) -> None:
    # `torch.manual_seed` takes longer than a step of a small model where there is no CUDA.
    torch.default_generator.manual_seed(seed)
    if accelerator.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif accelerator.type == "mps":
        torch.mps.manual_seed(seed)


def make_optimizer(device: Device, parameters: Iterable[nn.Parameter], learning_rate: float) -> Sgd:
    """Return SGD with the run's momentum and weight decay."""
    settings = device.config.train
    trained = (parameter for parameter in parameters if parameter.requires_grad)
    return Sgd(trained, learning_rate, settings.momentum, settings.weight_decay)
