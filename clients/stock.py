"""The handlers of Flower's own messages, for its own strategies."""

from collections.abc import Callable
from typing import Any

import torch
from flower_adsp.clients.device import Own, device_of
from flower_adsp.clients.training import make_optimizer, train
from flwr.app import ArrayRecord, Context, Message
from torch import Tensor, nn
from torch.utils.data import Subset

from flower_adsp.errors import require
from flower_adsp.messages import (
    decode_train_request,
    encode_evaluate_reply,
    encode_train_reply,
)


def handle_train(message: Message, context: Context, own: Own | None = None) -> Message:
    """Train for one local epoch, or for the ``local-steps`` of the message's config.

    ``lr`` in the config overrides the run's learning rate; ``proximal-mu`` adds FedProx's term
    (μ/2)·‖w − w_global‖² (Li et al., MLSys 2020, https://arxiv.org/abs/1812.06127).
    """
    settings, arrays = decode_train_request(message)
    device = device_of(context, own)
    model = device.task.build_model().to(device.accelerator)
    model.load_state_dict(arrays.to_torch_state_dict())
    steps = settings.get("local-steps", device.train.steps_per_epoch)
    rate = settings.get("lr", device.config.train.learning_rate)
    require(isinstance(steps, int) and steps > 0, "local-steps", steps, "an integer above 0")
    require(isinstance(rate, int | float) and rate > 0, "lr", rate, "a number above 0")
    server_round = settings.get("server-round", 1)
    require(
        isinstance(server_round, int) and server_round > 0, "server-round", server_round, "above 0"
    )
    optimizer = make_optimizer(device, model.parameters(), float(rate))
    trained = train(
        device,
        model,
        optimizer,
        first_step=(server_round - 1) * steps,
        steps=steps,
        penalty=_proximal_term(model, settings.get("proximal-mu", 0.0)),
    )
    reply = ArrayRecord(model.state_dict())
    return encode_train_reply(message, reply, len(device.train), trained.mean_loss)


def handle_evaluate(message: Message, context: Context, own: Own | None = None) -> Message:
    """Evaluate the model on the device's own held-out share."""
    _, arrays = decode_train_request(message)
    device = device_of(context, own)
    model = device.task.build_model().to(device.accelerator)
    model.load_state_dict(arrays.to_torch_state_dict())
    indices = device.held_out.indices
    data: Any = Subset(device.held_out.data, indices.tolist())  # type: ignore[arg-type]
    metrics = device.task.metrics(model, data)
    return encode_evaluate_reply(message, metrics, len(indices))


def _proximal_term(model: nn.Module, mu: Any) -> Callable[[nn.Module], Tensor] | None:
    require(isinstance(mu, int | float) and mu >= 0, "proximal-mu", mu, "a number of at least 0")
    if not mu:
        return None
    start = [parameter.detach().clone() for parameter in model.parameters()]

    def penalty(current: nn.Module) -> Tensor:
        squares = [
            (parameter - first).square().sum()
            for parameter, first in zip(current.parameters(), start, strict=True)
        ]
        return torch.stack(squares).sum() * (float(mu) / 2)

    return penalty
