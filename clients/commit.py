"""The handler of ``train.commit``: do an assignment, answer with the accumulated update."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flower_adsp.clients.device import Device, Own, device_of
from flower_adsp.clients.mixed_precision import mixed_step
from flower_adsp.clients.portions import committed_buffers, trainable
from flower_adsp.clients.training import Trained, make_optimizer, train
from flwr.app import Array, ArrayRecord, Context, Message
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_adsp.codec import compress
from flower_adsp.messages import Assignment, Commit, decode_assignment, encode_commit
from flower_adsp.seeding import stream
from flower_adsp.sgd import Sgd
from flower_adsp.sparse.freezing import read_slices, write_slices

_MOMENTUM, _MODEL = "flower-adsp.momentum", "flower-adsp.model"
_LOST = "flower-adsp.lost"
_CHANNELS_OF = "channels of "


def handle_commit(message: Message, context: Context, own: Own | None = None) -> Message:
    """Train as assigned and commit the update U_i.

    Parameters
    ----------
    message : Message
        An assignment.
    context : Context
        The node's; with momentum its ``state`` keeps the optimizer's from one commit to the next,
        where training goes on during a commit, the model, and where updates travel as ``int8``,
        what rounding took from them.

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
    size, mixed = assignment.batch_size, mixed_step(device, model, optimizer, assignment)
    done = train(
        device, model, optimizer, first, steps, assignment.seconds, batch_size=size, take_step=mixed
    )
    if before is not None:
        done = before.then(done)
    write_slices(model)
    state = model.state_dict()
    buffers = committed_buffers(model, assignment)
    update = {
        name: (parameter.detach() - start[name]).cpu().numpy()
        for name, parameter in trained.items()
    }
    for name, lost in _kept_arrays(_LOST, update, assignment, context).items():
        update[name] += lost
    draws = stream(device.config.seed, device.partition_id, "rounding", assignment.id)
    sent = compress(update, assignment.codec, draws)
    commit = Commit(
        assignment_id=assignment.id,
        version=assignment.version,
        steps=done.steps,
        train_seconds=done.seconds,
        num_examples=len(device.train),
        train_loss=done.mean_loss,
        update=sent.arrays,
        scales=sent.scales,
        buffers={
            name: np.asarray(tensor.cpu().numpy())
            for name, tensor in state.items()
            if name in buffers
        },
    )
    momentum = {
        name: optimizer.momentum_buffers[parameter].cpu().numpy()
        for name, parameter in trained.items()
        if parameter in optimizer.momentum_buffers
    }
    kept = {
        key: _with_channels(arrays, assignment)
        for key, arrays in ((_MOMENTUM, momentum), (_LOST, sent.lost))
        if arrays
    }
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
    for name, kept in _kept_arrays(_MOMENTUM, trained, assignment, context).items():
        parameter = trained[name]
        optimizer.momentum_buffers[parameter] = torch.from_numpy(kept).to(parameter.device)


def _kept_arrays(
    key: str, names: Iterable[str], assignment: Assignment, context: Context
) -> dict[str, NDArray[Any]]:
    """Return what was kept, for those of the names that are trained in the same channels."""
    record = context.state.array_records.get(key)
    if record is None:
        return {}
    channels = _channels(assignment)
    arrays = {}
    for name in names:
        before, now = record.get(_CHANNELS_OF + name), channels.get(name)
        if name not in record or (before is None) != (now is None):
            continue
        if before is None or now is None or np.array_equal(before.numpy(), now):
            arrays[name] = record[name].numpy()
    return arrays


def _with_channels(arrays: Mapping[str, NDArray[Any]], assignment: Assignment) -> ArrayRecord:
    """Return arrays to keep, each with the channels to which it belongs."""
    kept = {name: Array(array) for name, array in arrays.items()}
    for name, channels in _channels(assignment).items():
        if name in arrays:
            kept[_CHANNELS_OF + name] = Array(channels)
    return ArrayRecord(kept)


def _channels(assignment: Assignment) -> dict[str, NDArray[np.int64]]:
    portions = (assignment.portions or {}).values()
    return {name: chosen for portion in portions for name, chosen in portion.channels.items()}
