"""Plain SGD, without what ``torch.optim`` loads for compiled models."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Sgd:
    """Mini-batch SGD with momentum and weight decay, step for step that of ``torch.optim.SGD``.

    On a SuperNode each message is handled in a new process, and making one of ``torch.optim``'s
    optimizers imports ``torch._dynamo``, which takes as long as importing torch itself.

    Parameters
    ----------
    parameters : Iterable[nn.Parameter]
        What it trains; those without a gradient are left as they are.
    lr : float
        Learning rate.
    momentum, weight_decay : float (default: 0.0)
        As in ``torch.optim.SGD``.

    Attributes
    ----------
    momentum_buffers : dict[nn.Parameter, Tensor]
        The moving sum of each parameter's gradients; empty without momentum.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        self.parameters = list(parameters)
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.momentum_buffers: dict[nn.Parameter, Tensor] = {}

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Take a step."""
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if self.weight_decay:
                gradient = gradient.add(parameter, alpha=self.weight_decay)
            if self.momentum:
                buffer = self.momentum_buffers.get(parameter)
                if buffer is None:
                    buffer = self.momentum_buffers[parameter] = gradient.clone()
                else:
                    buffer.mul_(self.momentum).add_(gradient)
                gradient = buffer
            parameter.add_(gradient, alpha=-self.lr)
