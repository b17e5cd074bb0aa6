"""Ten thousand damaged replies: each is a valid commit or refused, never another exception."""

import random
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from flower_adsp.arrays import encode
from flower_adsp.errors import RefusedMessage
from flower_adsp.messages import Assignment, Commit, decode_capability, decode_commit, encode_commit
from tests.conftest import toy_grid

MODEL = {
    "w": np.zeros((100, 200), np.float32),
    "b": np.zeros(200, np.float32),
    "n": np.array(3),
}
ASSIGNMENT = Assignment(7, 3, 0, 0.1, steps=4)
VALUES = [
    0, -1, 10**30, 1.5, float("nan"), float("inf"), -0.0, [], [1, 2], [0.5], 2**63 - 1,
]  # fmt: skip
NAMES = ["", "w", "b", "n", "x", "arrays", "buffers", "metrics", "steps", "ü" * 50, "assignment-id"]


def reply(request: Message) -> Message:
    rng = np.random.default_rng(0)
    update = {name: rng.normal(size=MODEL[name].shape).astype(np.float32) for name in ("w", "b")}
    commit = Commit(7, 3, 4, 1.0, 10, 0.5, update, {"n": np.array(4)})
    return encode_commit(request, commit)


def damage_array(array: Array, draw: random.Random) -> Array:
    dtype, shape, stype, data = array.dtype, tuple(array.shape), array.stype, bytearray(array.data)
    how = draw.randrange(6)
    if how == 0 and data:
        for _ in range(draw.randint(1, 8)):  # mostly in the header, where it matters
            data[draw.randrange(min(len(data), 140))] = draw.randrange(256)
    elif how == 1:
        data = data[: draw.randrange(len(data) + 1)]
    elif how == 2:
        data += bytes(draw.randrange(64))
    elif how == 3:
        dtype = draw.choice(["float64", "int8", "O", "", "V8", "nonsense"])
    elif how == 4:
        shape = tuple(draw.randrange(300) for _ in range(draw.randrange(4)))
        if draw.random() < 0.3:
            return Array(np.zeros(shape[:1], draw.choice([np.float64, np.int8, np.complex64])))
    else:
        large = str((10 ** draw.randint(3, 14),)).encode()
        data = bytearray(bytes(data).replace(b"(100, 200)", large))
    return Array(dtype, shape, stype, bytes(data))


def damage(message: Message, draw: random.Random) -> Message:
    content = message.content
    key = draw.choice(list(content) or [""])
    record = content.get(key)
    how = draw.randrange(8)
    if how == 0 and key:
        del content[key]
    elif how == 1 and key:
        content[draw.choice(NAMES) or "empty"] = record
    elif how == 2:
        content[key or "x"] = draw.choice(
            [ConfigRecord({"a": "b"}), MetricRecord({"steps": 4}), ArrayRecord({}), encode(MODEL)]
        )
    elif isinstance(record, ArrayRecord) and record:
        name = draw.choice(list(record))
        if how < 6:
            record[name] = damage_array(record[name], draw)
        elif how == 6:
            del record[name]
        else:
            record[draw.choice(NAMES)] = record[name]
    elif isinstance(record, MetricRecord) and record:
        name = draw.choice(list(record))
        if how < 6:
            value = draw.choice(VALUES)
            record[name] = min(value, 2**63 - 1) if isinstance(value, int) else value
        elif how == 6:
            del record[name]
        else:
            record[draw.choice(NAMES)] = record[name]
    return message


@pytest.mark.parametrize("decode", ["commit", "capability"])
def test_a_damaged_reply_is_refused_or_valid(decode: str) -> None:
    with toy_grid(1):  # so that messages can be made
        request = Message(RecordDict(), dst_node_id=1, message_type="train.commit")
        whole = reply(request)
        draw = random.Random(1)
        outcomes: Counter[str] = Counter()
        seconds: list[float] = []
        for number in range(10_000 if decode == "commit" else 500):
            records = {key: type(kept)(dict(kept)) for key, kept in whole.content.items()}
            message = Message(RecordDict(records), reply_to=request)
            for _ in range(draw.randint(1, 3)):
                message = damage(message, draw)
            if number % 97 == 0:
                message = Message(Error(draw.randrange(-1, 12), "x"), reply_to=request)
            began = time.process_time()
            outcomes[outcome(decode, message)] += 1
            seconds.append(time.process_time() - began)
    assert outcomes["refused"] > 0
    assert not outcomes["refused without a reason"]
    if decode == "commit":
        assert outcomes["valid"] > 0
    assert np.quantile(seconds, 0.99) < 0.002
    assert np.median(seconds) < 0.001


def outcome(decode: str, message: Message) -> str:
    try:
        if decode == "capability":
            decode_capability(message)
            return "valid"
        commit = decode_commit(message, ASSIGNMENT, MODEL)
    except RefusedMessage as error:
        return "refused" if error.kind and error.detail else "refused without a reason"
    arrays: dict[str, Any] = commit.update | commit.buffers
    assert arrays.keys() == MODEL.keys()
    for name, array in arrays.items():
        assert (array.shape, array.dtype) == (MODEL[name].shape, MODEL[name].dtype)
        assert np.isfinite(array).all()
    assert (commit.assignment_id, commit.version, commit.steps) == (7, 3, 4)
    return "valid"
