"""A grid within the process, for tests and long comparisons.

`InProcessGrid` calls the ClientApp object directly, without processes, Ray or a SuperLink. A
run in virtual time gives the same bits on it as through ``flwr run``.
"""

import itertools
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

RUN_ID = 1
_SERVER_NODE = 1

Handler = Callable[[Message, Context], Message]


def _identify() -> None:
    """Tell Flower's internals who builds messages here; it refuses to build any otherwise."""
    TaskIdentity.run_id = RUN_ID
    TaskIdentity.task_id = 1
    TaskIdentity.node_id = _SERVER_NODE


class InProcessGrid(Grid):
    """A grid whose nodes are function calls.

    Parameters
    ----------
    client_app : ClientApp | Handler
        What every node runs.
    num_nodes : int
        Number of nodes; node i has ``partition-id`` i.
    run_config : Mapping[str, Any] | None (default: None)
        The run config that the nodes see.
    node_configs : Sequence[Mapping[str, Any]] | None (default: None)
        More settings of each node.
    node_ids : Sequence[int] | None (default: None)
        Flower's ids of the nodes; those of a real federation are random.
    threads : int (default: 0)
        Number of threads that handle messages; with 0, a message is handled when it is pushed.
    """

    def __init__(
        self,
        client_app: ClientApp | Handler,
        num_nodes: int,
        run_config: Mapping[str, Any] | None = None,
        node_configs: Sequence[Mapping[str, Any]] | None = None,
        node_ids: Sequence[int] | None = None,
        threads: int = 0,
    ) -> None:
        _identify()
        self._client_app = client_app
        ids = list(node_ids) if node_ids is not None else list(range(1000, 1000 + num_nodes))
        self._contexts = {
            node_id: Context(
                run_id=RUN_ID,
                node_id=node_id,
                node_config={
                    "partition-id": index,
                    "num-partitions": num_nodes,
                    **(node_configs[index] if node_configs else {}),
                },
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for index, node_id in enumerate(ids)
        }
        self._pool = ThreadPoolExecutor(threads) if threads else None
        self._replies: dict[str, Message | Future[Message]] = {}
        self._replied = itertools.count()

    def context_of(self, node_id: int) -> Context:
        """Return the context of a node, with what its handlers have kept in its state."""
        return self._contexts[node_id]

    def __enter__(self) -> "InProcessGrid":
        """Use the grid as a context manager, so that its threads end."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads; work that has not begun is dropped."""
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def set_run(self, run: Run) -> None:
        """Refuse: the run is fixed."""
        raise NotImplementedError("the run of an InProcessGrid is fixed")

    @property
    def run(self) -> Run:
        """Return the run."""
        return Run.create_empty(RUN_ID)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages to their nodes; return their ids."""
        ids = []
        for message in messages:
            message_id = str(uuid4())
            message.metadata.__dict__["_message_id"] = message_id
            message.metadata.__dict__["_run_id"] = RUN_ID
            ids.append(message_id)
            if self._pool:
                self._replies[message_id] = self._pool.submit(self._handle, message)
            else:
                self._replies[message_id] = self._handle(message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies there are to some messages, once."""
        replies = []
        for message_id in list(message_ids):
            reply = self._replies.get(message_id)
            if isinstance(reply, Future):
                reply = reply.result() if reply.done() else None
            if reply is not None:
                del self._replies[message_id]
                replies.append(reply)
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and return the replies to all of them."""
        ids = self.push_messages(messages)
        for message_id in ids:
            reply = self._replies[message_id]
            if isinstance(reply, Future):
                reply.result(timeout)
        return self.pull_messages(ids)

    def _handle(self, message: Message) -> Message:
        context = self.context_of(message.metadata.dst_node_id)
        try:
            reply = self._client_app(message, context)
        except Exception as error:  # whatever a handler raises is reported, as by Flower
            traceback.print_exc()
            reason = f"{type(error)}:<'{error}'>"
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        reply.metadata.__dict__["_message_id"] = f"reply-{next(self._replied)}"
        return reply
