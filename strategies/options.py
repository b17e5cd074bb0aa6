"""Options of the event loop, the same for all strategies."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from flower_adsp.devices import DeviceProfile
from flower_adsp.errors import require, unknown
from flower_adsp.network import Network
from flower_adsp.sparse.plan import LayerPlanner
from flower_adsp.tracking.base import Callback

CLOCKS = ("virtual", "wall")
WEIGHTINGS = ("equal", "examples")


@dataclass(frozen=True)
class LoopOptions:
    """How the event loop runs, whatever the strategy.

    Parameters
    ----------
    clock : str (default: "virtual")
        ``virtual`` simulates time from the devices' profiles; ``wall`` is real time.
    seed : int (default: 0)
        Seed of the jitter of virtual devices.
    network : Network (default: Network())
        How long transfers take in virtual time.
    weighting : str (default: "equal")
        What a commit weighs: ``equal``, or ``examples`` for the examples in its partition.
    evaluate_every : float | None (default: None)
        Seconds of the clock between evaluations; None evaluates once an index.
    max_seconds : float | None (default: None)
        Time of the clock at which to stop.
    target_loss : float | None (default: None)
        Stop when the evaluated loss, averaged over the trailing `smoothing_seconds`, is at or
        below this.
    smoothing_seconds : float (default: 60.0)
        Window of that average.
    min_available_nodes : int (default: 2)
        Nodes to wait for.
    node_timeout : float (default: 60.0)
        Host seconds to wait for them, counted from when the latest one appeared.
    stock_profiles : Sequence[DeviceProfile] (default: one default profile)
        Profiles of nodes whose ClientApp cannot say its capability, in turn.
    planner : LayerPlanner | None (default: None)
        Plans which worker trains which layers; None lets all train all.
    callbacks : Sequence[Callback] (default: ())
        What follows the run.
    arrayrecord_key : str (default: "arrays")
        Key of the ArrayRecord in messages to nodes.
    configrecord_key : str (default: "config")
        Key of the ConfigRecord in messages to nodes.
    weighted_by_key : str (default: "num-examples")
        Key of the number of examples in the replies of stock ClientApps.
    """

    clock: str = "virtual"
    seed: int = 0
    network: Network = field(default_factory=Network)
    weighting: str = "equal"
    evaluate_every: float | None = None
    max_seconds: float | None = None
    target_loss: float | None = None
    smoothing_seconds: float = 60.0
    min_available_nodes: int = 2
    node_timeout: float = 60.0
    stock_profiles: Sequence[DeviceProfile] = (DeviceProfile(),)
    planner: LayerPlanner | None = None
    callbacks: Sequence[Callback] = ()
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    weighted_by_key: str = "num-examples"

    def __post_init__(self) -> None:
        """Check the options."""
        if self.clock not in CLOCKS:
            raise unknown("clock", self.clock, CLOCKS)
        if self.weighting not in WEIGHTINGS:
            raise unknown("weighting", self.weighting, WEIGHTINGS)
        for key in ("evaluate_every", "max_seconds"):
            value = getattr(self, key)
            require(value is None or value > 0, key, value, "None or above 0")
        for key in ("smoothing_seconds", "min_available_nodes", "node_timeout"):
            require(getattr(self, key) > 0, key, getattr(self, key), "above 0")
        require(len(self.stock_profiles) > 0, "stock_profiles", (), "not empty")
