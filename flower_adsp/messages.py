"""The messages between server and device: the only module that knows record keys.

===================  ==================================================================
message type         content
===================  ==================================================================
``train.commit``     an *assignment*: the model and what to do with it; answered by a
                     *commit*: updates of parameters, values of buffers, and counts
``query.capability``  answered by the device's *capability*
``query.payload``    so many bytes, answered by so many, to be timed
``train``            Flower's own; answered with the full model and ``num-examples``
``evaluate``         Flower's own; answered with metrics and ``num-examples``
===================  ==================================================================
"""

import platform
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import Any

import flwr
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from flower_adsp import __version__
from flower_adsp.arrays import Weights, decode, encode, is_averaged, is_buffer_name, is_finite
from flower_adsp.codec import AS_IT_IS, CODECS, restore, type_of
from flower_adsp.devices import OPTIONAL_FIELDS, PROFILE_FIELDS, TEXT_FIELDS, DeviceProfile
from flower_adsp.errors import ConfigError, RefusedMessage
from flower_adsp.sparse.portions import WHOLE, Portion, Slice

TRAIN_COMMIT = "train.commit"
QUERY_CAPABILITY = "query.capability"
QUERY_PAYLOAD = "query.payload"
MOST_BYTES = 256_000_000  # of a payload

ARRAYS = "arrays"
BUFFERS = "buffers"
CONFIG = "config"
METRICS = "metrics"
NUM_EXAMPLES = "num-examples"
TRAIN_LOSS = "train-loss"

_ID, _VERSION, _FIRST_STEP = "assignment-id", "model-version", "first-step"
_STEPS, _SECONDS, _LR = "steps", "seconds", "lr"
_OVERLAP, _KEEPS, _CONTINUES = "overlap-steps", "keeps-model", "continues"
_RETURNS, _STATE_OF = "returns-state", "state of "
_BATCH_SIZE, _UNITS, _RATIOS, _CHANNELS = "batch-size", "units", "ratios", "channels"
_TRAIN_SECONDS, _CODEC, _SCALES = "train-seconds", "codec", "scales"
_PAYLOAD, _REPLY_BYTES = "payload", "reply-bytes"
_FP32_SHARE = "fp32-share"
_SEPARATOR = ":"
_NO_STEPS, _NO_SECONDS = 0, -1.0

ENGINE_ERROR = "engine"
_ERROR_KINDS = {
    ErrorCode.UNKNOWN: ENGINE_ERROR,  # the simulation engine's, such as for a dead Ray actor
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "client-app-not-loaded",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "client-app-raised",
    ErrorCode.MESSAGE_UNAVAILABLE: "message-unavailable",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "reply-unavailable",
    ErrorCode.NODE_UNAVAILABLE: "node-unavailable",
    ErrorCode.MOD_FAILED_PRECONDITION: "mod-failed",
    ErrorCode.INVALID_FAB: "invalid-fab",
    ErrorCode.CLIENT_APP_CRASHED: "client-app-crashed",
}
NO_SECAGG = (
    "the ClientApp has the SecAgg+ mod, which needs rounds that all clients answer together; "
    "commits come one by one, and would be sent as they are; Flower's own strategies work with it"
)
NO_ANSWER = ("timeout", "message-unavailable", "reply-unavailable", "node-unavailable")


