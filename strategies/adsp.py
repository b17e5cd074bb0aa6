"""ADSP: each device commits on its own timer, and all commit equally often.

Hu, Wang and Wu, "Distributed Machine Learning through Heterogeneous Edge Systems", AAAI 2020,
https://arxiv.org/abs/1911.06949.
"""

from collections.abc import Mapping, Sequence
from logging import WARNING
from typing import Any, cast

import numpy as np
from flower_adsp.strategies.base import CommitStrategy
from flower_adsp.strategies.commit_rate import CommitRateSearch, GuardedSearch
from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.reward import loss_ratio, reward_as_published, robust_reward
from flower_adsp.strategies.state import FederationState, Work, Worker
from flwr.app import MetricRecord
from flwr.common.logger import log

from flower_adsp.arrays import Weights, add_scaled
from flower_adsp.errors import require, unknown
from flower_adsp.messages import Commit
from flower_adsp.sparse.plan import LayerPlanner

REWARDS = ("published", "robust")


def commits_due(commit_target: int, commits: int) -> int:
    """Return ΔC_i = max(1, C_target − c_i), the commits a worker owes in the check period."""
    return max(1, commit_target - commits)


def commit_timer(check_period: float, due: int, overhead: float) -> float:
    """Return the seconds a worker trains between commits, Γ/ΔC_i − O_i, at least 0."""
    return max(0.0, check_period / due - overhead)


