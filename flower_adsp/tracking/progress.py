"""One line each time the model is evaluated."""

from logging import INFO
from typing import TYPE_CHECKING

from flwr.common.logger import log

from flower_adsp.tracking.base import Callback, Record

if TYPE_CHECKING:
    from flower_adsp.strategies.state import FederationState


def computing_share(state: "FederationState") -> float:
    """Return the mean share of time that the devices have spent training so far."""
    if state.now == 0:
        return 0.0
    shares = [worker.spent(state.now)[0] / state.now for worker in state.workers.values()]
    return sum(shares) / len(shares)


class Progress(Callback):
    """Logs time, commits, loss, accuracy and the share of time that devices spent computing."""

    def on_event(self, record: Record, state: "FederationState") -> None:
        """Log a line at an evaluation, and a warning for a refused commit."""
        if record["event"] == "evaluation":
            figures = "".join(
                f"{key} {record[key]:7.4f}   " for key in ("loss", "accuracy") if key in record
            )
            log(
                INFO,
                "t = %7.1f s   commits %6d   %scomputing %5.1f %%",
                record["t"],
                record["commits"],
                figures,
                100 * computing_share(state),
            )
        elif record["event"] == "refused":
            log(
                INFO,
                "t = %7.1f s   refused a commit of worker %d: %s: %s",
                record["t"],
                record["worker"],
                record["kind"],
                record["detail"],
            )
