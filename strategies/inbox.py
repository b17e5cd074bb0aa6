"""Replies as they are pulled from a grid."""

import time

from flwr.app import Message
from flwr.serverapp import Grid

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.002


class Inbox:
    """Sends messages and keeps the replies that have arrived until they are asked for.

    Parameters
    ----------
    grid : Grid
        Flower's way to the nodes.

    Attributes
    ----------
    strays : list[int]
        Node ids of replies to messages that had been answered already, until somebody counts them.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._open: set[str] = set()
        self._replies: dict[str, Message] = {}
        self.strays: list[int] = []

    def push(self, message: Message) -> str | None:
        """Send a message; return its id, or None where Flower would not take it."""
        message_id = next(iter(self._grid.push_messages([message])), None)
        if message_id is not None:
            self._open.add(message_id)
        return message_id

    def poll(self) -> list[str]:
        """Return the ids of the messages whose replies have just arrived."""
        return self._pull(sorted(self._open)) if self._open else []

    def peek(self, message_id: str, timeout: float) -> Message | None:
        """Wait for the reply to one message, and keep it; None after `timeout` host seconds.

        Only this message's reply is pulled: with many open, that is what pulling costs.
        """
        deadline = time.monotonic() + timeout
        pause = _SHORTEST_PAUSE
        while message_id not in self._replies:
            if not self._pull([message_id]):
                if time.monotonic() >= deadline:
                    return None
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE)
        return self._replies[message_id]

    def wait(self, message_id: str, timeout: float) -> Message | None:
        """Wait for the reply to one message, and take it; None after `timeout` host seconds."""
        self.peek(message_id, timeout)
        return self.take(message_id)

    def take(self, message_id: str) -> Message | None:
        """Return the reply to a message if it has arrived; a later one will be ignored."""
        self._open.discard(message_id)
        return self._replies.pop(message_id, None)

    def _pull(self, message_ids: list[str]) -> list[str]:
        arrived = []
        for reply in self._grid.pull_messages(message_ids):
            # An error may come from Flower itself, so the sender does not tell whose reply it is.
            message_id = reply.metadata.reply_to_message_id
            if message_id in self._open:
                self._replies[message_id] = reply
                self._open.discard(message_id)
                arrived.append(message_id)
            else:
                self.strays.append(reply.metadata.src_node_id)
        return arrived
