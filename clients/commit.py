"""The handler of ``train.commit``: do an assignment, answer with the accumulated update."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from flower_adsp.clients.device import Device, Own, device_of
from flower_adsp.clients.portions import committed_buffers, trainable
from flower_adsp.clients.sgd import Sgd
from flower_adsp.clients.training import Trained, make_optimizer, train
from flwr.app import Array, ArrayRecord, Context, Message
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_adsp.messages import Assignment, Commit, decode_assignment, encode_commit
from flower_adsp.sparse.freezing import read_slices, write_slices

_MOMENTUM, _MODEL = "flower-adsp.momentum", "flower-adsp.model"
_CHANNELS_OF = "channels of "


def handle_commit(message: Message, context: Context, own: Own | None = None) -> Message:
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
    assignment, arrays, given = decode_assignment(message)
    for key, record in given.items():  # it has lost what it kept
        context.state[key] = record
    device = device_of(context, own)
    model = device.task.build_model().to(device.accelerator)
    trained = trainable(model, device, assignment)
    optimizer = make_optimizer(device, trained.values(), assignment.lr)
    _restore_momentum(optimizer, trained, assignment, context)
    first, steps = assignment.first_step, assignment.steps
    before: Trained | None = None
    moved: dict[str, Tensor] = {}
    if assignment.overlap_steps:
        before, moved = _train_on(device, model, trained, optimizer, assignment, context)
        first = first + before.steps
        steps = (steps or 0) - before.steps
    if assignment.continues:
        arrays = _kept(context)
    _load(model, arrays)
    start = {name: tensor.detach().clone() for name, tensor in trained.items()}
    with torch.no_grad():
        for name, distance in moved.items():
            trained[name].add_(distance)
    size = assignment.batch_size
    done = train(device, model, optimizer, first, steps, assignment.seconds, batch_size=size)
    if before is not None:
        done = before.then(done)
    write_slices(model)
    state = model.state_dict()
    buffers = committed_buffers(model, assignment)
    commit = Commit(
        assignment_id=assignment.id,
        version=assignment.version,
        steps=done.steps,
        train_seconds=done.seconds,
        num_examples=len(device.train),
        train_loss=done.mean_loss,
        update={
            name: (parameter.detach() - start[name]).cpu().numpy()
            for name, parameter in trained.items()
        },
        buffers={
            name: np.asarray(tensor.cpu().numpy())
            for name, tensor in state.items()
            if name in buffers
        },
    )
    kept = _momentum(optimizer, trained, assignment)
    if assignment.keeps_model:
        kept[_MODEL] = ArrayRecord(state)
    if assignment.returns_state:
        commit = replace(commit, device_state=kept)
    reply = encode_commit(message, commit)
    context.state.pop(_MODEL, None)  # last, so that a failed handler changes nothing
    for key, record in kept.items():
        context.state[key] = record
    return reply


def _train_on(
    device: Device,
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    optimizer: Sgd,
    assignment: Assignment,
    context: Context,
) -> tuple[Trained, dict[str, Tensor]]:
    """Take the steps of the overlap from the kept model; return by how much they moved it."""
    _load(model, _kept(context))
    start = {name: tensor.detach().clone() for name, tensor in parameters.items()}
    first, steps, size = assignment.first_step, assignment.overlap_steps, assignment.batch_size
    trained = train(device, model, optimizer, first, steps, batch_size=size)
    return trained, {
        name: parameter.detach() - start[name] for name, parameter in parameters.items()
    }


def _kept(context: Context) -> ArrayRecord:
    kept = context.state.array_records.get(_MODEL)
    if kept is None:
        raise RuntimeError("this device no longer has the model of its last commit")
    return kept


def _load(model: nn.Module, arrays: ArrayRecord) -> None:
    model.load_state_dict(arrays.to_torch_state_dict())
    read_slices(model)


def _restore_momentum(
    optimizer: Sgd,
    trained: Mapping[str, nn.Parameter],
    assignment: Assignment,
    context: Context,
) -> None:
    """Give the optimizer the momentum of what was trained before, and in the same channels."""
    record = context.state.array_records.get(_MOMENTUM)
    if record is None:
        return
    channels = _channels(assignment)
    for name, parameter in trained.items():
        if name not in record:
            continue
        before = record.get(_CHANNELS_OF + name)
        now = channels.get(name)
        if (before is None) != (now is None):
            continue
        if before is not None and now is not None and not np.array_equal(before.numpy(), now):
            continue
        kept = torch.from_numpy(record[name].numpy())
        optimizer.momentum_buffers[parameter] = kept.to(parameter.device)


def _momentum(
    optimizer: Sgd,
    trained: Mapping[str, nn.Parameter],
    assignment: Assignment,
) -> dict[str, ArrayRecord]:
    channels = _channels(assignment)
    kept = {}
    for name, parameter in trained.items():
        momentum = optimizer.momentum_buffers.get(parameter)
        if momentum is not None:
            kept[name] = Array(momentum.cpu().numpy())
            if name in channels:
                kept[_CHANNELS_OF + name] = Array(channels[name])
    return {_MOMENTUM: ArrayRecord(kept)} if kept else {}


def _channels(assignment: Assignment) -> dict[str, NDArray[np.int64]]:
    portions = (assignment.portions or {}).values()
    return {name: chosen for portion in portions for name, chosen in portion.channels.items()}
