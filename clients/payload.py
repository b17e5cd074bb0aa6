"""The handler of ``query.payload``: answer with as many bytes as are asked for."""

import os

from flwr.app import Context, Message

from flower_adsp.messages import decode_payload_query, encode_payload_reply


def handle_payload(message: Message, context: Context) -> Message:
    """Answer, so that the server can time it."""
    # Random, since Flower sends what it has sent before only once.
    return encode_payload_reply(message, os.urandom(decode_payload_query(message)))
