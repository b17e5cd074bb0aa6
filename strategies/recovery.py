"""What of a run a checkpoint holds, and how a run goes on from it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flower_adsp.strategies.base import CommitStrategy
from flower_adsp.strategies.state import Flight, Work, Worker

from flower_adsp.clock import Event, EventKind
from flower_adsp.devices import DeviceProfile, Presence
from flower_adsp.errors import ConfigError, require
from flower_adsp.messages import Assignment, Commit
from flower_adsp.network.sharing import Transfer
from flower_adsp.sparse.plan import LayerPlan, WorkerPlan
from flower_adsp.sparse.portions import Portion, Slice
from flower_adsp.sparse.units import Unit

if TYPE_CHECKING:
    from flower_adsp.strategies.loop import EventLoop

_STORED = (
    "_num_assignments", "_commits_at_statistics", "_evaluated", "_metrics",
)  # fmt: skip


def stored_kinds(strategy: CommitStrategy) -> tuple[type, ...]:
    """Return the dataclasses that a run's checkpoints may hold."""
    return (
        Worker, Flight, Work, Transfer, Assignment, Commit, DeviceProfile, Presence, LayerPlan,
        WorkerPlan, Portion, Slice, Unit, *strategy.stored_kinds,
    )  # fmt: skip


def capture(loop: "EventLoop") -> dict[str, Any]:
    """Return the state of a run between two events."""
    planner = loop.options.planner
    return {
        "strategy": type(loop.strategy).__name__,
        "settings": _plain(loop.strategy.describe()),
        "clock": loop.options.clock,
        "seed": loop.options.seed,
        "federation": loop.state.state_dict(),
        "rules": loop.strategy.state_dict(),
        "planner": None if planner is None else planner.state_dict(),
        "events": [
            (event.time, int(event.kind), event.subject) for event in loop.clock.scheduled()
        ],
        "travel": loop.travel.state_dict(),
        "norms": loop.intake.norms,
        "waiting": [worker.id for worker in loop.waiting],
        "smoothed": loop.smoothed.state_dict(),
        "evaluations": dict(loop.result.evaluate_metrics_serverapp),
        "callbacks": [
            (type(callback).__name__, callback.state_dict()) for callback in loop.options.callbacks
        ],
        "loop": {name: getattr(loop, name) for name in _STORED},
    }


def restore(loop: "EventLoop", saved: Mapping[str, Any]) -> None:
    """Set a run to the state that `capture` returned; nothing is sent.

    Raises
    ------
    ConfigError
        If it is the state of a run with another strategy, clock or seed.
    """
    for name, present in (
        ("strategy", type(loop.strategy).__name__),
        ("settings", _plain(loop.strategy.describe())),
        ("clock", loop.options.clock),
        ("seed", loop.options.seed),
    ):
        require(
            present == saved[name],
            name if name != "settings" else "strategy settings",
            present,
            f"those of the run to resume, {saved[name]!r}",
        )
    try:
        _restore(loop, saved)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the checkpoint does not fit this version of the project: {type(error).__name__}: "
            f"{error}; resume the run with the version that began it"
        ) from None


def _restore(loop: "EventLoop", saved: Mapping[str, Any]) -> None:
    loop.state.load_state_dict(saved["federation"])
    workers = loop.state.workers
    loop.strategy.load_state_dict(saved["rules"])
    if loop.options.planner is not None:
        require(saved["planner"] is not None, "plan", "given", "none, as in the run to resume")
        loop.options.planner.load_state_dict(saved["planner"])
    loop.clock.set(loop.state.now)
    # The others are due anew, by what the resumed run asks for.
    old = {EventKind.STOP, EventKind.MEMBERS}
    if not loop.clock.is_virtual:
        old.add(EventKind.DEADLINE)
    for time, kind, subject in saved["events"]:
        if EventKind(kind) not in old:
            loop.clock.schedule(Event(time, EventKind(kind), subject))
    loop.travel.load_state_dict(saved["travel"])
    loop.intake.norms = saved["norms"]
    loop.waiting = [workers[id_] for id_ in saved["waiting"]]
    loop.open = {w.flight.assignment.id: w for w in workers.values() if w.flight is not None}
    loop.smoothed.load_state_dict(saved["smoothed"])
    loop.result.evaluate_metrics_serverapp.update(saved["evaluations"])
    states = dict(saved["callbacks"])
    for callback in loop.options.callbacks:
        if type(callback).__name__ in states:
            callback.load_state_dict(states[type(callback).__name__])
    for name in _STORED:
        setattr(loop, name, saved["loop"][name])


def _plain(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in settings.items()}
