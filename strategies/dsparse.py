"""DSparse: each device trains the layers that fit its memory; all are trained by someone.

Peng, Sun, Zhang and Wang, "DSparse: A Distributed Training Method for Edge Clusters Based on Sparse
Update", JCST 40(3), 2025, https://doi.org/10.1007/s11390-025-4821-5.
"""

from flower_adsp.strategies.bsp import Bsp
from flower_adsp.strategies.options import LoopOptions

from flower_adsp.errors import require
from flower_adsp.sparse.plan import LayerPlanner


class DSparse(Bsp):
    """Synchronous training of the layers that fit.

    Each device takes `local_steps` steps on the units that the layer plan gives it; at the barrier
    each slice of a parameter moves by the mean of its updates over those that trained it. From the
    paper are: each device trains the most critical layers and channels that its memory allows, and
    parameters are aggregated by groups, among those that trained them and to those that did not.
    How the paper chooses layers, whether it covers all, and how often it synchronises, could not be
    found; see `flower_adsp.sparse.planner` for what is done here. The same plan works under every
    other strategy of this package.

    Parameters
    ----------
    local_steps : int (default: 10)
        τ, steps of each worker between barriers.
    loop : LoopOptions | None (default: None)
        Options of the event loop.
    plan : LayerPlanner | None (default: None)
        Plans which worker trains which layers; it is needed, unless the options have a planner.
    """

    def __init__(
        self,
        local_steps: int = 10,
        loop: LoopOptions | None = None,
        plan: LayerPlanner | None = None,
    ) -> None:
        super().__init__(local_steps, loop, plan)
        require(
            self.loop.planner is not None,
            "plan",
            None,
            "given: DSparse needs a layer plan, such as plan = 'dsparse'",
        )
