"""Find the nodes, ask each for its capability, and make workers of them."""

import time
from dataclasses import dataclass, field
from logging import INFO, WARNING

from flower_adsp.strategies.inbox import Inbox
from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.state import Worker
from flwr.common.logger import log
from flwr.serverapp import Grid

from flower_adsp.clock import MICROSECONDS
from flower_adsp.errors import DataError, NodeCountError, RefusedMessage
from flower_adsp.messages import (
    Capability,
    decode_capability,
    encode_capability_query,
    is_unknown_to_client,
)

_SETTLE_SECONDS = 5.0  # how long nobody new must appear, where the number of nodes is not known
_ATTEMPTS = 3


@dataclass
class _Answers:
    capabilities: dict[int, Capability]
    stock: list[int]
    failed: dict[int, str]
    seconds: dict[int, float] = field(default_factory=dict)  # until the answer

    def __len__(self) -> int:
        return len(self.capabilities) + len(self.stock)

    @property
    def expected(self) -> int:
        """Return the number of nodes that the nodes themselves know of; 0 if none says."""
        return max((answer.num_partitions for answer in self.capabilities.values()), default=0)


def enlist(grid: Grid, inbox: Inbox, options: LoopOptions, timeout: float) -> list[Worker]:
    """Wait for the nodes and make workers of them, in order of their partition id.

    Parameters
    ----------
    grid : Grid
        Flower's way to the nodes.
    inbox : Inbox
        Sends the queries.
    options : LoopOptions
        How many nodes to wait for, and how long.
    timeout : float
        Host seconds to wait for one answer.

    Raises
    ------
    NodeCountError
        If too few nodes appear in time.
    DataError
        If a partition holds no training data.
    """
    answers = _Answers({}, [], {})
    asked: set[int] = set()
    latest = last_said = time.monotonic()
    while True:
        new = sorted(set(grid.get_node_ids()) - asked)
        if new:
            asked.update(new)
            _ask(new, inbox, answers, timeout)
            latest = time.monotonic()
        quiet = time.monotonic() - latest
        if _is_complete(answers, options, quiet):
            break
        _give_up_if_late(answers, options, quiet)
        if time.monotonic() - last_said > 5.0:
            last_said = time.monotonic()
            log(
                INFO,
                "Waiting for nodes: %d of at least %d have answered",
                len(answers),
                max(options.min_available_nodes, answers.expected),
            )
        time.sleep(0.1)
    return _workers(answers, options)


def _is_complete(answers: _Answers, options: LoopOptions, quiet: float) -> bool:
    if len(answers) < options.min_available_nodes:
        return False
    if answers.expected:
        is_all = len(answers) + len(answers.failed) >= answers.expected
        # In real time those who are late join later.
        return is_all or (options.clock == "wall" and quiet >= _SETTLE_SECONDS)
    return quiet >= min(_SETTLE_SECONDS, options.node_timeout) or bool(answers.stock)


def _give_up_if_late(answers: _Answers, options: LoopOptions, quiet: float) -> None:
    # A simulation knows from the start how many nodes it will ever have.
    is_all = 0 < answers.expected <= len(answers) + len(answers.failed)
    if quiet < (min(_SETTLE_SECONDS, options.node_timeout) if is_all else options.node_timeout):
        return
    needed, name = options.min_available_nodes, "min_available_nodes"
    if options.clock == "virtual" and answers.expected > needed:
        needed, name = answers.expected, "num-partitions"
    failures = "".join(f"\n  node {node}: {why}" for node, why in answers.failed.items())
    raise NodeCountError(
        f"{name} = {needed}, but only {len(answers)} nodes have answered within "
        f"{quiet:.0f} s. In a simulation, set their number: "
        f'flwr run . --stream --federation-config "num-supernodes={needed}"; '
        f"in a deployment, start more SuperNodes or raise node_timeout.{failures}"
    )


def _ask(node_ids: list[int], inbox: Inbox, answers: _Answers, timeout: float) -> None:
    """Query nodes; a node that fails is asked again, a few times."""
    for attempt in range(_ATTEMPTS):
        began = time.monotonic()
        queries = {node: inbox.push(encode_capability_query(node)) for node in node_ids}
        retry = []
        for node, message_id in queries.items():
            reply = None if message_id is None else inbox.wait(message_id, timeout)
            if reply is None:
                answers.failed[node] = "no answer"
            elif is_unknown_to_client(reply):
                answers.stock.append(node)
            else:
                try:
                    answers.capabilities[node] = decode_capability(reply)
                    answers.seconds[node] = time.monotonic() - began
                    answers.failed.pop(node, None)
                except RefusedMessage as error:
                    answers.failed[node] = str(error)
                    retry.append(node)
        node_ids = retry
        if not node_ids:
            return
        log(WARNING, "attempt %d: %d nodes failed to answer", attempt + 1, len(node_ids))
    for node in node_ids:
        log(WARNING, "node %d is left out: %s", node, answers.failed[node])


def worker_of(node_id: int, capability: Capability) -> Worker:
    """Return the worker that a node is by what it says of itself."""
    return Worker(
        capability.partition_id,
        node_id,
        capability.profile,
        capability.num_examples,
        capability.batch_size,
    )


def _workers(answers: _Answers, options: LoopOptions) -> list[Worker]:
    workers: dict[int, Worker] = {}
    for node, capability in sorted(
        answers.capabilities.items(), key=lambda item: (item[1].partition_id, item[0])
    ):
        partition = capability.partition_id
        if capability.num_examples < 1:
            raise DataError(
                f"partition-id = {partition} of {capability.num_partitions} has num-examples = 0; "
                "each partition must hold at least 1: use fewer nodes, or another partitioning"
            )
        if partition in workers:
            log(WARNING, "node %d is left out: partition-id = %d is taken", node, partition)
            continue
        workers[partition] = worker_of(node, capability)
        if options.clock == "wall":
            # What a message costs there, before a commit has shown it: mostly, starting a process.
            workers[partition].overhead = round(answers.seconds[node] * MICROSECONDS)
    if answers.stock:
        log(
            WARNING,
            "%d nodes run a ClientApp that does not answer query.capability, or has a mod that "
            "does not let it; they get plain train messages, and profiles in turn from the "
            "options. Without partition ids, which node is which may differ from run to run",
            len(answers.stock),
        )
    first = max(workers, default=-1) + 1
    for offset, node in enumerate(sorted(answers.stock)):
        profile = options.stock_profiles[offset % len(options.stock_profiles)]
        workers[first + offset] = Worker(first + offset, node, profile, is_stock=True)
    return list(workers.values())
