"""Options of the event loop, the same for all strategies."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flower_adsp.devices import DeviceProfile
from flower_adsp.errors import require, unknown
from flower_adsp.network import Network
from flower_adsp.network.slices import WHOLE
from flower_adsp.sparse.plan import LayerPlanner
from flower_adsp.tracking.base import Callback

if TYPE_CHECKING:
    from flower_adsp.sparse.profile import LayerCost

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
    layers : Sequence[LayerCost] (default: ())
        The model's layers and what they cost, where the network's schedule sends slices
        (`flower_adsp.sparse.profile.layer_costs`).
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
    checkpoint : Path | None (default: None)
        The file to save the run to, so that it can be resumed; None does not save it.
    save_every : int (default: 1)
        Check periods, or barriers, after which to save it; it is saved at its end too.
    resume : Path | None (default: None)
        The checkpoint of the run to go on with, by the same strategy, options and devices. What
        was under way is done again.
    deadline_factor : float | None (default: 3.0)
        An assignment is given up after so many times the time that it should take, in real time
        after 30 s at the earliest; None waits for `timeout`.
    failures_before_rest : int (default: 3)
        Failures in a row after which a device gets nothing to do for as long as its assignment
        should have taken, and twice as long after each further one, up to 16 times.
    norm_limit : float | None (default: None)
        Refuse an update whose Euclidean norm, divided by its steps, is above so many times the
        median of the latest 32, and the first few if they are larger than the model itself; None
        takes all.
    look_every : float (default: 5.0)
        Seconds of real time between two looks for nodes that come or go.
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
    layers: Sequence["LayerCost"] = ()
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
    checkpoint: Path | None = None
    save_every: int = 1
    resume: Path | None = None
    deadline_factor: float | None = 3.0
    failures_before_rest: int = 3
    norm_limit: float | None = None
    look_every: float = 5.0
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
        for key in ("smoothing_seconds", "min_available_nodes", "node_timeout", "look_every"):
            require(getattr(self, key) > 0, key, getattr(self, key), "above 0")
        for key in ("save_every", "failures_before_rest"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        for key in ("deadline_factor", "norm_limit"):
            value = getattr(self, key)
            require(value is None or value > 1, key, value, "None or above 1")
        require(
            self.network.schedule == WHOLE or self.clock == "virtual",
            "network.schedule",
            self.network.schedule,
            f"{WHOLE!r} in real time, where Flower delivers whole messages",
        )
        require(
            self.network.schedule == WHOLE or len(self.layers) > 0,
            "layers",
            self.layers,
            f"not empty with the network schedule {self.network.schedule!r}",
        )
        require(len(self.stock_profiles) > 0, "stock_profiles", (), "not empty")
