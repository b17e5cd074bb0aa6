"""The event loop: hands out assignments, takes in commits, keeps time."""

from collections import deque
from collections.abc import Callable, Mapping
from logging import INFO, WARNING
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_adsp.strategies.enlist import enlist, worker_of
from flower_adsp.strategies.inbox import Inbox
from flower_adsp.strategies.intake import Intake
from flower_adsp.strategies.membership import Membership
from flower_adsp.strategies.recovery import capture, restore, stored_kinds
from flower_adsp.strategies.state import FederationState, Flight, Work, Worker
from flower_adsp.strategies.travel import Travel
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flower_adsp.arrays import decode
from flower_adsp.checkpoint import load, save
from flower_adsp.clock import MICROSECONDS, Clock, Event, EventKind, VirtualClock, WallClock
from flower_adsp.devices import ALWAYS, Presence, heterogeneity
from flower_adsp.errors import (
    ConfigError,
    EngineFailed,
    NodeCountError,
    RefusedMessage,
    require,
)
from flower_adsp.messages import (
    ENGINE_ERROR,
    NO_ANSWER,
    Assignment,
    Commit,
    encode_assignment,
    encode_stock_assignment,
)
from flower_adsp.network.collectives import RING, STAR
from flower_adsp.precision import time_share
from flower_adsp.seeding import stream
from flower_adsp.sparse.plan import LayerPlanner, Member

if TYPE_CHECKING:
    from flower_adsp.strategies.base import CommitStrategy

DEFAULT_LEARNING_RATE = 0.01
_LONGEST_REST = 16  # times what an assignment should take
_LEAST_DEADLINE = 30.0  # seconds of real time
_MOST_ENGINE_ERRORS = 3  # in a row


