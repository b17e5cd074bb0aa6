"""The base class of the strategies that run on the event loop."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from logging import INFO
from typing import Any, NoReturn

from flower_adsp.strategies.options import LoopOptions
from flower_adsp.strategies.state import FederationState, Work, Worker
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.serverapp.strategy.strategy_utils import log_strategy_start_info

from flower_adsp.errors import require
from flower_adsp.messages import Commit
from flower_adsp.sparse.plan import LayerPlanner


class CommitStrategy(Strategy):
    """A strategy made of three answers: what next, may it start, what does a commit do.

    It takes the place of one of Flower's strategies by one line: `start` has the same signature
    and returns the same kind of result. What differs is that its messages are assignments and
    commits, and that it keeps time.

    Parameters
    ----------
    loop : LoopOptions | None (default: None)
        Clock, network, ends and evaluation; None for the defaults.
    plan : LayerPlanner | None (default: None)
        Plans which worker trains which layers; in place of the options' `planner`.

    Attributes
    ----------
    check_period : float | None
        Γ, seconds between checkpoints, by which `num_rounds` counts; None if it counts barriers.
    state : FederationState
        The model and the workers, from `start` on.
    has_barriers : bool
        Whether all wait for each other, so that their commits may travel as a collective.
    has_groups : bool
        Whether workers form groups, in each of which they may exchange in a ring.
    needs_start : bool
        Whether `apply` wants the model that a commit started from.
    stored : tuple[str, ...]
        Names of the attributes that change during a run, which a checkpoint holds.
    stored_kinds : tuple[type, ...]
        Dataclasses in them, beside those of the event loop.
    """

    check_period: float | None = None
    has_barriers: bool = False
    has_groups: bool = False
    needs_start: bool = False
    stored: tuple[str, ...] = ()
    stored_kinds: tuple[type, ...] = ()

    def __init__(self, loop: LoopOptions | None = None, plan: LayerPlanner | None = None) -> None:
        options = loop or LoopOptions()
        require(
            plan is None or options.planner is None, "plan", plan, "None where loop has a planner"
        )
        self.loop = options if plan is None else replace(options, planner=plan)
        self.state: FederationState

    # --------------------------------------------------------------------------- the questions

    def begin(self) -> None:
        """Prepare for a run; `state` is set."""

    @abstractmethod
    def assign(self, worker: Worker) -> Work:
        """Say what a worker does next."""

    def may_start(self, worker: Worker) -> bool:
        """Say whether a worker without an assignment may get its next one now."""
        return True

    def model_for(self, worker: Worker) -> ArrayRecord:
        """Return the model that a worker gets with its next assignment."""
        return self.state.encoded()

    @abstractmethod
    def apply(self, worker: Worker, commit: Commit) -> bool:
        """Take a commit in; return whether the model changed."""

    def refuse(self, worker: Worker) -> bool:
        """Go on without the commit of a worker that was refused; return as `apply`."""
        return False

    def left(self, worker: Worker) -> bool:
        """Take note that a worker is away, or rests; return as `apply`."""
        return False

    def returned(self, worker: Worker) -> None:
        """Take note that a worker is back that was away."""

    def joined(self, worker: Worker) -> None:
        """Take note that a worker takes part that was not there when the run began."""
        self.returned(worker)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the strategy."""
        return {name: getattr(self, name) for name in self.stored}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken; `begin` is not called."""
        for name in self.stored:
            setattr(self, name, state[name])

    def alarm(self, subject: int) -> bool:
        """Do what is due at an alarm put into `state.alarms`; return as `apply`."""
        return False

    def evaluated(self, metrics: MetricRecord) -> None:
        """Take note of the metrics of the model as it is now."""

    def checkpoint(self) -> None:
        """Do what is due at the end of a check period; `state.index` is its number."""

    def status(self) -> dict[str, float | int | list[int]]:
        """Return numbers of the strategy's own for the history, at a checkpoint."""
        return {}

    def describe(self) -> dict[str, object]:
        """Return the strategy's settings by name, for `summary`."""
        return {}

    # ----------------------------------------------------------------------- Flower's interface

    def summary(self) -> None:
        """Log the settings of the strategy."""
        log(INFO, "\t├──> %s:", type(self).__name__)
        for name, value in self.describe().items():
            log(INFO, "\t│\t├── %s: %s", name, value)
        log(INFO, "\t└──> Event loop:")
        for name in ("clock", "weighting", "evaluate_every", "max_seconds", "target_loss"):
            log(INFO, "\t\t├── %s: %s", name, getattr(self.loop, name))
        log(INFO, "\t\t└── min_available_nodes: %s", self.loop.min_available_nodes)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the strategy.

        Parameters
        ----------
        grid : Grid
            The grid that reaches the nodes.
        initial_arrays : ArrayRecord
            The initial model.
        num_rounds : int (default: 3)
            Check periods, or barriers where `check_period` is None.
        timeout : float (default: 3600)
            Host seconds to wait for the answer to one assignment.
        train_config : ConfigRecord, optional
            ``lr`` is the local learning rate (default: 0.01) and ``lr-half-life`` the seconds
            after which it has halved; other keys are passed on.
        evaluate_config : ConfigRecord, optional
            Not used: the model is evaluated at the server.
        evaluate_fn : Callable[[int, ArrayRecord], Optional[MetricRecord]], optional
            Evaluates the model at the server; gets the index of the check period or barrier.

        Returns
        -------
        Result
            The final model, and the metrics by index.
        """
        from flower_adsp.strategies.loop import EventLoop

        log(INFO, "Starting %s strategy:", type(self).__name__)
        log_strategy_start_info(num_rounds, initial_arrays, train_config, evaluate_config)
        self.summary()
        log(INFO, "")
        return EventLoop(self, grid, timeout, train_config, evaluate_fn).run(
            initial_arrays, num_rounds
        )

    def _has_no_rounds(self) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} has no separate rounds of messages that could be wrapped; "
            "call its start()"
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refuse: the event loop sends each worker its own assignment."""
        self._has_no_rounds()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refuse: the event loop takes in each commit by itself."""
        self._has_no_rounds()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refuse: the model is evaluated at the server."""
        self._has_no_rounds()

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Refuse: the model is evaluated at the server."""
        self._has_no_rounds()
