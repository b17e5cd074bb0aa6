"""The online search for the commit rate: as published, and one that starts near the optimum.

Algorithm 1 of Hu, Wang and Wu, "Distributed Machine Learning through Heterogeneous Edge Systems",
AAAI 2020, https://arxiv.org/abs/1911.06949.
"""

from collections.abc import Mapping
from math import sqrt
from typing import Any

from flower_adsp.errors import require


class CommitRateSearch:
    """Finds the commit rate on the live model, one candidate a window, upwards from 1.

    At the beginning of each epoch r = 1 and r = 2 are tried, each for one window; while the later
    one has the larger reward, the next is tried; at the first that has not, the one before is
    kept until the epoch ends. Nothing is rolled back and nobody waits.

    Parameters
    ----------
    epoch_windows : int (default: 20)
        Windows from one search to the next: 20 min in windows of 60 s.
    reevaluate : bool (default: False)
        Whether a candidate that was better is tried once more before the next one, as a literal
        reading of the recursion in Algorithm 1 has it. The authors' released code does not.
    loss_jump : float | None (default: None)
        Search anew when the loss at a window's end is above that at the window's start by more
        than this fraction. The authors' released code has 0.3; the paper does not mention it.

    Attributes
    ----------
    rate : int
        The rate to use now: the candidate on trial, or the one that was found.
    is_searching : bool
        Whether a candidate is on trial.
    """

    def __init__(
        self, epoch_windows: int = 20, reevaluate: bool = False, loss_jump: float | None = None
    ) -> None:
        require(epoch_windows >= 3, "epoch_windows", epoch_windows, "at least 3 windows")
        require(loss_jump is None or loss_jump > 0, "loss_jump", loss_jump, "None or above 0")
        self.epoch_windows = epoch_windows
        self.reevaluate = reevaluate
        self.loss_jump = loss_jump
        self._begin()

    def _begin(self) -> None:
        self.rate = 1
        self.is_searching = True
        self._reference: float | None = None  # reward of the candidate before, or to be measured
        self._windows = 0

    def end_window(self, reward: float, loss_change: float = 0.0) -> None:
        """Decide what the next window uses.

        Parameters
        ----------
        reward : float
            Reward of the window that ends; NaN counts as no improvement.
        loss_change : float (default: 0.0)
            Change of the loss over the window, as a fraction of that at its start.
        """
        self._windows += 1
        if self.is_searching:
            self._judge(reward)
        elif self.loss_jump is not None and loss_change > self.loss_jump:
            self._begin()
        if self._windows >= self.epoch_windows:
            self._begin()

    def _judge(self, reward: float) -> None:
        if self._reference is None:
            self._reference = reward
            self.rate += 1
        elif reward > self._reference:
            if self.reevaluate:
                self._reference = None
            else:
                self._reference = reward
                self.rate += 1
        else:
            self.rate -= 1
            self.is_searching = False

    def state_dict(self) -> dict[str, Any]:
        """Return where the search stands, as plain data."""
        return {
            "rate": self.rate,
            "is_searching": self.is_searching,
            "reference": self._reference,
            "windows": self._windows,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.rate = int(state["rate"])
        self.is_searching = bool(state["is_searching"])
        self._reference = state["reference"]
        self._windows = int(state["windows"])


def balanced_rate(check_period: float, overhead: float, drift: float) -> int:
    """Return the rate r = √(drift · Γ/O), rounded and at least 1.

    A commit costs O of training, so that the part O·r/Γ of the time is lost; what workers drift
    apart between commits costs the more the fewer they are, drift/r. The sum of both is least here.

    Parameters
    ----------
    check_period : float
        Γ, seconds.
    overhead : float
        O, seconds that a commit takes; where it is 0 one microsecond is taken.
    drift : float
        The part of the time that workers lose with one commit a check period.
    """
    return max(1, round(sqrt(drift * check_period / max(overhead, 1e-6))))


class GuardedSearch:
    """Climbs from a rate that should be near the optimum, and only on clear evidence.

    Not published. Windows while the loss falls from where it began to half of it tell little of
    what follows, so none is judged. Then the reward of a window is the reference; twice the rate is
    tried, and twice that, as long as the reward is better than the last by the factor `gain`; if
    the first was not, half the rate, and so on down. Then the best is kept until the run ends.

    Parameters
    ----------
    rate : int
        To begin with.
    gain : float (default: 1.2)
        Least factor between the rewards of a rate and of the next that is better.
    guard : float (default: 0.5)
        Part of the first loss at which the judging begins.

    Attributes
    ----------
    rate : int
        The rate to use now: the candidate on trial, or the best so far.
    """

    def __init__(self, rate: int = 1, gain: float = 1.2, guard: float = 0.5) -> None:
        require(rate >= 1, "rate", rate, "at least 1 commit a check period")
        require(gain >= 1, "gain", gain, "at least 1")
        require(0 < guard <= 1, "guard", guard, "above 0, to 1")
        self.rate = self._best = rate
        self.gain = gain
        self.guard = guard
        self._phase = "guarded"
        self._has_moved = False
        self._reference = 0.0  # reward of the best so far

    @property
    def is_searching(self) -> bool:
        """Tell whether a candidate is on trial."""
        return self._phase in ("up", "down")

    def end_window(self, reward: float, level: float) -> None:
        """Decide what the next window uses.

        Parameters
        ----------
        reward : float
            Reward of the window that ends; NaN counts as no improvement.
        level : float
            The loss at the window's end, as a part of the run's first.
        """
        if self._phase == "guarded":
            if level <= self.guard:
                self._phase = "reference"
        elif self._phase == "reference":
            self._reference = reward
            self._go("up")
        elif self.is_searching:
            if reward > self._reference + (self.gain - 1) * abs(self._reference):
                self._reference, self._best, self._has_moved = reward, self.rate, True
                self._go(self._phase)
            else:
                self._go("down" if self._phase == "up" and not self._has_moved else "over")

    def _go(self, phase: str) -> None:
        """Go on to the next candidate, or to the best where there is none."""
        candidate = {"up": 2 * self._best, "down": self._best // 2}.get(phase, 0)
        self._phase = phase if candidate else "over"
        self.rate = candidate or self._best

    def state_dict(self) -> dict[str, Any]:
        """Return where the search stands, as plain data."""
        return {
            "rate": self.rate,
            "best": self._best,
            "phase": self._phase,
            "has_moved": self._has_moved,
            "reference": self._reference,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.rate, self._best = int(state["rate"]), int(state["best"])
        self._phase, self._has_moved = state["phase"], bool(state["has_moved"])
        self._reference = float(state["reference"])
