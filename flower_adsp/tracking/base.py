"""The interface of callbacks."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flower_adsp.strategies.state import FederationState

Record = Mapping[str, Any]


class Callback:
    """Something that follows a run; each method does nothing unless overridden.

    A record has ``event`` (``start``, ``commit``, ``refused``, ``evaluation``, ``checkpoint`` or
    ``end``) and ``t``, seconds of the run's clock; it holds nothing that depends on the host.
    """

    def on_event(self, record: Record, state: "FederationState") -> None:
        """Take note of what has just happened."""

    def on_close(self) -> None:
        """Let go of files and the like, also after an error."""
