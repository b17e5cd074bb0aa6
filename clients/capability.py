"""The handler of ``query.capability``: who the device is and what it can do."""

from flower_adsp.clients.device import Own, device_of
from flwr.app import Context, Message

from flower_adsp.messages import Capability, encode_capability, software_versions


def handle_capability(message: Message, context: Context, own: Own | None = None) -> Message:
    """Answer with the device's profile, the size of its data, and its versions."""
    device = device_of(context, own)
    return encode_capability(
        message,
        Capability(
            partition_id=device.partition_id,
            num_partitions=device.num_partitions,
            num_examples=len(device.train),
            batch_size=device.task.batch_size,
            profile=device.profile,
            versions=software_versions(),
        ),
    )
