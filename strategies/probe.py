"""Measure the links of all nodes, one after another, so that none slows another."""

import time
from dataclasses import dataclass, replace
from logging import INFO, WARNING

import numpy as np
from flower_adsp.strategies.enlist import enlist
from flower_adsp.strategies.inbox import Inbox
from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.state import Worker
from flwr.common.logger import log
from flwr.serverapp import Grid

from flower_adsp.devices import DeviceProfile
from flower_adsp.errors import RefusedMessage
from flower_adsp.messages import check_payload, encode_payload
from flower_adsp.network.probe import MeasuredLink, measure_link


@dataclass(frozen=True)
class Probed:
    """A node, and what its link was found to be.

    Attributes
    ----------
    worker : int
        Its partition id.
    profile : DeviceProfile
        Its profile, with the rates that were measured.
    link : MeasuredLink
        What was measured.
    """

    worker: int
    profile: DeviceProfile
    link: MeasuredLink


def probe_links(
    grid: Grid,
    options: LoopOptions,
    timeout: float,
    seconds: float,
    largest: int,
    repeats: int,
) -> list[Probed]:
    """Measure the link of each node by timed payloads.

    Parameters
    ----------
    grid : Grid
        Flower's way to the nodes.
    options : LoopOptions
        How many nodes to wait for, and how long.
    timeout : float
        Host seconds to wait for one answer.
    seconds, largest, repeats
        As for `flower_adsp.network.probe.measure_link`.

    Returns
    -------
    list[Probed]
        By partition id; a node that does not answer is left out, with a warning.

    Raises
    ------
    NodeCountError
        If too few nodes appear in time.
    """
    inbox = Inbox(grid)
    draws = np.random.default_rng(options.seed)
    probed = []
    for worker in enlist(grid, inbox, options, timeout):

        def round_trip(down: int, up: int, worker: Worker = worker) -> float:
            # Random, since Flower sends what it has sent before only once.
            query = encode_payload(worker.node_id, draws.bytes(down), up)
            began = time.monotonic()
            message_id = inbox.push(query)
            reply = None if message_id is None else inbox.wait(message_id, timeout)
            if reply is None:
                raise RefusedMessage("timeout", f"no answer within {timeout:g} s")
            took = time.monotonic() - began
            check_payload(reply, up)
            return took

        try:
            link = measure_link(round_trip, seconds, largest, repeats)
        except RefusedMessage as error:
            log(WARNING, "worker %d is left out: %s", worker.id, error)
            continue
        profile = replace(
            worker.profile,
            up_mbps=link.up_mbps,
            down_mbps=link.down_mbps,
            latency_s=link.round_trip_s / 2,
        )
        probed.append(Probed(worker.id, profile, link))
        log(INFO, "%s", describe(probed[-1]))
    return probed


def describe(probed: Probed) -> str:
    """Return a line that says what was found."""
    link = probed.link
    up, down = (">= " if least else "" for least in (link.up_is_least, link.down_is_least))
    return (
        f"worker {probed.worker} ({probed.profile.name}): up {up}{link.up_mbps:.3g} Mbit/s, "
        f"down {down}{link.down_mbps:.3g} Mbit/s, empty round trip {link.round_trip_s:.2f} s"
    )
