"""The handler of ``train.commit``: do an assignment, answer with the accumulated update."""

import numpy as np
import torch
from flower_adsp.clients.device import device_of
from flower_adsp.clients.training import make_optimizer, train
from flwr.app import Array, ArrayRecord, Context, Message
from torch import nn

from flower_adsp.messages import Commit, decode_assignment, encode_commit

_MOMENTUM = "flower-adsp.momentum"


def handle_commit(message: Message, context: Context) -> Message:
    """Train as assigned and commit the update U_i.

    Parameters
    ----------
    message : Message
        An assignment.
    context : Context
        The node's; with momentum its ``state`` keeps the optimizer's from one commit to the next.

    Returns
    -------
    Message
        The commit.
    """
    assignment, arrays = decode_assignment(message)
    device = device_of(context)
    model = device.task.build_model().to(device.accelerator)
    model.load_state_dict(arrays.to_torch_state_dict())
    start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    optimizer = make_optimizer(device, model, assignment.lr)
    _restore_momentum(optimizer, model, context)
    trained = train(
        device, model, optimizer, assignment.first_step, assignment.steps, assignment.seconds
    )
    parameters = dict(model.named_parameters())
    state = model.state_dict()
    commit = Commit(
        assignment_id=assignment.id,
        version=assignment.version,
        steps=trained.steps,
        train_seconds=trained.seconds,
        num_examples=len(device.train),
        train_loss=trained.mean_loss,
        update={
            name: (parameters[name].detach() - start[name]).cpu().numpy()
            for name in state
            if name in parameters
        },
        buffers={
            name: np.asarray(tensor.cpu().numpy())
            for name, tensor in state.items()
            if name not in parameters
        },
    )
    reply = encode_commit(message, commit)
    _keep_momentum(optimizer, model, context)  # last, so that a failed handler changes nothing
    return reply


def _restore_momentum(optimizer: torch.optim.Optimizer, model: nn.Module, context: Context) -> None:
    record = context.state.array_records.get(_MOMENTUM)
    if record is None:
        return
    for name, parameter in model.named_parameters():
        if name in record:
            kept = torch.from_numpy(record[name].numpy())
            optimizer.state[parameter]["momentum_buffer"] = kept.to(parameter.device)


def _keep_momentum(optimizer: torch.optim.Optimizer, model: nn.Module, context: Context) -> None:
    kept = {}
    for name, parameter in model.named_parameters():
        momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
        if momentum is not None:
            kept[name] = Array(momentum.cpu().numpy())
    if kept:
        context.state[_MOMENTUM] = ArrayRecord(kept)