class Adsp(CommitStrategy):
    """Adaptive synchronous parallel, with a commit rate that is given or searched online.

    No worker waits for another. Worker i trains for Γ/ΔC_i − O_i seconds, commits its accumulated
    update U_i, and gets the new model at once; the server does W ← W + η·δ with δ = −U_i. At each
    checkpoint C_target grows by the commit rate and ΔC_i = C_target − c_i is set anew, so that a
    worker that fell behind gets a shorter timer; it hears of it with its next assignment.

    Parameters
    ----------
    check_period : float (default: 60.0)
        Γ, seconds between checkpoints; also the length of a window of the search.
    commit_rate : int | None (default: 4)
        Commits of each worker in a check period; None searches for it (`CommitRateSearch`), which
        needs the loss from the server's evaluation, at least every Γ/2.
    server_learning_rate : float | None (default: None)
        η. None is the published 1/M, or the share of examples where commits weigh by them.
    server_momentum : float (default: 0.0)
        μ of V ← μV + η·δ, W ← W + V. Zero as published; ADSP++ searches for it offline.
    catch_up : bool (default: True)
        Whether ΔC_i follows from c_i. If not, it is the commit rate for all, as in the authors'
        released code.
    timer_floor : float (default: 0.0)
        Least seconds of a timer. Zero as published; the authors' released code has 10.
    reward : str (default: "published")
        What the search compares: ``published`` or ``robust``; both are in the history.
    reward_target : float | None (default: None)
        ℓ* of the reward; None takes the loss at which the run is to stop.
    epoch : float (default: 1200.0)
        Seconds from one search to the next.
    reevaluate : bool (default: False)
        As for `CommitRateSearch`.
    loss_jump : float | None (default: None)
        As for `CommitRateSearch`.
    loop : LoopOptions | None (default: None)
        Options of the event loop.
    plan : LayerPlanner | None (default: None)
        Plans which worker trains which layers; in place of the options' `planner`.
    """

    has_aim = True  # whether a search needs to know the loss that it aims at
    stored: tuple[str, ...] = (
        "commit_target",
        "due",
        "rewards",
        "velocity",
        "reward_target",
        "_samples",
    )

    def __init__(
        self,
        check_period: float = 60.0,
        commit_rate: int | None = 4,
        server_learning_rate: float | None = None,
        server_momentum: float = 0.0,
        catch_up: bool = True,
        timer_floor: float = 0.0,
        reward: str = "published",
        reward_target: float | None = None,
        epoch: float = 1200.0,
        reevaluate: bool = False,
        loss_jump: float | None = None,
        loop: LoopOptions | None = None,
        plan: LayerPlanner | None = None,
    ) -> None:
        super().__init__(loop, plan)
        require(check_period > 0, "check_period", check_period, "above 0 seconds")
        require(
            commit_rate is None or commit_rate >= 1,
            "commit_rate",
            commit_rate,
            "at least 1 commit a check period, or None to search for it",
        )
        require(timer_floor >= 0, "timer_floor", timer_floor, "at least 0 seconds")
        require(
            server_learning_rate is None or server_learning_rate > 0,
            "server_learning_rate",
            server_learning_rate,
            "None or above 0",
        )
        require(0 <= server_momentum < 1, "server_momentum", server_momentum, "from 0 to below 1")
        require(epoch >= 3 * check_period, "epoch", epoch, "at least three check periods")
        if reward not in REWARDS:
            raise unknown("reward", reward, REWARDS)
        self.check_period: float = check_period
        self.commit_rate = commit_rate
        self.server_learning_rate = server_learning_rate
        self.server_momentum = server_momentum
        self.catch_up = catch_up
        self.timer_floor = timer_floor
        self.reward = reward
        self.reward_target = reward_target
        self.search: CommitRateSearch | GuardedSearch | None = (
            CommitRateSearch(round(epoch / check_period), reevaluate, loss_jump)
            if commit_rate is None
            else None
        )
        self.commit_target = 0
        self.due: dict[int, int] = {}
        self.rewards: dict[str, float] = {}
        self.velocity: Weights = {}
        self._samples: list[tuple[float, float]] = []

    @property
    def rate(self) -> int:
        """Return the commits of each worker in the present check period."""
        if self.search is not None:
            return self.search.rate
        assert self.commit_rate is not None
        return self.commit_rate

    def begin(self) -> None:
        """Set the first target, and say which workers cannot keep up with it."""
        if self.search is not None:
            self._check_search()
        self.velocity = {}
        self.commit_target = self.rate
        self._set_due()
        if self.loop.clock == "virtual":
            self._warn_of_slow_workers()

    def least_period(self, worker: Worker) -> float:
        """Return 2·(1/v_i + O_i): with fewer seconds from commit to commit it cannot keep up."""
        return 2 * (1 / worker.speed + worker.overhead_seconds)

    def _warn_of_slow_workers(self) -> None:
        slow: dict[tuple[str, float], list[int]] = {}
        for worker in self.state.workers.values():
            needed = self.least_period(worker)
            if self.check_period / self.rate < needed:
                slow.setdefault((worker.profile.name, needed), []).append(worker.id)
        for (name, needed), ids in slow.items():
            log(
                WARNING,
                "%s (workers %s) cannot keep up: Γ/r = %.2f s from commit to commit is less than "
                "the %.2f s of two steps and commits; lower strategy.commit_rate (r) or raise "
                "strategy.check_period (Γ)",
                name,
                ", ".join(map(str, ids)),
                self.check_period / self.rate,
                needed,
            )

    def _check_search(self) -> None:
        if self.reward_target is None:
            self.reward_target = self.loop.target_loss
        require(
            self.reward_target is not None or not self.has_aim,
            "reward_target",
            None,
            "the loss that the search aims at, unless the run's target_loss is given",
        )
        every = self.loop.evaluate_every
        require(
            self.state.is_evaluated and every is not None and every <= self.check_period / 2,
            "evaluate_every",
            every,
            "at most half a check period, with an evaluate_fn, to search for the commit rate",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds, the search included."""
        search = {} if self.search is None else {"search": self.search.state_dict()}
        return super().state_dict() | search

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        super().load_state_dict(state)
        if self.search is not None:
            self.search.load_state_dict(state["search"])

    def _set_due(self) -> None:
        for worker in self.state.workers.values():
            self.due[worker.id] = (
                commits_due(self.commit_target, worker.count) if self.catch_up else self.rate
            )

    def returned(self, worker: Worker) -> None:
        """Let c_i be at least the lowest count of those who were there."""
        others = [other.count for other in self.state.present if other is not worker]
        worker.counted_before += max(0, min(others, default=0) - worker.count)
        self.due[worker.id] = (
            commits_due(self.commit_target, worker.count) if self.catch_up else self.rate
        )

    def assign(self, worker: Worker) -> Work:
        """Train until the timer runs out."""
        timer = commit_timer(self.check_period, self.due[worker.id], worker.overhead_seconds)
        return Work(seconds=max(self.timer_floor, timer))

    def apply(self, worker: Worker, commit: Commit) -> bool:
        """Do W ← W + η·δ at once, or V ← μV + η·δ and W ← W + V."""
        rate = step_size(self.state, worker, commit, self.server_learning_rate)
        self.state.mix_in(commit, rate)
        scaled = self.state.per_trainer(commit)
        if not self.server_momentum:
            add_scaled(self.state.model, scaled, rate)
            return True
        for name, update in scaled.items():
            kind = update.dtype.type
            velocity = self.velocity.setdefault(name, np.zeros_like(update))
            velocity *= kind(self.server_momentum)
            velocity += kind(rate) * update
            self.state.model[name] += velocity
        return True

    def evaluated(self, metrics: MetricRecord) -> None:
        """Keep the loss for the reward."""
        if self.search is not None:
            self._samples.append((self.state.seconds, float(cast(float, metrics["loss"]))))

    def checkpoint(self) -> None:
        """Let the target grow by the commit rate, or begin the next window of the search."""
        if self.search is not None:
            self._end_window(*zip(*self._samples, strict=True))
            self._samples = self._samples[-1:]  # the next begins with the last sample of this one
        if self.search is not None and self.search.is_searching:
            counts = [worker.count for worker in self.state.present]
            self.commit_target = max(counts) + self.rate
        else:
            self.commit_target += self.rate
        self._set_due()

    def _end_window(self, times: Sequence[float], losses: Sequence[float]) -> None:
        assert self.reward_target is not None
        assert isinstance(self.search, CommitRateSearch)
        self.rewards = {
            "published": reward_as_published(times, losses, self.reward_target),
            "robust": robust_reward(times, losses, self.reward_target),
        }
        self.search.end_window(self.rewards[self.reward], loss_ratio(losses, losses[0]) - 1)

    def status(self) -> dict[str, float | int | list[int]]:
        """Return C_target, each worker's ΔC_i, and where the search stands."""
        status: dict[str, float | int | list[int]] = {
            "commit_target": self.commit_target,
            "commits_due": [self.due[id_] for id_ in sorted(self.due)],
        }
        if self.search is not None:
            status |= {f"{name}_reward": value for name, value in self.rewards.items()}
            status |= {"commit_rate": self.rate, "is_searching": int(self.search.is_searching)}
        return status

    def describe(self) -> dict[str, object]:
        """Return the settings by name."""
        settings: dict[str, object] = {
            "check_period": self.check_period,
            "commit_rate": self.commit_rate or "searched",
            "server_learning_rate": self.server_learning_rate or "1/M",
            "server_momentum": self.server_momentum,
            "catch_up": self.catch_up,
            "timer_floor": self.timer_floor,
        }
        if isinstance(self.search, CommitRateSearch):
            settings |= {"reward": self.reward, "reward_target": self.reward_target}
        return settings


def step_size(state: FederationState, worker: Worker, commit: Commit, given: float | None) -> float:
    """Return η for an asynchronous commit: as given, or the worker's share of a full round."""
    return state.share(worker, commit.num_examples) if given is None else given