@dataclass(frozen=True)
class Assignment:
    """What the server asks a device to do next.

    Parameters
    ----------
    id : int
        Number of the assignment, unique in a run.
    version : int
        Version of the model that comes with it.
    first_step : int
        Number of the device's first step in it, which says which mini-batches to use.
    lr : float
        Local learning rate η'.
    steps : int | None (default: None)
        Number of local steps.
    seconds : float | None (default: None)
        Where `steps` is None: seconds to train by the device's own timer; it commits at the first
        end of a step at or after them.
    overlap_steps : int (default: 0)
        How many of the steps are taken, before this model counts, from the model that the device
        had at its last commit: those it did while that commit and this model travelled.
    keeps_model : bool (default: False)
        Whether the device keeps its model after training, to go on from there.
    continues : bool (default: False)
        Whether the device goes on from the model it kept, not from the one that comes with it.
    batch_size : int | None (default: None)
        Examples in a mini-batch, where not the task's.
    portions : dict[str, Portion] | None (default: None)
        What to train, by the name of the unit; None for the whole model.
    returns_state : bool (default: False)
        Whether what the device keeps for its next assignment is to come with the commit, so that
        the server can save it.
    codec : str (default: "float32")
        What the update is to travel as.
    fp32_share : float | None (default: None)
        The part of each mini-batch to train in FP32, above 0 and at most 1, the rest in INT8; None
        for training as ever.
    """

    id: int
    version: int
    first_step: int
    lr: float
    steps: int | None = None
    seconds: float | None = None
    overlap_steps: int = 0
    keeps_model: bool = False
    continues: bool = False
    batch_size: int | None = None
    portions: Mapping[str, Portion] | None = None
    returns_state: bool = False
    codec: str = AS_IT_IS
    fp32_share: float | None = None

    def __post_init__(self) -> None:
        """Check that exactly one kind of end is given."""
        if (self.steps is None) == (self.seconds is None):
            raise ValueError("an assignment takes either steps or seconds")
        if not 0 <= self.overlap_steps < (self.steps or 1):
            raise ValueError("overlap_steps must be at least 0 and below the number of steps")
        if self.fp32_share is not None and not 0 < self.fp32_share <= 1:
            raise ValueError("fp32_share must be above 0 and at most 1")

    def to_record(self) -> ConfigRecord:
        """Return the record that travels; the channels of its portions travel beside it."""
        record = ConfigRecord(
            {
                _ID: self.id,
                _VERSION: self.version,
                _FIRST_STEP: self.first_step,
                _LR: self.lr,
                _STEPS: _NO_STEPS if self.steps is None else self.steps,
                _SECONDS: _NO_SECONDS if self.seconds is None else self.seconds,
                _OVERLAP: self.overlap_steps,
                _KEEPS: self.keeps_model,
                _CONTINUES: self.continues,
                _BATCH_SIZE: self.batch_size or 0,
                _RETURNS: self.returns_state,
                _CODEC: self.codec,
            }
        )
        if self.portions is not None:
            record[_UNITS] = list(self.portions)
            record[_RATIOS] = [portion.ratio for portion in self.portions.values()]
        if self.fp32_share is not None:
            record[_FP32_SHARE] = self.fp32_share
        return record

    def channels_record(self) -> ArrayRecord | None:
        """Return the channels of the portions, by weight; None if all are whole."""
        channels = {
            f"{unit}{_SEPARATOR}{name}": np.asarray(chosen)
            for unit, portion in (self.portions or {}).items()
            for name, chosen in portion.channels.items()
        }
        return encode(channels) if channels else None

    @classmethod
    def from_record(
        cls, record: Mapping[str, Any], channels: Mapping[str, Any] | None = None
    ) -> "Assignment":
        """Read the record, and the arrays of channels that came beside it.

        Raises
        ------
        RefusedMessage
            If a key is missing, of the wrong type or out of range.
        """
        steps = _integer(record, _STEPS)
        seconds = _number(record, _SECONDS)
        if steps <= 0 and seconds < 0:
            raise RefusedMessage("assignment", f"{_STEPS} = {steps}, {_SECONDS} = {seconds}")
        overlap = _integer(record, _OVERLAP)
        if not 0 <= overlap < max(steps, 1):
            raise RefusedMessage("assignment", f"{_STEPS} = {steps}, {_OVERLAP} = {overlap}")
        batch_size = _integer(record, _BATCH_SIZE)
        if batch_size < 0:
            raise RefusedMessage("assignment", f"{_BATCH_SIZE} = {batch_size}")
        codec = _text(record, _CODEC)
        if codec not in CODECS:
            raise RefusedMessage("assignment", f"{_CODEC} = {codec!r}; known are {CODECS}")
        share = _number(record, _FP32_SHARE) if _FP32_SHARE in record else None
        if share is not None and not 0 < share <= 1:
            raise RefusedMessage("assignment", f"{_FP32_SHARE} = {share}")
        return cls(
            id=_integer(record, _ID),
            version=_integer(record, _VERSION),
            first_step=_integer(record, _FIRST_STEP),
            lr=_number(record, _LR),
            steps=steps if steps > 0 else None,
            seconds=seconds if steps <= 0 else None,
            overlap_steps=overlap,
            keeps_model=bool(_get(record, _KEEPS)),
            continues=bool(_get(record, _CONTINUES)),
            batch_size=batch_size or None,
            portions=_portions(record, channels or {}),
            returns_state=bool(_get(record, _RETURNS)),
            codec=codec,
            fp32_share=share,
        )


