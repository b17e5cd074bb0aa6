"""ADSP whose search for the commit rate starts near the optimum."""

from collections.abc import Sequence
from statistics import fmean

from flower_adsp.strategies.adsp import Adsp
from flower_adsp.strategies.commit_rate import GuardedSearch, balanced_rate
from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.reward import loss_ratio, slope_reward

from flower_adsp.errors import require
from flower_adsp.sparse.plan import LayerPlanner


class AdspGuarded(Adsp):
    """ADSP with a commit rate from Γ and O, which a guarded search corrects.

    Not published. Algorithm 1 tries 1, 2, 3 … commits a check period, and on a short run much of
    the time goes by before a good rate is reached. This begins with √(drift · Γ/O), O being the
    mean over the workers (`balanced_rate`), and leaves it only where twice or half the rate is
    clearly better (`GuardedSearch`), by the slope of 1/ℓ (`slope_reward`). Commits, timers and
    targets are those of `Adsp`.

    Parameters
    ----------
    check_period : float (default: 60.0)
        Γ, seconds between checkpoints; also the length of a window of the search.
    drift : float (default: 0.8)
        The part of the time that workers lose with one commit a check period, for drifting apart.
        More with a larger learning rate.
    gain, guard : float (default: 1.2, 0.5)
        As for `GuardedSearch`.
    server_learning_rate, server_momentum, catch_up, timer_floor
        As for `Adsp`.
    loop, plan
        As for `Adsp`.
    """

    has_aim = False
    stored: tuple[str, ...] = (*Adsp.stored, "first_loss")

    def __init__(
        self,
        check_period: float = 60.0,
        drift: float = 0.8,
        gain: float = 1.2,
        guard: float = 0.5,
        server_learning_rate: float | None = None,
        server_momentum: float = 0.0,
        catch_up: bool = True,
        timer_floor: float = 0.0,
        loop: LoopOptions | None = None,
        plan: LayerPlanner | None = None,
    ) -> None:
        super().__init__(
            check_period,
            1,
            server_learning_rate,
            server_momentum,
            catch_up,
            timer_floor,
            loop=loop,
            plan=plan,
        )
        require(drift > 0, "drift", drift, "above 0")
        self.drift = drift
        self.gain = gain
        self.guard = guard
        self.search = GuardedSearch(1, gain, guard)
        self.first_loss: float | None = None

    def begin(self) -> None:
        """Choose the rate to begin with."""
        overheads = [worker.overhead_seconds for worker in self.state.workers.values()]
        rate = balanced_rate(self.check_period, fmean(overheads), self.drift)
        self.search = GuardedSearch(rate, self.gain, self.guard)
        super().begin()

    def _end_window(self, times: Sequence[float], losses: Sequence[float]) -> None:
        assert isinstance(self.search, GuardedSearch)
        if self.first_loss is None:
            self.first_loss = losses[0]
        self.rewards = {"slope": slope_reward(times, losses)}
        self.search.end_window(self.rewards["slope"], loss_ratio(losses, self.first_loss))

    def describe(self) -> dict[str, object]:
        """Return the settings by name."""
        own = {"drift": self.drift, "gain": self.gain, "guard": self.guard}
        return super().describe() | {"commit_rate": "from Γ and O, then searched"} | own
