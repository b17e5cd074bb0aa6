"""The handler of ``train.commit``: do an assignment, answer with the accumulated update."""

import numpy as np
import torch
from flower_adsp.clients.device import Device, device_of
from flower_adsp.clients.training import Trained, make_optimizer, train
from flwr.app import Array, ArrayRecord, Context, Message
from torch import Tensor, nn

from flower_adsp.messages import Assignment, Commit, decode_assignment, encode_commit

_MOMENTUM, _MODEL = "flower-adsp.momentum", "flower-adsp.model"


def handle_commit(message: Message, context: Context) -> Message:
    """Train as assigned and commit the update U_i.

    Parameters
    ----------
    message : Message
        An assignment.
    context : Context
        The node's; with momentum its ``state`` keeps the optimizer's from one commit to the next,
        and where training goes on during a commit, the model.

    Returns
    -------
    Message
        The commit.
    """
    assignment, arrays = decode_assignment(message)
    device = device_of(context)
    model = device.task.build_model().to(device.accelerator)
    optimizer = make_optimizer(device, model, assignment.lr)
    _restore_momentum(optimizer, model, context)
    first, steps = assignment.first_step, assignment.steps
    before: Trained | None = None
    moved: dict[str, Tensor] = {}
    if assignment.overlap_steps:
        before, moved = _train_on(device, model, optimizer, assignment, context)
        first = first + before.steps
        steps = (steps or 0) - before.steps
    if assignment.continues:
        arrays = _kept(context)
    model.load_state_dict(arrays.to_torch_state_dict())
    start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in moved:
                parameter.add_(moved[name])
    size = assignment.batch_size
    trained = train(device, model, optimizer, first, steps, assignment.seconds, batch_size=size)
    if before is not None:
        trained = before.then(trained)
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
    context.state.pop(_MODEL, None)
    if assignment.keeps_model:
        context.state[_MODEL] = ArrayRecord(state)
    return reply


def _train_on(
    device: Device,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    assignment: Assignment,
    context: Context,
) -> tuple[Trained, dict[str, Tensor]]:
    """Take the steps of the overlap from the kept model; return by how much they moved it."""
    model.load_state_dict(_kept(context).to_torch_state_dict())
    start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    first, steps, size = assignment.first_step, assignment.overlap_steps, assignment.batch_size
    trained = train(device, model, optimizer, first, steps, batch_size=size)
    return trained, {
        name: parameter.detach() - start[name] for name, parameter in model.named_parameters()
    }


def _kept(context: Context) -> ArrayRecord:
    kept = context.state.array_records.get(_MODEL)
    if kept is None:
        raise RuntimeError("this device no longer has the model of its last commit")
    return kept


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