def _portions(record: Mapping[str, Any], channels: Mapping[str, Any]) -> dict[str, Portion] | None:
    """Read what to train."""
    if _UNITS not in record:
        return None
    units, ratios = record[_UNITS], _get(record, _RATIOS)
    ok = isinstance(units, list) and isinstance(ratios, list) and len(units) == len(ratios)
    if not ok or not all(isinstance(ratio, float) and 0 < ratio <= 1 for ratio in ratios):
        raise RefusedMessage("assignment", f"{_UNITS} = {units}, {_RATIOS} = {ratios}")
    chosen: dict[str, dict[str, Any]] = {str(unit): {} for unit in units}
    for key, array in channels.items():
        unit, _, name = key.partition(_SEPARATOR)
        if unit not in chosen:
            raise RefusedMessage("assignment", f"channels for unit {unit!r}; assigned are {units}")
        chosen[unit][name] = array
    return {unit: Portion(ratio, chosen[unit]) for unit, ratio in zip(chosen, ratios, strict=True)}


@dataclass(frozen=True)
class Commit:
    """What a device has done.

    Parameters
    ----------
    assignment_id, version : int
        Those of the assignment it answers.
    steps : int
        Local steps done.
    train_seconds : float
        Seconds the device spent on them, by its own clock.
    num_examples : int
        Training examples in the device's partition.
    train_loss : float
        Mean loss over the steps.
    update : Weights
        Differences of the parameters to the model of `version`.
    buffers : Weights
        Values of the buffers.
    slices : dict[str, Slice]
        Which channels of an update were trained, by its name, where not all; the rest is zero.
    device_state : dict[str, ArrayRecord]
        What the device keeps for its next assignment, by its key in the node's state.
    scales : dict[str, float]
        What the arrays of an update that travels as ``int8`` are to be multiplied by.
    """

    assignment_id: int
    version: int
    steps: int
    train_seconds: float
    num_examples: int
    train_loss: float
    update: Weights = field(repr=False)
    buffers: Weights = field(default_factory=dict, repr=False)
    slices: Mapping[str, Slice] = field(default_factory=dict, repr=False)
    device_state: Mapping[str, ArrayRecord] = field(default_factory=dict, repr=False)
    scales: Mapping[str, float] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Capability:
    """What a device says of itself.

    Parameters
    ----------
    partition_id, num_partitions : int
        Which worker it is, of how many; num_partitions is 0 where nobody knows.
    num_examples : int
        Training examples in its partition.
    batch_size : int
        Size of its mini-batches.
    profile : DeviceProfile
        Its speed, link and memory.
    versions : dict[str, str]
        Versions of the software on it.
    """

    partition_id: int
    num_partitions: int
    num_examples: int
    batch_size: int
    profile: DeviceProfile
    versions: dict[str, str] = field(default_factory=dict)


