"""The online search for the commit rate.

Algorithm 1 of Hu, Wang and Wu, "Distributed Machine Learning through Heterogeneous Edge Systems",
AAAI 2020, https://arxiv.org/abs/1911.06949.
"""

from collections.abc import Mapping
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