class TrailingMean:
    """The mean of a value over the trailing seconds of a run.

    Parameters
    ----------
    window : float
        Seconds; the mean at t is over (t − window, t].
    """

    def __init__(self, window: float) -> None:
        self._window = window
        self._samples: deque[tuple[float, float]] = deque()

    def add(self, seconds: float, value: float) -> float | None:
        """Take a value in; return the mean, or None while the window has not been filled."""
        self._samples.append((seconds, value))
        while self._samples[0][0] <= seconds - self._window:
            self._samples.popleft()
        if seconds < self._window:
            return None
        return sum(sample for _, sample in self._samples) / len(self._samples)

    def state_dict(self) -> dict[str, Any]:
        """Return the samples."""
        return {"samples": list(self._samples)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self._samples = deque(state["samples"])


class EventLoop:
    """One run of a strategy.

    Parameters
    ----------
    strategy : CommitStrategy
        The rules.
    grid : Grid
        Flower's way to the nodes.
    timeout : float
        Host seconds to wait for the answer to an assignment.
    train_config : ConfigRecord | None
        Learning rate, and what else goes with each assignment.
    evaluate_fn : Callable[[int, ArrayRecord], MetricRecord | None] | None
        Evaluates the model at the server.
    """

    def __init__(
        self,
        strategy: "CommitStrategy",
        grid: Grid,
        timeout: float,
        train_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> None:
        self.strategy = strategy
        self.options = strategy.loop
        self.grid = grid
        self.inbox = Inbox(grid)
        self.timeout = timeout
        self.evaluate_fn = evaluate_fn
        settings: dict[str, Any] = dict(train_config or {})
        self.learning_rate: float = _positive(settings, "lr", DEFAULT_LEARNING_RATE)
        self.half_life: float | None = _positive(settings, "lr-half-life", None)
        self.extra = settings
        self.result = Result()
        self.clock: Clock = VirtualClock() if self.options.clock == "virtual" else WallClock()
        self.state: FederationState
        self._num_assignments = 0
        self.open: dict[int, Worker] = {}
        self.waiting: list[Worker] = []
        self._num_rounds = 0
        self._commits_at_statistics = 0
        self._is_over = False
        self._has_diverged = False
        self._evaluated: tuple[int, int] | None = None
        self._metrics: MetricRecord | None = None
        self.smoothed = TrailingMean(self.options.smoothing_seconds)
        self.intake = Intake(self.options)
        self._engine_errors = 0
        self._saved_index = 0
        self._members: Membership | None = None
        network = self.options.network
        has_collective = (
            network.collective == RING and self.options.planner is None
            if strategy.has_groups
            else strategy.has_barriers
        )
        require(
            network.collective == STAR or (has_collective and self.clock.is_virtual),
            "network.collective",
            network.collective,
            f"{STAR!r} but for strategies with barriers, in virtual time; {RING!r} is the other "
            "one for strategies with groups, without a layer plan",
        )
        self.travel = Travel(self.options, self.clock, strategy.has_groups, strategy.has_barriers)

    # ------------------------------------------------------------------------------------ the run

    def run(self, initial_arrays: ArrayRecord, num_rounds: int) -> Result:
        """Run until `num_rounds`, or until another of the ends that the options name."""
        self._num_rounds = num_rounds
        try:
            if self.options.resume is None:
                self._begin(initial_arrays)
                self._save()
            else:
                self._resume(self.options.resume)
            while not self._is_over:
                event = self.clock.next(self.inbox.poll)
                if event is None:
                    raise RuntimeError("the run has no more events, and has not come to its end")
                self.state.now = event.time
                self._handle(event)
                self._set_alarms()
                self._save_if_due()
            self._end()
        finally:
            for callback in self.options.callbacks:
                callback.on_close()
        return self.result

    def _begin(self, initial_arrays: ArrayRecord) -> None:
        workers = enlist(self.grid, self.inbox, self.options, self.timeout)
        self.state = FederationState(
            decode(initial_arrays), workers, self.options.weighting, self.options.network.codec
        )
        if not self.clock.is_virtual:
            self.clock = WallClock()  # time counts from here, not from the wait for nodes
        self.travel.begin(self.state)
        planner = self.options.planner
        if planner is not None:
            self._make_plan(planner)
            self._measure_statistics()
        for worker in workers:
            if self.clock.is_virtual:
                self.travel.estimate_overhead(worker)
                worker.presence = _presence(worker, self.options.seed)
        self.state.is_evaluated = self.evaluate_fn is not None
        self.strategy.state = self.state
        self.strategy.begin()
        speeds = [worker.speed for worker in workers]
        log(INFO, "%d workers, H = %.2f", len(workers), heterogeneity(speeds))
        self._tell(
            "start",
            strategy=type(self.strategy).__name__,
            settings=self.strategy.describe(),
            workers=[
                {
                    "id": worker.id,
                    "device": worker.profile.name,
                    "speed": worker.speed,
                    "examples": worker.num_examples,
                    "memory_mib": worker.profile.memory_mib,
                }
                for worker in workers
            ],
        )
        self._tell_plan()
        self._evaluate()
        for event in self._first_alarms():
            self.clock.schedule(event)
        for worker in workers:
            self._schedule_presence(worker)
        self._follow_members()
        self.waiting = list(workers)
        self._release_waiting()
        self._set_alarms()

    # ------------------------------------------------------------------------------- checkpoints

    def _save_if_due(self) -> None:
        """Save the run at the end of a check period or barrier, and before it stops."""
        index, fails = self.state.index, self._engine_errors >= _MOST_ENGINE_ERRORS
        is_due = index != self._saved_index and index % self.options.save_every == 0
        if is_due or self._is_over or fails:
            self._saved_index = index
            self._save()
        if fails:
            raise EngineFailed(
                f"the last {self._engine_errors} answers were errors of the engine that runs the "
                "devices, such as a Ray actor that died (for want of memory?); see the log above"
            )

    def _save(self) -> None:
        if self.options.checkpoint is not None:
            save(self.options.checkpoint, capture(self), stored_kinds(self.strategy))

    def _resume(self, path: Path) -> None:
        """Go on from a checkpoint; what was under way is sent again."""
        saved = load(path, stored_kinds(self.strategy))
        workers = enlist(self.grid, self.inbox, self.options, self.timeout)
        self.state = FederationState(
            saved["federation"]["model"], [], self.options.weighting, self.options.network.codec
        )
        self.state.is_evaluated = self.evaluate_fn is not None
        self.strategy.state = self.state
        self.travel.begin(self.state)
        restore(self, saved)
        self._saved_index = self.state.index
        nodes = {worker.id: worker.node_id for worker in workers}
        missing = sorted(self.state.workers.keys() - nodes.keys())
        if missing and self.clock.is_virtual:
            raise NodeCountError(
                f"the run to resume has {len(self.state.workers)} workers, but no node has "
                f"partition-id {', '.join(map(str, missing))}; resume it with as many nodes"
            )
        for worker in self.state.workers.values():
            worker.node_id = nodes.get(worker.id, worker.node_id)
        if self.options.max_seconds is not None:
            at = max(_microseconds(self.options.max_seconds), self.state.now)
            self.clock.schedule(Event(at, EventKind.STOP, 1))
        if not self.clock.is_virtual:
            for worker in workers:
                if worker.id not in self.state.workers:
                    self._join(worker)
        log(INFO, "Going on at t = %.1f s, index %d", self.state.seconds, self.state.index)
        for number, worker in sorted(self.open.items()):
            flight = worker.flight
            assert flight is not None
            if flight.missed is None and flight.start is not None:
                self._send(worker, flight, worker.device_state)
            if not self.clock.is_virtual:
                at = self.state.now + self._patience(flight)
                self.clock.schedule(Event(at, EventKind.DEADLINE, number))
        self._follow_members()
        self._is_over = self.state.index >= self._num_rounds
        if not self._is_over:
            self._release_waiting()
            self._set_alarms()

    # --------------------------------------------------------------------------------- membership

    def _follow_members(self) -> None:
        """Look for nodes that come and go, in real time."""
        if self.clock.is_virtual:
            return
        known = {worker.node_id for worker in self.state.workers.values()}
        self._members = Membership(self.grid, self.inbox, known)
        self._look_again()

    def _look_again(self) -> None:
        at = self.state.now + _microseconds(self.options.look_every)
        self.clock.schedule(Event(at, EventKind.MEMBERS))

    def _look_for_members(self, members: Membership) -> None:
        members.look()
        for worker in list(self.state.workers.values()):
            is_online = worker.node_id in members.online
            # One that leaves while it has an assignment may still answer, until its deadline.
            if not worker.is_away and not is_online and worker.flight is None:
                self._leave(worker)
            elif worker.is_away and is_online:
                self._come_back(worker)
        self._look_again()

    def _take_in_member(self, members: Membership, message_id: str) -> None:
        """Make a worker of a node that has answered the query, or know it for one that left."""
        found = members.answer(message_id)
        if found is None:
            return
        node_id, capability = found
        worker = self.state.workers.get(capability.partition_id)
        if worker is None:
            self._join(worker_of(node_id, capability))
            return
        if worker.node_id in members.online:
            log(WARNING, "node %d is left out: partition-id = %d is taken", node_id, worker.id)
            return
        worker.node_id = node_id
        if worker.flight is not None:
            del self.open[worker.flight.assignment.id]
            self._settle(worker, RefusedMessage("node-gone", "its node has gone, and come anew"))
        if worker.is_away:
            self._come_back(worker)

    def _join(self, worker: Worker) -> None:
        self.state.add(worker)
        self.travel.estimate_overhead(worker)
        worker.idle_since = self.state.now
        worker.joined = self.state.now
        self.strategy.joined(worker)
        self._tell("joined", worker=worker.id, device=worker.profile.name)
        self._members_changed()
        self.waiting.append(worker)
        self._release_waiting()

    def _leave(self, worker: Worker) -> None:
        worker.is_away = True
        if worker in self.waiting:
            self.waiting.remove(worker)
        self._tell("away", worker=worker.id)
        self._members_changed()
        self._go_on_without(worker)
        self._release_waiting()

    def _go_on_without(self, worker: Worker) -> None:
        """Have the strategy take note that a worker has left, for which others may have waited."""
        index = self.state.index
        self.travel.arrived(worker, is_taken=False)
        if self.strategy.left(worker):
            self.state.model_changed()
        if self.state.index > index:
            self._pass_barrier()

    def _come_back(self, worker: Worker) -> None:
        worker.is_away = False
        worker.failures_in_a_row = 0
        self.strategy.returned(worker)
        self._tell("back", worker=worker.id)
        self._members_changed()
        if worker.flight is None and not worker.is_resting and worker not in self.waiting:
            self.waiting.append(worker)
        self._release_waiting()

    def _members_changed(self) -> None:
        self.state.workers_changed()
        if self.options.planner is not None and any(
            worker.is_present for worker in self.state.workers.values()
        ):
            self._make_plan(self.options.planner)
            self._tell_plan()

    def _make_plan(self, planner: LayerPlanner) -> None:
        stock = [worker.id for worker in self.state.workers.values() if worker.is_stock]
        if stock:
            raise ConfigError(
                f"workers {stock} run a ClientApp that does not know assignments, and would train "
                "whole models; without a layer plan they can take part"
            )
        members = [
            Member(
                worker.id,
                worker.profile.name,
                worker.profile.memory_mib,
                worker.num_examples,
                worker.batch_size,
            )
            for worker in self.state.present
        ]
        plan = planner.make(members, self.state.model)
        if plan.uncovered:
            log(WARNING, "Nobody trains these units whole: %s", ", ".join(plan.uncovered))
        self.state.set_plan(plan)

    def _measure_statistics(self) -> None:
        """Set what frozen normalisations use from the server's data, if the planner wants that."""
        planner, plan = self.options.planner, self.state.plan
        if planner is None or plan is None or plan.is_whole:
            return
        if planner.statistics == "server":
            self.state.set_statistics(planner.measured_statistics(self.state.model))
            self._commits_at_statistics = self.state.commits

    def _tell_plan(self) -> None:
        if self.state.plan is not None:
            self._tell("plan", **self.state.plan.describe())

    def _set_alarms(self) -> None:
        for time, subject in self.state.alarms:
            self.clock.schedule(Event(max(time, self.state.now), EventKind.ALARM, subject))
        self.state.alarms.clear()

    def _first_alarms(self) -> list[Event]:
        alarms = []
        for seconds, kind in (
            (self.options.evaluate_every, EventKind.EVALUATION),
            (self.strategy.check_period, EventKind.CHECKPOINT),
            (self.options.max_seconds, EventKind.STOP),
        ):
            if seconds is not None:
                alarms.append(Event(_microseconds(seconds), kind, 1))
        return alarms

    def _handle(self, event: Event) -> None:
        match event.kind:
            case EventKind.TRANSFER:
                if event.subject == self.travel.number:
                    self.travel.end_transfers(self.open)
            case EventKind.START:
                self._start(self.open[int(event.subject)])
            case EventKind.TRAINED:
                self.travel.upload(self.open[int(event.subject)])
            case EventKind.ARRIVAL if isinstance(event.subject, str):
                self._answered(event.subject)
            case EventKind.ARRIVAL | EventKind.DEADLINE:
                if event.subject in self.open:
                    self._arrive(int(event.subject))
            case EventKind.ALARM:
                if self.strategy.alarm(int(event.subject)):
                    self.state.model_changed()
                self._release_waiting()
            case EventKind.PRESENCE:
                self._change_presence(self.state.workers[int(event.subject)])
            case EventKind.RELEASE:
                self._end_rest(self.state.workers[int(event.subject)])
            case EventKind.MEMBERS:
                assert self._members is not None
                self._look_for_members(self._members)
            case EventKind.EVALUATION:
                self._evaluate()
                self._again(event, self.options.evaluate_every)
            case EventKind.CHECKPOINT:
                self.state.index += 1
                self.strategy.checkpoint()
                self._round_done()
                self._again(event, self.strategy.check_period)
            case EventKind.STOP:
                self._is_over = True

    def _change_presence(self, worker: Worker) -> None:
        worker.is_away = not worker.is_away
        self.state.workers_changed()
        if not worker.is_away:
            self.strategy.returned(worker)
        self._tell("away" if worker.is_away else "back", worker=worker.id)
        self.travel.pause(worker)
        self._members_changed()
        if worker.is_away:
            self._go_on_without(worker)
        self._schedule_presence(worker)
        self._release_waiting()

    def _schedule_presence(self, worker: Worker) -> None:
        if self.clock.is_virtual and worker.presence.away:
            at = worker.presence.next_change(self.state.now)
            self.clock.schedule(Event(at, EventKind.PRESENCE, worker.id))

    def _again(self, event: Event, every: float | None) -> None:
        assert every is not None
        number = int(event.subject) + 1
        self.clock.schedule(Event(_microseconds(every * number), event.kind, number))

    def _pass_barrier(self) -> None:
        self.travel.pass_barrier()
        self._round_done()

    def _round_done(self) -> None:
        self._tell(
            "checkpoint",
            index=self.state.index,
            commits=[worker.commits for worker in self.state.workers.values()],
            **self.strategy.status(),
        )
        planner = self.options.planner
        if planner is not None and planner.period and self.state.index % planner.period == 0:
            self._make_plan(planner)
            self._tell_plan()
        if self.options.evaluate_every is None:
            self._evaluate()
        if self.state.index >= self._num_rounds:
            self._is_over = True

    def _end(self) -> None:
        self._evaluate()
        self._tell(
            "end",
            index=self.state.index,
            version=self.state.version,
            commits=self.state.commits,
            open_assignments=sum(w.flight is not None for w in self.state.workers.values()),
        )
        self.result.arrays = self.state.encoded()

    # -------------------------------------------------------------------------------- assignments

    def _release_waiting(self) -> None:
        """Give their next assignment to those who may start, in the order in which they came."""
        for worker in [w for w in self.waiting if self.strategy.may_start(w)]:
            self.waiting.remove(worker)
            self._release(worker)

    def _release(self, worker: Worker) -> None:
        now = self.state.now
        waited = 0 if worker.idle_since is None else now - worker.idle_since
        worker.blocked += waited
        worker.idle_since = None
        flight = self._ask(worker, self.strategy.assign(worker))
        flight.sent = self.strategy.model_for(worker)
        worker.flight = flight
        self.open[flight.assignment.id] = worker
        if flight.assignment.continues:
            self._start_training(worker, flight)
            return
        size = self.state.download_bytes(worker)
        worker.bytes_down += size
        start = self.travel.download(worker, flight, size) if self.clock.is_virtual else now
        worker.version = self.state.version
        if start is not None:
            if start < now:  # its first forward pass began while others' last slices were under way
                flight.unblocked = min(now - start, waited)
                worker.blocked -= flight.unblocked
            self._start_training(worker, flight, start)

    @property
    def _keeps_sent(self) -> bool:
        return self.options.checkpoint is not None or self.strategy.needs_start

    def _send(
        self,
        worker: Worker,
        flight: Flight,
        device_state: Mapping[str, ArrayRecord] | None = None,
    ) -> None:
        """Send a worker the assignment of a flight."""
        assert flight.sent is not None
        arguments = (
            worker.node_id,
            flight.sent,
            flight.assignment,
            self.extra,
            self.options.arrayrecord_key,
            self.options.configrecord_key,
        )
        ttl = None if self.clock.is_virtual else self._patience(flight) / MICROSECONDS
        message = (
            encode_stock_assignment(*arguments, ttl=ttl)
            if worker.is_stock
            else encode_assignment(*arguments, device_state=device_state, ttl=ttl)
        )
        flight.message_id = self.inbox.push(message)

    def _patience(self, flight: Flight) -> int:
        """Return the microseconds of real time to wait for the answer to an assignment."""
        factor, least = self.options.deadline_factor, _microseconds(_LEAST_DEADLINE)
        assert flight.arrival is not None
        expected = flight.arrival - flight.released
        patience = _microseconds(self.timeout)
        return patience if factor is None else min(max(round(factor * expected), least), patience)

    def _ask(self, worker: Worker, work: Work) -> Flight:
        """Make the assignment, as yet without the steps that follow from when it starts."""
        number = self._num_assignments
        self._num_assignments += 1
        is_virtual = self.clock.is_virtual
        continues = is_virtual and not work.pulls and worker.trained_until is not None
        assignment = Assignment(
            number,
            worker.version if continues else self.state.version,
            worker.steps,
            self._learning_rate(),
            work.steps,
            work.seconds,
            keeps_model=is_virtual and (work.overlaps or work.keeps),
            continues=continues,
            batch_size=work.batch_size,
            portions=None if worker.plan is None else worker.plan.portions,
            returns_state=self.options.checkpoint is not None and is_virtual,
            codec=self.options.network.codec,
            fp32_share=work.fp32_share,
        )
        flight = Flight(assignment, work, self.state.now, plan=worker.plan)
        if is_virtual:
            jitter = stream(self.options.seed, worker.id, "jitter", number)
            batch_size = work.batch_size or worker.batch_size
            seconds = worker.profile.step_seconds(batch_size, jitter) * worker.step_share
            if work.fp32_share is not None and worker.profile.npu_speedup is not None:
                seconds *= time_share(work.fp32_share, worker.profile.npu_speedup)
            flight.step = max(1, _microseconds(seconds))
        return flight

    def _start_training(self, worker: Worker, flight: Flight, start: int | None = None) -> None:
        """Send an assignment; in virtual time, work out when what of it happens.

        It starts at `start`, by default now.
        """
        now, number = self.state.now, flight.assignment.id
        flight.start = now if start is None else start
        if self.clock.is_virtual:
            self.travel.time_training(worker, flight, flight.start)
        else:
            work = flight.work
            training = (work.steps or 0) / worker.speed if work.seconds is None else work.seconds
            flight.arrival = now + _microseconds(training) + worker.overhead
        self._send(worker, flight)
        if not self._keeps_sent and not worker.is_stock:
            flight.sent = None
        if not self.clock.is_virtual:
            # A message that Flower would not take is counted as refused at once.
            at = now if flight.message_id is None else now + self._patience(flight)
            self.clock.schedule(Event(at, EventKind.DEADLINE, number))
        elif flight.end is None:
            self.clock.schedule(Event(flight.start, EventKind.START, number))
        else:
            self.travel.train_until(worker, flight, flight.end)

    def _learning_rate(self) -> float:
        if self.half_life is None:
            return self.learning_rate
        decay: float = 0.5 ** (self.state.seconds / self.half_life)
        return self.learning_rate * decay

    # ------------------------------------------------------------------------------------ commits

    def _start(self, worker: Worker) -> None:
        """Start what has been downloaded, or learn how long a stock ClientApp trained."""
        flight = worker.flight
        assert flight is not None
        if flight.start is None:
            self._start_training(worker, flight)
            return
        steps = 1
        if flight.message_id is not None:
            reply = self.inbox.peek(flight.message_id, self.timeout)
            if reply is not None:
                try:
                    steps = self.intake.decode(worker, flight, reply, self.state.model).steps
                except RefusedMessage:
                    steps = 1  # it is refused when it arrives
        present = worker.presence
        flight.end = present.advance(flight.start, steps * flight.step)
        flight.away = present.away_between(flight.start, flight.end)
        self.travel.train_until(worker, flight, flight.end)

    def _answered(self, message_id: str) -> None:
        """Take in what has arrived in real time."""
        for number, worker in self.open.items():
            if worker.flight is not None and worker.flight.message_id == message_id:
                self._arrive(number)
                return
        if self._members is not None:
            self._take_in_member(self._members, message_id)

    def _arrive(self, number: int) -> None:
        worker = self.open[number]
        flight = worker.flight
        assert flight is not None
        found: Commit | RefusedMessage
        try:
            found = self._receive(worker, flight)
        except RefusedMessage as error:
            found = error
            if self._waits_on(flight, error):
                return
        del self.open[number]
        self._settle(worker, found)

    def _waits_on(self, flight: Flight, error: RefusedMessage) -> bool:
        """Have an answer that will not come in virtual time be missed only at the deadline."""
        factor = self.options.deadline_factor
        if not self.clock.is_virtual or factor is None or error.kind not in NO_ANSWER:
            return False
        if self.state.now >= flight.limit(factor):
            return False
        flight.missed = (error.kind, error.detail)
        event = Event(flight.limit(factor), EventKind.DEADLINE, flight.assignment.id)
        self.clock.schedule(event)
        return True

    def _settle(self, worker: Worker, found: Commit | RefusedMessage) -> None:
        """Apply or refuse what a flight has come to, and see to what the worker does next."""
        flight = worker.flight
        assert flight is not None
        is_engine = isinstance(found, RefusedMessage) and found.kind == ENGINE_ERROR
        self._engine_errors = self._engine_errors + 1 if is_engine else 0
        self._count_strays()
        index = self.state.index
        self.travel.arrived(worker, is_taken=isinstance(found, Commit))
        if self._take_in(worker, flight, found):
            since = self.state.commits - self._commits_at_statistics
            if self.options.planner is not None and since >= self.state.num_workers:
                self._measure_statistics()
            self.state.model_changed()
        if self.state.index > index:
            self._pass_barrier()
        if self._members is not None and worker.node_id not in self._members.online:
            self._leave(worker)
        elif worker.failures_in_a_row >= self.options.failures_before_rest:
            self._rest(worker, flight)
        else:
            self.waiting.append(worker)
        if not self._is_over:
            self._release_waiting()

    def _count_strays(self) -> None:
        """Count replies to what had been answered already, as refused."""
        for node_id in self.inbox.strays:
            for worker in self.state.workers.values():
                if worker.node_id == node_id:
                    worker.refused["duplicate"] += 1
                    self._tell(
                        "refused", worker=worker.id, kind="duplicate", detail="answered before"
                    )
        self.inbox.strays.clear()

    def _rest(self, worker: Worker, flight: Flight) -> None:
        """Give a worker nothing to do, for twice as long after each failure."""
        assert flight.arrival is not None
        more = worker.failures_in_a_row - self.options.failures_before_rest
        times = min(2**more, _LONGEST_REST)
        length = times * max(flight.arrival - flight.released, MICROSECONDS)
        self.clock.schedule(Event(self.state.now + length, EventKind.RELEASE, worker.id))
        if not worker.is_resting:
            worker.is_resting = True
            self._tell("resting", worker=worker.id, failures=worker.failures_in_a_row)
            self._members_changed()
            self._go_on_without(worker)

    def _end_rest(self, worker: Worker) -> None:
        worker.is_resting = False
        self.strategy.returned(worker)
        self._tell("rested", worker=worker.id)
        self._members_changed()
        if not worker.is_away or self.clock.is_virtual:
            self.waiting.append(worker)
        self._release_waiting()

    def _take_in(self, worker: Worker, flight: Flight, found: Commit | RefusedMessage) -> bool:
        """Apply or refuse what arrived; return whether the model changed."""
        if isinstance(found, RefusedMessage):
            self._account(worker, flight, None)
            return self._refuse(worker, flight, found)
        self._account(worker, flight, found)
        return self._apply(worker, flight, found)

    def _receive(self, worker: Worker, flight: Flight) -> Commit:
        if flight.missed is not None:
            raise RefusedMessage(*flight.missed)
        if flight.message_id is None:
            raise RefusedMessage("not-sent", "Flower did not take the message")
        if self.clock.is_virtual:
            reply = self.inbox.wait(flight.message_id, self.timeout)
        else:
            reply = self.inbox.take(flight.message_id)
        if reply is None:
            raise RefusedMessage("timeout", "no reply within the time that it may take")
        commit = self.intake.decode(worker, flight, reply, self.state.model)
        self.intake.check_norm(commit, self.state.model)
        return commit

    def _account(self, worker: Worker, flight: Flight, commit: Commit | None) -> None:
        """Book the time of a finished assignment, and remember its communication as O_i."""
        now = self.state.now
        if flight.end is None or flight.start is None:
            seconds = 0.0 if commit is None else commit.train_seconds
            trained = min(_microseconds(seconds), now - flight.released)
        else:
            trained = flight.end - flight.start - flight.away
        away = worker.presence.away_between(flight.released, now)
        overhead = now - flight.released + flight.unblocked - trained - away
        # What it trained on while its last commit travelled was booked as communicating then.
        worker.computing += trained + flight.overlapped
        worker.communicating += overhead - flight.overlapped
        if commit is not None:
            worker.overhead = max(overhead, 0)
        keeps = commit is not None and flight.assignment.keeps_model
        worker.trained_until = flight.end if keeps else None
        worker.idle_since = now
        worker.flight = None

    def _apply(self, worker: Worker, flight: Flight, commit: Commit) -> bool:
        worker.steps += commit.steps
        worker.num_examples = commit.num_examples
        worker.bytes_up += self.state.upload_bytes(worker, flight.plan)
        self.state.note_trained(worker, commit)
        worker.failures_in_a_row = 0
        worker.device_state = dict(commit.device_state)
        self.intake.note(commit)
        staleness = self.state.version - commit.version
        worker.trained_from = flight.sent if self.strategy.needs_start else None
        changed = self.strategy.apply(worker, commit)
        worker.trained_from = None
        self._tell(
            "commit",
            worker=worker.id,
            version=commit.version,
            staleness=staleness,
            steps=commit.steps,
            loss=commit.train_loss,
            **_times(flight, self.clock.is_virtual),
        )
        return changed

    def _refuse(self, worker: Worker, flight: Flight, error: RefusedMessage) -> bool:
        worker.refused[error.kind] += 1
        worker.failures_in_a_row += 1
        changed = self.strategy.refuse(worker)
        self._tell(
            "refused",
            worker=worker.id,
            kind=error.kind,
            detail=error.detail,
            **_times(flight, self.clock.is_virtual),
        )
        return changed

    # --------------------------------------------------------------------------------- evaluation

    def _evaluate(self) -> None:
        """Evaluate the model, unless just this version was evaluated at this time."""
        key = (self.state.now, self.state.version)
        if self.evaluate_fn is None:
            return
        is_new = self._evaluated != key
        if is_new:
            self._evaluated = key
            self._metrics = self.evaluate_fn(self.state.index, self.state.encoded())
        metrics = self._metrics
        if metrics is None:
            return
        self.result.evaluate_metrics_serverapp[self.state.index] = metrics
        if not is_new:
            return
        self.strategy.evaluated(metrics)
        workers = self.state.workers.values()
        record: dict[str, Any] = {
            "index": self.state.index,
            "commits": self.state.commits,
            "bytes_up": sum(worker.bytes_up for worker in workers),
            "bytes_down": sum(worker.bytes_down for worker in workers),
            **metrics,
        }
        loss = metrics.get("loss")
        if isinstance(loss, int | float):
            self._warn_of_divergence(float(loss))
            smoothed = self.smoothed.add(self.state.seconds, float(loss))
            record["smoothed_loss"] = smoothed
            target = self.options.target_loss
            if target is not None and smoothed is not None and smoothed <= target:
                record["reached_target"] = True
                self._is_over = True
        self._tell("evaluation", **record)

    def _warn_of_divergence(self, loss: float) -> None:
        if isfinite(loss) or self._has_diverged:
            return
        self._has_diverged = True
        log(
            WARNING,
            "the loss is %s at t = %.1f s: training has diverged, and will hardly come back; a "
            "lower learning rate (%g now) or a norm_limit (%s now) may help",
            loss,
            self.state.seconds,
            self._learning_rate(),
            self.options.norm_limit,
        )

    def _tell(self, event: str, **record: Any) -> None:
        full: Mapping[str, Any] = {"event": event, "t": self.state.seconds, **record}
        for callback in self.options.callbacks:
            callback.on_event(full, self.state)


def _presence(worker: Worker, seed: int) -> Presence:
    """Return when a worker is there; all are at first."""
    available, away = (
        _microseconds(seconds) for seconds in (worker.profile.available_s, worker.profile.away_s)
    )
    if not away:
        return ALWAYS
    offset = int(stream(seed, worker.id, "availability").integers(available))
    return Presence(available, away, offset)


def _times(flight: Flight, is_virtual: bool) -> dict[str, float]:
    times = {"released": flight.released}
    if flight.start is not None:
        times["started"] = flight.start
    if is_virtual and flight.end is not None:
        times["trained"] = flight.end
    return {key: value / MICROSECONDS for key, value in times.items()}


def _microseconds(seconds: float) -> int:
    return round(seconds * MICROSECONDS)


def _positive(settings: dict[str, Any], key: str, default: float | None) -> Any:
    value = settings.pop(key, default)
    if value is not None and not (isinstance(value, int | float) and value > 0):
        raise ConfigError(f"train_config {key!r} = {value!r} is not allowed; it must be above 0")
    return value
