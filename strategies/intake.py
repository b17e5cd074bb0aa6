"""What the server takes of a device's reply."""

from collections import deque
from collections.abc import Iterable
from math import ceil
from statistics import median
from typing import Any

import numpy as np
from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.state import Flight, Worker
from flwr.app import Message
from numpy.typing import NDArray

from flower_adsp.arrays import Weights
from flower_adsp.errors import RefusedMessage
from flower_adsp.messages import Commit, decode_commit, decode_stock_reply, stock_steps

_ABSURD_STEPS = 100_000  # a second; a profile may say far less than a node can really do
_ABSURD_EXAMPLES = 10  # times what is expected
_NORMS = 32  # of the latest updates, with which a new one is compared
_FEWEST_NORMS = 5


class Intake:
    """Reads replies, and refuses those that no device could have meant.

    Parameters
    ----------
    options : LoopOptions
        For keys and limits.

    Attributes
    ----------
    norms : deque[float]
        Of the latest updates that were taken, by the step.
    """

    def __init__(self, options: LoopOptions) -> None:
        self.options = options
        self.norms: deque[float] = deque(maxlen=_NORMS)

    def decode(self, worker: Worker, flight: Flight, reply: Message, model: Weights) -> Commit:
        """Read and check the reply to a flight.

        Raises
        ------
        RefusedMessage
            If it is no valid answer.
        """
        assignment, plan = flight.assignment, flight.plan
        if worker.is_stock:
            assert flight.sent is not None
            key = self.options.weighted_by_key
            commit = decode_stock_reply(reply, assignment, flight.sent, model, key)
            return stock_steps(commit, worker.batch_size)
        most = _ABSURD_STEPS * (1 + ceil(assignment.seconds or 0.0))
        return decode_commit(
            reply,
            assignment,
            model,
            None if plan is None else plan.slices,
            () if plan is None else plan.buffers,
            most_steps=most if assignment.steps is None else None,
            most_examples=_ABSURD_EXAMPLES * worker.num_examples or None,
        )

    def check_norm(self, commit: Commit, model: Weights) -> None:
        """Refuse an update whose norm, by the step, is far above that of the latest ones."""
        limit = self.options.norm_limit
        if limit is None:
            return
        if len(self.norms) < _FEWEST_NORMS:
            norm, size = commit.steps * _norm(commit), _length(model.values())
            if norm > size > 0:
                raise RefusedMessage(
                    "norm", f"the update's is {norm:.3g}, and the model's own {size:.3g}"
                )
            return
        norm, usual = _norm(commit), median(self.norms)
        if norm > limit * usual:
            raise RefusedMessage(
                "norm",
                f"the update moves the model by {norm:.3g} a step, more than {limit:g} times the "
                f"{usual:.3g} of the latest ones",
            )

    def note(self, commit: Commit) -> None:
        """Remember the norm of an update that was taken."""
        if self.options.norm_limit is not None:
            self.norms.append(_norm(commit))


def _norm(commit: Commit) -> float:
    """Return the Euclidean norm of an update, divided by its steps."""
    return _length(commit.update.values()) / commit.steps


def _length(arrays: Iterable[NDArray[Any]]) -> float:
    """Return the Euclidean norm of some arrays taken together."""
    return float(sum(float(np.vdot(array, array)) for array in arrays) ** 0.5)