def software_versions() -> dict[str, str]:
    """Return the versions that matter for reproducing a run."""
    import torch

    return {
        "flower-adsp": __version__,
        "flwr": flwr.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


# ------------------------------------------------------------------------------------ assignment


def encode_assignment(
    node_id: int,
    arrays: ArrayRecord,
    assignment: Assignment,
    extra: Mapping[str, Any] | None = None,
    arrayrecord_key: str = ARRAYS,
    configrecord_key: str = CONFIG,
    device_state: Mapping[str, ArrayRecord] | None = None,
    ttl: float | None = None,
) -> Message:
    """Return the message that gives a device its next assignment.

    Parameters
    ----------
    node_id : int
        Flower's id of the node.
    arrays : ArrayRecord
        The model.
    assignment : Assignment
        What to do.
    extra : Mapping[str, Any] | None (default: None)
        More settings for the device.
    arrayrecord_key, configrecord_key : str
        Keys of the two records.
    device_state : Mapping[str, ArrayRecord] | None (default: None)
        What the device kept at its last commit, for one that has lost it.
    ttl : float | None (default: None)
        Seconds for which the message is worth an answer; None for Flower's default.
    """
    record = assignment.to_record()
    for key, value in (extra or {}).items():
        record.setdefault(key, value)
    content = RecordDict({arrayrecord_key: arrays, configrecord_key: record})
    channels = assignment.channels_record()
    if channels is not None:
        content[_CHANNELS] = channels
    for key, kept in (device_state or {}).items():
        content[_STATE_OF + key] = kept
    return Message(content, dst_node_id=node_id, message_type=TRAIN_COMMIT, ttl=ttl)


def encode_stock_assignment(
    node_id: int,
    arrays: ArrayRecord,
    assignment: Assignment,
    extra: Mapping[str, Any] | None = None,
    arrayrecord_key: str = ARRAYS,
    configrecord_key: str = CONFIG,
    ttl: float | None = None,
) -> Message:
    """Return a plain ``train`` message, for a ClientApp that does not know assignments."""
    settings = dict(extra or {}) | {"lr": assignment.lr, "server-round": assignment.version + 1}
    content = RecordDict({arrayrecord_key: arrays, configrecord_key: ConfigRecord(settings)})
    return Message(content, dst_node_id=node_id, message_type="train", ttl=ttl)


def decode_assignment(message: Message) -> tuple[Assignment, ArrayRecord, dict[str, ArrayRecord]]:
    """Read an assignment, the model that comes with it, and the state to go on from, if any.

    Raises
    ------
    RefusedMessage
        If a record or key is missing or of the wrong type.
    """
    content = message.content
    channels = _arrays(content, _CHANNELS) if _CHANNELS in content else None
    arrays = _only_arrays(content, besides=(_CHANNELS, _STATE_OF))
    assignment = Assignment.from_record(_only_config(content), channels)
    return assignment, arrays, _device_state(content)


def decode_train_request(message: Message) -> tuple[Mapping[str, Any], ArrayRecord]:
    """Read a stock ``train`` or ``evaluate`` message: its settings and its model."""
    return _only_config(message.content), _only_arrays(message.content)


# ---------------------------------------------------------------------------------------- commit


def encode_commit(message: Message, commit: Commit) -> Message:
    """Return the reply that carries a commit."""
    content = RecordDict(
        {
            ARRAYS: encode(commit.update),
            METRICS: MetricRecord(
                {
                    _ID: commit.assignment_id,
                    _VERSION: commit.version,
                    _STEPS: commit.steps,
                    _TRAIN_SECONDS: commit.train_seconds,
                    NUM_EXAMPLES: commit.num_examples,
                    TRAIN_LOSS: commit.train_loss,
                }
            ),
        }
    )
    if commit.buffers:
        content[BUFFERS] = encode(commit.buffers)
    if commit.scales:
        content[_SCALES] = encode({key: np.asarray(v) for key, v in commit.scales.items()})
    for key, kept in commit.device_state.items():
        content[_STATE_OF + key] = kept
    return Message(content, reply_to=message)


def encode_train_reply(
    message: Message, arrays: ArrayRecord, num_examples: int, train_loss: float
) -> Message:
    """Return the reply to a stock ``train`` message: the full model."""
    metrics = MetricRecord({NUM_EXAMPLES: num_examples, TRAIN_LOSS: train_loss})
    return Message(RecordDict({ARRAYS: arrays, METRICS: metrics}), reply_to=message)


def encode_evaluate_reply(
    message: Message, metrics: Mapping[str, float], num_examples: int
) -> Message:
    """Return the reply to an ``evaluate`` message."""
    record = MetricRecord({f"eval-{key}": value for key, value in metrics.items()})
    record[NUM_EXAMPLES] = num_examples
    return Message(RecordDict({METRICS: record}), reply_to=message)


def decode_commit(
    message: Message,
    assignment: Assignment,
    model: Weights,
    slices: Mapping[str, Slice] | None = None,
    buffers: Collection[str] = (),
    most_steps: int | None = None,
    most_examples: int | None = None,
) -> Commit:
    """Read and check a commit.

    Parameters
    ----------
    message : Message
        The reply.
    assignment : Assignment
        The assignment that it should answer.
    model : Weights
        The server's model, for names, shapes and types.
    slices : Mapping[str, Slice] | None (default: None)
        Under a layer plan, what its update must hold, by the name of the parameter; None if that
        is the whole model. The update returned has whole arrays, zero where nothing was trained.
    buffers : Collection[str] (default: ())
        Where `slices` are given, the buffers that must come.
    most_steps, most_examples : int | None (default: None)
        Numbers above which they are absurd.

    Raises
    ------
    RefusedMessage
        If the reply is an error, a record or key is missing, it answers another assignment, an
        array has another name, shape or type than the model's, or a number is not finite or absurd.
    """
    content = _content(message)
    metrics = _only_metrics(content)
    commit = Commit(
        assignment_id=_integer(metrics, _ID),
        version=_integer(metrics, _VERSION),
        steps=_integer(metrics, _STEPS),
        train_seconds=_number(metrics, _TRAIN_SECONDS),
        num_examples=_integer(metrics, NUM_EXAMPLES),
        train_loss=_number(metrics, TRAIN_LOSS),
        update=_restored(content, model, assignment.codec),
        buffers=_arrays(content, BUFFERS) if BUFFERS in content else {},
        device_state=_device_state(content),
    )
    if (commit.assignment_id, commit.version) != (assignment.id, assignment.version):
        raise RefusedMessage(
            "wrong-assignment",
            f"{_ID} = {commit.assignment_id}, {_VERSION} = {commit.version}; open is "
            f"{assignment.id}, {assignment.version}",
        )
    if assignment.steps is not None and commit.steps != assignment.steps:
        raise RefusedMessage(
            "steps", f"{_STEPS} = {commit.steps}, but {assignment.steps} were assigned"
        )
    _check_counts(commit, most_steps, most_examples)
    if slices is None:
        _check_arrays(commit.update | commit.buffers, model)
    else:
        _check_arrays(commit.update, model, slices)
        _check_arrays(commit.buffers, model, dict.fromkeys(buffers, WHOLE))
        commit = _expanded(commit, model, slices)
    if overlap := commit.update.keys() & commit.buffers.keys():
        raise RefusedMessage("arrays", f"{sorted(overlap)} came both as update and as buffer")
    return commit


def decode_stock_reply(
    message: Message,
    assignment: Assignment,
    sent: ArrayRecord,
    model: Weights,
    weighted_by_key: str = NUM_EXAMPLES,
) -> Commit:
    """Read a full model as a commit: the update is the reply minus the version sent.

    Integer arrays, and those named as BatchNorm names its buffers, are taken as buffers.

    Raises
    ------
    RefusedMessage
        As `decode_commit` does.
    """
    content = _content(message)
    metrics = _only_metrics(content)
    reply = _decode(_only_arrays(content))
    _check_arrays(reply, model)
    base = decode(sent)
    update, buffers = {}, {}
    for name, array in reply.items():
        if is_averaged(array) and not is_buffer_name(name):
            update[name] = np.subtract(array, base[name])
        else:
            buffers[name] = array
    loss = metrics.get(TRAIN_LOSS, metrics.get("train_loss", 0.0))
    num_examples = int(_number(metrics, weighted_by_key))
    commit = Commit(
        assignment_id=assignment.id,
        version=assignment.version,
        steps=1,
        train_seconds=0.0,
        num_examples=num_examples,
        train_loss=float(loss) if isinstance(loss, int | float) else 0.0,
        update=update,
        buffers=buffers,
    )
    _check_counts(commit)
    return commit


def stock_steps(commit: Commit, batch_size: int) -> Commit:
    """Return a stock reply's commit with the steps of one epoch over the examples it names."""
    return replace(commit, steps=max(1, -(-commit.num_examples // batch_size)))


# ------------------------------------------------------------------------------------ capability


def encode_capability_query(node_id: int) -> Message:
    """Return the message that asks a device for its capability."""
    return Message(RecordDict(), dst_node_id=node_id, message_type=QUERY_CAPABILITY)


def encode_capability(message: Message, capability: Capability) -> Message:
    """Return the reply that carries a device's capability."""
    record = ConfigRecord(
        {
            "partition-id": capability.partition_id,
            "num-partitions": capability.num_partitions,
            NUM_EXAMPLES: capability.num_examples,
            "batch-size": capability.batch_size,
        }
    )
    for key, value in asdict(capability.profile).items():
        if value not in ("", None):  # of which Flower cannot count the bytes
            record[f"profile.{key}"] = value
    for key, value in capability.versions.items():
        record[f"version.{key}"] = value
    return Message(RecordDict({"capability": record}), reply_to=message)


def decode_capability(message: Message) -> Capability:
    """Read and check a device's capability.

    Raises
    ------
    RefusedMessage
        If the reply is an error, a key is missing or a value is out of range.
    """
    content = _content(message)
    record = content.get("capability")
    if not isinstance(record, ConfigRecord):
        raise RefusedMessage("missing-key", "the reply has no ConfigRecord 'capability'")
    settings: dict[str, Any] = {}
    for key in PROFILE_FIELDS:
        full = f"profile.{key}"
        if full in record or key not in (*TEXT_FIELDS, *OPTIONAL_FIELDS):
            settings[key] = (_text if key in TEXT_FIELDS else _number)(record, full)
    try:
        profile = DeviceProfile(**settings)
    except ConfigError as error:
        raise RefusedMessage("capability", str(error)) from None
    capability = Capability(
        partition_id=_integer(record, "partition-id"),
        num_partitions=_integer(record, "num-partitions"),
        num_examples=_integer(record, NUM_EXAMPLES),
        batch_size=_integer(record, "batch-size"),
        profile=profile,
        versions={
            key.removeprefix("version."): str(value)
            for key, value in record.items()
            if key.startswith("version.")
        },
    )
    for name, value, least in (
        ("partition-id", capability.partition_id, 0),
        (NUM_EXAMPLES, capability.num_examples, 0),
        ("batch-size", capability.batch_size, 1),
    ):
        if value < least:
            raise RefusedMessage("capability", f"{name} = {value}; it must be at least {least}")
    return capability


# ---------------------------------------------------------------------------------------- payloads


def encode_payload(node_id: int, payload: bytes, reply_bytes: int) -> Message:
    """Return the message that brings a payload and asks for one of so many bytes."""
    content = _payload(payload)
    content[CONFIG] = ConfigRecord({_REPLY_BYTES: reply_bytes})
    return Message(content, dst_node_id=node_id, message_type=QUERY_PAYLOAD)


def decode_payload_query(message: Message) -> int:
    """Return how many bytes are asked for.

    Raises
    ------
    RefusedMessage
        If it does not say, or they are too many.
    """
    record = _content(message).get(CONFIG)
    if not isinstance(record, ConfigRecord):
        raise RefusedMessage("missing-key", f"the message has no ConfigRecord {CONFIG!r}")
    number = _integer(record, _REPLY_BYTES)
    if not 0 <= number <= MOST_BYTES:
        raise RefusedMessage("payload", f"{_REPLY_BYTES} = {number}; allowed are 0 to {MOST_BYTES}")
    return number


def encode_payload_reply(message: Message, payload: bytes) -> Message:
    """Return the reply that brings a payload."""
    return Message(_payload(payload), reply_to=message)


def check_payload(message: Message, reply_bytes: int) -> None:
    """Check that a reply brings as many bytes as were asked for.

    Raises
    ------
    RefusedMessage
        If it is an error, or brings others.
    """
    record = _content(message).get(ARRAYS)
    array = record.get(_PAYLOAD) if isinstance(record, ArrayRecord) else None
    number = 0 if array is None else int(np.prod(array.shape, dtype=np.int64))
    if number != reply_bytes:
        raise RefusedMessage("payload", f"{number} bytes came, {reply_bytes} were asked for")


def _payload(payload: bytes) -> RecordDict:
    if not payload:
        return RecordDict()
    array = Array(np.frombuffer(payload, dtype=np.uint8))
    return RecordDict({ARRAYS: ArrayRecord({_PAYLOAD: array})})


def is_unknown_to_client(message: Message) -> bool:
    """Tell whether a reply says that the ClientApp has no handler for the message's type.

    Flower's mods for clipping and local differential privacy answer so in its place: they take
    only messages that carry a model, and subtract it from the reply. ``train`` messages suit them.
    """
    if not message.has_error():
        return False
    if message.error.code == ErrorCode.MOD_FAILED_PRECONDITION:
        return True
    reason = message.error.reason or ""
    return "function registered" in reason or "Unsupported message type" in reason


# ---------------------------------------------------------------------------------------- checks


def _content(message: Message) -> RecordDict:
    if message.has_error():
        error = message.error
        kind = _ERROR_KINDS.get(error.code, "error-reply")
        if NO_SECAGG in (error.reason or ""):
            raise RefusedMessage("secaggplus", NO_SECAGG)
        raise RefusedMessage(kind, f"code {error.code}: {error.reason}")
    return message.content


def _device_state(content: RecordDict) -> dict[str, ArrayRecord]:
    return {
        key.removeprefix(_STATE_OF): record
        for key, record in content.array_records.items()
        if key.startswith(_STATE_OF)
    }


def _only_arrays(content: RecordDict, besides: tuple[str, ...] = ()) -> ArrayRecord:
    """Return the only ArrayRecord besides those whose keys begin in these ways."""
    records = [r for key, r in content.array_records.items() if not key.startswith(besides)]
    if len(records) != 1:
        raise RefusedMessage("missing-key", f"{len(records)} ArrayRecords; expected one")
    return records[0]


def _only_config(content: RecordDict) -> ConfigRecord:
    records = list(content.config_records.values())
    if len(records) != 1:
        raise RefusedMessage("missing-key", f"{len(records)} ConfigRecords; expected one")
    return records[0]


def _only_metrics(content: RecordDict) -> MetricRecord:
    records = list(content.metric_records.values())
    if len(records) != 1:
        raise RefusedMessage("missing-key", f"{len(records)} MetricRecords; expected one")
    return records[0]


def _arrays(content: RecordDict, key: str) -> Weights:
    record = content.get(key)
    if not isinstance(record, ArrayRecord):
        raise RefusedMessage("missing-key", f"the reply has no ArrayRecord {key!r}")
    return _decode(record)


def _decode(record: ArrayRecord) -> Weights:
    try:
        return decode(record)
    except Exception as error:  # NumPy raises many kinds on bytes that are no array
        raise RefusedMessage("undecodable", f"{type(error).__name__}: {error}") from None


def _restored(content: RecordDict, model: Weights, codec: str) -> Weights:
    """Return an update in the model's types, from what it travelled as."""
    arrays = _arrays(content, ARRAYS)
    if codec == AS_IT_IS:
        return arrays
    scales = _arrays(content, _SCALES) if codec == "int8" else {}
    update: Weights = {}
    for name, array in arrays.items():
        if name not in model:
            raise RefusedMessage("arrays", f"not in the model [{name!r}]")
        own = model[name].dtype
        if array.dtype != type_of(codec, own):
            raise RefusedMessage("dtype", f"{name} has type {array.dtype}; assigned is {codec}")
        scale = scales.get(name) if codec == "int8" else np.asarray(1.0)
        if scale is None or scale.shape != () or not is_averaged(scale):
            raise RefusedMessage("scales", f"{name} has no number to be multiplied by")
        if not np.isfinite(scale) or scale < 0:
            raise RefusedMessage("scales", f"{name} is to be multiplied by {float(scale)}")
        update[name] = restore(array, float(scale), own)
    return update


def _get(record: Mapping[str, Any], key: str) -> Any:
    if key not in record:
        raise RefusedMessage("missing-key", f"{key!r} is missing; found {sorted(record)}")
    return record[key]


def _integer(record: Mapping[str, Any], key: str) -> int:
    value = _get(record, key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RefusedMessage("type", f"{key} = {value!r} is not an integer")
    return value


def _number(record: Mapping[str, Any], key: str) -> float:
    value = _get(record, key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RefusedMessage("type", f"{key} = {value!r} is not a number")
    if not isfinite(value):
        raise RefusedMessage("non-finite", f"{key} = {value!r}")
    return float(value)


def _text(record: Mapping[str, Any], key: str) -> str:
    value = _get(record, key)
    if not isinstance(value, str):
        raise RefusedMessage("type", f"{key} = {value!r} is not a string")
    return value


def _check_counts(
    commit: Commit, most_steps: int | None = None, most_examples: int | None = None
) -> None:
    for name, value, least, most in (
        (NUM_EXAMPLES, commit.num_examples, 1, most_examples),
        (_STEPS, commit.steps, 1, most_steps),
        (_TRAIN_SECONDS, commit.train_seconds, 0, None),
    ):
        if value < least or (most is not None and value > most):
            limits = f"at least {least}" + ("" if most is None else f" and at most {most}")
            raise RefusedMessage("count", f"{name} = {value}; it must be {limits}")


def _expanded(commit: Commit, model: Weights, slices: Mapping[str, Slice]) -> Commit:
    update = {
        name: slices[name].expand(part, model[name].shape) for name, part in commit.update.items()
    }
    partial = {name: part for name, part in slices.items() if part.axis is not None}
    return replace(commit, update=update, slices=partial)


def _check_arrays(
    arrays: Weights, model: Weights, slices: Mapping[str, Slice] | None = None
) -> None:
    wanted = model.keys() if slices is None else slices.keys()
    if arrays.keys() != wanted:
        missing = sorted(wanted - arrays.keys())
        surplus = sorted(arrays.keys() - wanted)
        of = "in the model" if slices is None else "assigned"
        raise RefusedMessage("arrays", f"missing {missing}, not {of} {surplus}")
    for name, array in arrays.items():
        expected = model[name]
        shape = expected.shape if slices is None else slices[name].shape(expected.shape)
        if array.shape != shape:
            raise RefusedMessage("shape", f"{name} has shape {array.shape}; expected is {shape}")
        if array.dtype != expected.dtype:
            raise RefusedMessage(
                "dtype", f"{name} has type {array.dtype}; the model's is {expected.dtype}"
            )
        if not is_finite(array):
            raise RefusedMessage("non-finite", f"{name} holds NaN or infinity")
