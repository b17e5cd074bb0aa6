"""Replies as a bad day makes them: for trying how a strategy takes faults.

Each kind of fault takes a reply to an assignment and returns what arrives in its place: nothing,
one message, or two.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Error, Message, MetricRecord
from flwr.common.constant import ErrorCode

from flower_adsp.arrays import Weights, decode, encode
from flower_adsp.messages import ARRAYS, METRICS, TRAIN_COMMIT
from flower_adsp.seeding import stream
from flower_adsp.testing import InProcessGrid

Replies = list[Message]
Fault = Callable[[Message, "FaultyGrid"], Replies]


def _error(code: int) -> Fault:
    def fault(reply: Message, grid: "FaultyGrid") -> Replies:
        failed = Message(Error(code, "injected"), reply_to=grid.request_of(reply))
        failed.metadata.__dict__["_message_id"] = reply.metadata.message_id
        return [failed]

    return fault


def _arrays(change: Callable[[Weights], None]) -> Fault:
    def fault(reply: Message, grid: "FaultyGrid") -> Replies:
        weights = decode(reply.content.array_records[ARRAYS])
        change(weights)
        reply.content[ARRAYS] = encode(weights)
        return [reply]

    return fault


def _metric(key: str, value: Any) -> Fault:
    def fault(reply: Message, grid: "FaultyGrid") -> Replies:
        reply.content[METRICS][key] = value
        return [reply]

    return fault


def _record(key: str, record: ArrayRecord | MetricRecord | None) -> Fault:
    def fault(reply: Message, grid: "FaultyGrid") -> Replies:
        del reply.content[key]
        if record is not None:
            reply.content[key] = record
        return [reply]

    return fault


def _first(weights: Weights) -> str:
    return next(iter(weights))


def _fill(value: float) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        weights[_first(weights)].flat[0] = value

    return change


def _grow(weights: Weights) -> None:
    for array in weights.values():
        array *= 1000


def _reshape(weights: Weights) -> None:
    name = _first(weights)
    weights[name] = weights[name].reshape(-1)[:-1]


def _retype(weights: Weights) -> None:
    name = _first(weights)
    weights[name] = weights[name].astype(np.float16)


def _drop(weights: Weights) -> None:
    del weights[_first(weights)]


def _twice(reply: Message, grid: "FaultyGrid") -> Replies:
    return [reply, copy.copy(reply)]


def _replay(reply: Message, grid: "FaultyGrid") -> Replies:
    earlier = grid.earlier.get(reply.metadata.src_node_id)
    if earlier is None:
        return []
    for key, record in earlier.items():
        reply.content[key] = record
    return [reply]


FAULTS: Mapping[str, Fault] = {
    "raised": _error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION),
    "crashed": _error(ErrorCode.CLIENT_APP_CRASHED),
    "expired": _error(ErrorCode.MESSAGE_UNAVAILABLE),
    "reply gone": _error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE),
    "node gone": _error(ErrorCode.NODE_UNAVAILABLE),
    "lost": lambda reply, grid: [],
    "NaN": _arrays(_fill(float("nan"))),
    "infinity": _arrays(_fill(float("inf"))),
    "shape": _arrays(_reshape),
    "type": _arrays(_retype),
    "missing array": _arrays(_drop),
    "surplus array": _arrays(lambda weights: weights.update(surplus=np.zeros(1, np.float32))),
    "norm": _arrays(_grow),
    "no arrays": _record(ARRAYS, None),
    "no metrics": _record(METRICS, None),
    "other metrics": _record(METRICS, MetricRecord({"num-examples": 10})),
    "no version": _metric("model-version", 10**9),
    "no assignment": _metric("assignment-id", -1),
    "steps": _metric("steps", 10**12),
    "no steps": _metric("steps", 0),
    "examples": _metric("num-examples", 10**12),
    "seconds": _metric("train-seconds", float("-inf")),
    "kind of number": _metric("steps", 1.5),
    "duplicate": _twice,
    "replay": _replay,
}
HARMLESS = ("duplicate",)  # the first of the two is a valid commit


class FaultyGrid(InProcessGrid):
    """An in-process grid that puts faults into replies to assignments.

    Parameters
    ----------
    *arguments, **options
        Those of `InProcessGrid`.
    rate : float
        Part of the replies that are faulty.
    seed : int (default: 0)
        Seed of which are, and how.
    kinds : Iterable[str] (default: all)
        Names in `FAULTS`.

    Attributes
    ----------
    injected : Counter[str]
        Faults so far, by kind.
    valid : int
        Valid commits delivered so far.
    """

    def __init__(
        self,
        *arguments: Any,
        rate: float,
        seed: int = 0,
        kinds: Iterable[str] = tuple(FAULTS),
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._rate = rate
        self._seed = seed
        self._kinds = list(kinds)
        self._requests: dict[str, Message] = {}
        self.earlier: dict[int, dict[str, Any]] = {}
        self._number = 0
        self.injected: Counter[str] = Counter()
        self.valid = 0

    def request_of(self, reply: Message) -> Message:
        """Return the message that a reply answers."""
        return self._requests[reply.metadata.reply_to_message_id]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages to their nodes; return their ids."""
        kept = list(messages)
        ids = list(super().push_messages(kept))
        for message_id, message in zip(ids, kept, strict=True):
            if message.metadata.message_type == TRAIN_COMMIT:
                self._requests[message_id] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies there are to some messages, some of them faulty."""
        replies: Replies = []
        for reply in super().pull_messages(message_ids):
            request = self._requests.get(reply.metadata.reply_to_message_id)
            replies += [reply] if request is None else self._spoil(reply)
            if request is not None:
                del self._requests[reply.metadata.reply_to_message_id]
        return replies

    def _spoil(self, reply: Message) -> Replies:
        self._number += 1
        draws = stream(self._seed, reply.metadata.src_node_id, "faults", self._number)
        if reply.has_error():
            return [reply]
        content = dict(reply.content)
        if draws.random() >= self._rate:
            self.valid += 1
            self.earlier[reply.metadata.src_node_id] = content
            return [reply]
        kind = self._kinds[int(draws.integers(len(self._kinds)))]
        self.injected[kind] += 1
        self.valid += kind in HARMLESS
        return FAULTS[kind](reply, self)
