from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from flower_adsp.arrays import encode
from flower_adsp.devices import DeviceProfile
from flower_adsp.errors import RefusedMessage
from flower_adsp.messages import (
    Assignment,
    Capability,
    Commit,
    decode_assignment,
    decode_capability,
    decode_commit,
    decode_stock_reply,
    encode_assignment,
    encode_capability,
    encode_capability_query,
    encode_commit,
    encode_stock_assignment,
    encode_train_reply,
    is_unknown_to_client,
)
from flower_adsp.testing import InProcessGrid

MODEL = {
    "w": np.zeros((2, 2), np.float32),
    "bn.running_var": np.ones(2, np.float32),
    "bn.num_batches_tracked": np.array(4),
}
ASSIGNMENT = Assignment(id=3, version=7, first_step=10, lr=0.1, steps=5)
COMMIT = Commit(
    assignment_id=3,
    version=7,
    steps=5,
    train_seconds=1.5,
    num_examples=20,
    train_loss=0.25,
    update={"w": np.full((2, 2), 0.5, np.float32)},
    buffers={
        "bn.running_var": np.full(2, 3.0, np.float32),
        "bn.num_batches_tracked": np.array(9),
    },
)


@pytest.fixture(autouse=True)
def _identity() -> None:
    InProcessGrid(lambda message, context: message, 0)  # lets messages be built here


def request() -> Message:
    return encode_assignment(11, encode(MODEL), ASSIGNMENT)


def reply(**changes: Any) -> Message:
    return encode_commit(request(), replace(COMMIT, **changes))


@given(
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.floats(1e-9, 1e3),
    st.one_of(st.integers(1, 10**6), st.floats(0, 1e6)),
)
def test_assignments_survive_the_journey(
    number: int, version: int, first: int, lr: float, end: float
) -> None:
    steps, seconds = (end, None) if isinstance(end, int) else (None, end)
    assignment = Assignment(number, version, first, lr, steps, seconds)
    message = encode_assignment(11, encode(MODEL), assignment, {"mine": 4})
    back, arrays, _ = decode_assignment(message)
    assert back == assignment
    assert list(arrays) == list(MODEL)
    assert message.content["config"]["mine"] == 4
    assert message.metadata.message_type == "train.commit"


@pytest.mark.parametrize("share", [None, 0.4, 1.0])
def test_the_share_in_fp32_travels_if_there_is_one(share: float | None) -> None:
    assignment = replace(ASSIGNMENT, fp32_share=share)
    message = encode_assignment(11, encode(MODEL), assignment)
    assert ("fp32-share" in message.content["config"]) == (share is not None)
    assert decode_assignment(message)[0] == assignment


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan"), "half", True])
def test_a_share_in_fp32_out_of_range_is_refused(share: Any) -> None:
    message = encode_assignment(11, encode(MODEL), ASSIGNMENT)
    message.content["config"]["fp32-share"] = share
    with pytest.raises(RefusedMessage, match="fp32-share = "):
        decode_assignment(message)
    if not isinstance(share, str | bool):
        with pytest.raises(ValueError, match="fp32_share must be above 0"):
            replace(ASSIGNMENT, fp32_share=share)


def test_an_assignment_ends_in_one_way() -> None:
    with pytest.raises(ValueError, match="either steps or seconds"):
        Assignment(0, 0, 0, 0.1)
    with pytest.raises(ValueError, match="either steps or seconds"):
        Assignment(0, 0, 0, 0.1, 1, 1.0)


def test_commits_survive_the_journey() -> None:
    back = decode_commit(reply(), ASSIGNMENT, MODEL)
    for name in ("assignment_id", "version", "steps", "train_seconds", "num_examples"):
        assert getattr(back, name) == getattr(COMMIT, name)
    np.testing.assert_array_equal(back.update["w"], COMMIT.update["w"])
    np.testing.assert_array_equal(back.buffers["bn.running_var"], [3.0, 3.0])
    assert back.buffers["bn.num_batches_tracked"] == 9


def drop_metric(key: str) -> Callable[[Message], None]:
    return lambda message: message.content["metrics"].pop(key)


def set_metric(key: str, value: Any) -> Callable[[Message], None]:
    def change(message: Message) -> None:
        message.content["metrics"][key] = value

    return change


def set_array(key: str, array: Any, record: str = "arrays") -> Callable[[Message], None]:
    def change(message: Message) -> None:
        message.content[record][key] = Array(np.asarray(array))

    return change


def garble(message: Message) -> None:
    message.content["arrays"]["w"].data = b"no array at all"


W = np.zeros((2, 2), np.float32)
NAN = np.array([[0, 1], [2, np.nan]], np.float32)
KEYS = ["assignment-id", "model-version", "steps", "train-seconds", "num-examples", "train-loss"]


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        *[(drop_metric(key), "missing-key", [key]) for key in KEYS],
        (lambda m: m.content.pop("metrics"), "missing-key", ["0 MetricRecords"]),
        (lambda m: m.content.pop("arrays"), "missing-key", ["arrays"]),
        (lambda m: m.content.pop("buffers"), "arrays", ["missing", "running_var"]),
        (set_metric("steps", 1.5), "type", ["steps", "1.5"]),
        (set_metric("train-loss", float("nan")), "non-finite", ["train-loss"]),
        (set_metric("train-seconds", float("inf")), "non-finite", ["train-seconds"]),
        (set_metric("train-seconds", -1.0), "count", ["train-seconds", "-1"]),
        (set_metric("num-examples", 0), "count", ["num-examples", "0", "at least 1"]),
        (set_metric("steps", 6), "steps", ["6", "5"]),
        (set_metric("assignment-id", 2), "wrong-assignment", ["2", "3"]),
        (set_metric("model-version", 99), "wrong-assignment", ["99", "7"]),
        (set_array("w", np.zeros((2, 3), np.float32)), "shape", ["w", "(2, 3)", "(2, 2)"]),
        (set_array("w", np.zeros((2, 2))), "dtype", ["w", "float64", "float32"]),
        (set_array("w", NAN), "non-finite", ["w"]),
        (set_array("w", W + np.float32("inf")), "non-finite", ["w"]),
        (set_array("bn.running_var", [1, np.inf], "buffers"), "dtype", ["running_var"]),
        (set_array("v", W), "arrays", ["not in the model ['v']"]),
        (set_array("w", W, "buffers"), "arrays", ["w", "both"]),
        (garble, "undecodable", []),
    ],
)
def test_what_is_wrong_with_a_commit_is_named(
    change: Callable[[Message], Any], kind: str, words: list[str]
) -> None:
    message = reply()
    change(message)
    with pytest.raises(RefusedMessage) as caught:
        decode_commit(message, ASSIGNMENT, MODEL)
    assert caught.value.kind == kind
    for word in words:
        assert word in str(caught.value)


