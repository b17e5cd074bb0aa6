"""Nodes that come and go while a run goes on, in real time."""

from logging import WARNING

from flower_adsp.strategies.inbox import Inbox
from flwr.common.logger import log
from flwr.serverapp import Grid

from flower_adsp.errors import RefusedMessage
from flower_adsp.messages import (
    Capability,
    decode_capability,
    encode_capability_query,
    is_unknown_to_client,
)

_ATTEMPTS = 3


class Membership:
    """Finds new nodes and asks them who they are; never waits for an answer.

    Parameters
    ----------
    grid : Grid
        Flower's way to the nodes.
    inbox : Inbox
        Sends the queries.
    known : set[int]
        Ids of the nodes that take part.

    Attributes
    ----------
    online : set[int]
        Ids of the nodes that were there at the last look.
    """

    def __init__(self, grid: Grid, inbox: Inbox, known: set[int]) -> None:
        self._grid = grid
        self._inbox = inbox
        self._known = set(known)
        self._asked: dict[str, int] = {}
        self._failures: dict[int, int] = {}
        self.online = set(grid.get_node_ids())

    def look(self) -> None:
        """See who is there, and query those who are new."""
        self.online = set(self._grid.get_node_ids())
        for message_id, node_id in list(self._asked.items()):
            if node_id not in self.online:
                self._inbox.take(message_id)
                del self._asked[message_id]
                self.forget(node_id)
        for node_id in sorted(self.online - self._known):
            query = self._inbox.push(encode_capability_query(node_id))
            if query is not None:
                self._known.add(node_id)
                self._asked[query] = node_id

    def forget(self, node_id: int) -> None:
        """Have a node queried again at the next look."""
        self._known.discard(node_id)

    def answer(self, message_id: str) -> tuple[int, Capability] | None:
        """Return a node and what it said to a query; None if it cannot take part."""
        node_id = self._asked.pop(message_id, None)
        reply = self._inbox.take(message_id)
        if node_id is None or reply is None:
            return None
        try:
            capability = decode_capability(reply)
            if capability.num_examples < 1:
                raise RefusedMessage("capability", "it holds no examples")
            return node_id, capability
        except RefusedMessage as error:
            failures = self._failures[node_id] = self._failures.get(node_id, 0) + 1
            log(WARNING, "node %d is left out: %s", node_id, error)
            if failures < _ATTEMPTS and not is_unknown_to_client(reply):
                self.forget(node_id)
            return None
