"""How much the training of each unit matters."""

from collections.abc import Sequence

import torch
from torch import nn

from flower_adsp.sparse.freezing import train_only
from flower_adsp.sparse.ops import make_memory_true, make_stock
from flower_adsp.sparse.portions import Portion
from flower_adsp.sparse.profile import Loss
from flower_adsp.sparse.units import Unit

_STEPS, _RATE = 5, 0.05


def fisher_importance(model: nn.Module, units: Sequence[Unit], loss: Loss) -> list[float]:
    """Return v_u in proportion to the squared gradient, from one backward pass.

    The score is Σ g² over the unit's parameters, the diagonal of the empirical Fisher information
    of one mini-batch, over their number, in the spirit of Kwon et al., "TinyTrain", ICML 2024,
    https://arxiv.org/abs/2307.09988, who divide a layer's Fisher potential by its parameters and
    its arithmetic; here memory is a constraint of the plan instead.

    Returns
    -------
    list[float]
        Adding up to 1.
    """
    make_stock(model).train()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
        parameter.grad = None
    loss(model).backward()  # type: ignore[no-untyped-call]
    scores = []
    for unit in units:
        parameters = [model.get_parameter(name) for name in unit.parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        size = sum(parameter.numel() for parameter in parameters)
        scores.append(sum(float(grad.square().sum()) for grad in gradients) / size)
    for parameter in model.parameters():
        parameter.grad = None
    return _normalised(scores)


def contribution_importance(model: nn.Module, units: Sequence[Unit], loss: Loss) -> list[float]:
    """Return v_u in proportion to how much a few steps on a unit alone lower the loss.

    The contribution analysis of Lin et al., "On-Device Training Under 256KB Memory", NeurIPS 2022,
    https://arxiv.org/abs/2206.15472, with the loss in place of the accuracy: the last unit is
    trained in each trial, and a unit's score is what it lowers the loss beyond the last unit's own.

    Returns
    -------
    list[float]
        Adding up to 1.
    """
    make_memory_true(model).train()
    start = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def after_training(names: set[str]) -> float:
        model.load_state_dict(start)
        trained = train_only(model, list(units), {name: Portion() for name in names})
        optimizer = torch.optim.SGD(trained.values(), lr=_RATE)
        for _ in range(_STEPS):
            optimizer.zero_grad()
            loss(model).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            return float(loss(model))

    head = units[-1].name
    alone = after_training({head})
    gains = [max(alone - after_training({head, unit.name}), 0.0) for unit in units[:-1]]
    model.load_state_dict(start)
    make_stock(model)
    return _normalised([*gains, max(gains, default=1.0)])


def _normalised(scores: list[float]) -> list[float]:
    """Scale to a sum of 1, with a floor so that no unit counts for nothing."""
    least = max(max(scores) * 1e-3, 1e-12)
    floored = [max(score, least) for score in scores]
    return [score / sum(floored) for score in floored]