def test_an_error_reply_is_refused_with_its_reason() -> None:
    message = Message(Error(2, "out of memory"), reply_to=request())
    with pytest.raises(RefusedMessage, match=r"client-app-raised: code 2: out of memory"):
        decode_commit(message, ASSIGNMENT, MODEL)


@pytest.mark.parametrize("key", ["assignment-id", "model-version", "first-step", "lr", "steps"])
def test_a_device_refuses_an_assignment_without_a_key(key: str) -> None:
    message = request()
    del message.content["config"][key]
    with pytest.raises(RefusedMessage, match=key):
        decode_assignment(message)


def test_a_device_refuses_an_assignment_without_an_end() -> None:
    message = request()
    message.content["config"]["steps"] = 0
    with pytest.raises(RefusedMessage, match="steps = 0, seconds = -1"):
        decode_assignment(message)


def test_a_stock_reply_becomes_an_update_from_the_version_sent() -> None:
    sent = encode({**MODEL, "w": np.full((2, 2), 1.0, np.float32)})
    message = encode_stock_assignment(11, sent, ASSIGNMENT)
    assert message.metadata.message_type == "train"
    assert message.content["config"]["server-round"] == 8
    full = encode(
        {
            "w": np.full((2, 2), 1.5, np.float32),
            "bn.running_var": np.full(2, 5.0, np.float32),
            "bn.num_batches_tracked": np.array(6),
        }
    )
    commit = decode_stock_reply(encode_train_reply(message, full, 12, 0.5), ASSIGNMENT, sent, MODEL)
    np.testing.assert_array_equal(commit.update["w"], np.full((2, 2), 0.5))
    np.testing.assert_array_equal(commit.buffers["bn.running_var"], [5.0, 5.0])
    assert set(commit.update) == {"w"}
    assert (commit.num_examples, commit.train_loss, commit.version) == (12, 0.5, 7)


def test_a_stock_reply_with_nan_is_refused() -> None:
    message = encode_stock_assignment(11, encode(MODEL), ASSIGNMENT)
    full = encode({**MODEL, "w": NAN})
    with pytest.raises(RefusedMessage, match="non-finite"):
        decode_stock_reply(
            encode_train_reply(message, full, 12, 0.5), ASSIGNMENT, encode(MODEL), MODEL
        )


CAPABILITY = Capability(2, 5, 100, 32, DeviceProfile("pi", 0.5), {"flwr": "1.42.0"})


def test_capabilities_survive_the_journey() -> None:
    back = decode_capability(encode_capability(encode_capability_query(11), CAPABILITY))
    assert back == CAPABILITY
    with_npu = replace(CAPABILITY, profile=DeviceProfile("soc", npu_speedup=3.9))
    assert decode_capability(encode_capability(encode_capability_query(11), with_npu)) == with_npu


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("partition-id", None, "missing-key"),
        ("partition-id", -1, "capability"),
        ("batch-size", 0, "capability"),
        ("num-examples", 1.5, "type"),
        ("profile.seconds_per_sample", 0.0, "capability"),
        ("profile.name", 3, "type"),
        ("profile.up_mbps", "fast", "type"),
        ("profile.npu_speedup", "fast", "type"),
        ("profile.npu_speedup", 0.0, "capability"),
    ],
)
def test_a_wrong_capability_is_refused(key: str, value: Any, kind: str) -> None:
    message = encode_capability(encode_capability_query(11), CAPABILITY)
    record = message.content["capability"]
    if value is None:
        del record[key]
    else:
        record[key] = value
    with pytest.raises(RefusedMessage, match=key.split(".")[-1]) as caught:
        decode_capability(message)
    assert caught.value.kind == kind


def test_replies_with_other_content_are_no_capability() -> None:
    query = encode_capability_query(11)
    for content in (RecordDict(), RecordDict({"capability": MetricRecord({"a": 1})})):
        with pytest.raises(RefusedMessage, match="capability"):
            decode_capability(Message(content, reply_to=query))


def test_a_client_app_without_a_handler_is_told_from_one_that_fails() -> None:
    query = encode_capability_query(11)
    unknown = Error(2, "ValueError: No query function registered with name 'capability'")
    assert is_unknown_to_client(Message(unknown, reply_to=query))
    assert not is_unknown_to_client(Message(Error(2, "out of memory"), reply_to=query))
    assert not is_unknown_to_client(encode_capability(query, CAPABILITY))


def test_records_hold_plain_flower_types() -> None:
    message = reply()
    assert isinstance(message.content["arrays"], ArrayRecord)
    assert isinstance(request().content["config"], ConfigRecord)
