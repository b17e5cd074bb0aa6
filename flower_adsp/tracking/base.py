"""The interface of callbacks."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flower_adsp.strategies.state import FederationState

Record = Mapping[str, Any]


class Callback:
    """Something that follows a run; each method does nothing unless overridden.

    A record has ``event`` (``start``, ``commit``, ``refused``, ``evaluation``, ``checkpoint``,
    ``plan``, ``end``; of a worker ``joined``, ``away``, ``back``, ``resting``, ``rested``) and
    ``t``, seconds of the run's clock; in virtual time it holds nothing that depends on the host.
    """

    def on_event(self, record: Record, state: "FederationState") -> None:
        """Take note of what has just happened."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""

    def on_close(self) -> None:
        """Let go of files and the like, also after an error."""
