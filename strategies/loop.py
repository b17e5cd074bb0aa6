"""The event loop: hands out assignments, takes in commits, keeps time."""

from collections import deque
from collections.abc import Callable, Mapping
from itertools import count
from logging import INFO, WARNING
from math import ceil
from typing import TYPE_CHECKING, Any

from flower_adsp.strategies.enlist import enlist
from flower_adsp.strategies.inbox import Inbox
from flower_adsp.strategies.state import FederationState, Flight, Work, Worker
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flower_adsp.arrays import decode
from flower_adsp.clock import MICROSECONDS, Clock, Event, EventKind, VirtualClock, WallClock
from flower_adsp.devices import ALWAYS, Presence, heterogeneity
from flower_adsp.errors import ConfigError, RefusedMessage
from flower_adsp.messages import (
    Assignment,
    Commit,
    decode_commit,
    decode_stock_reply,
    encode_assignment,
    encode_stock_assignment,
    stock_steps,
)
from flower_adsp.seeding import stream
from flower_adsp.sparse.plan import LayerPlanner, Member

if TYPE_CHECKING:
    from flower_adsp.strategies.base import CommitStrategy

DEFAULT_LEARNING_RATE = 0.01
_LONGEST_REST = 60.0


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
        self._assignment_ids = count()
        self._by_message: dict[str, Worker] = {}
        self._waiting: list[Worker] = []
        self._num_rounds = 0
        self._commits_at_statistics = 0
        self._is_over = False
        self._evaluated: tuple[int, int] | None = None
        self._metrics: MetricRecord | None = None
        self._smoothed = TrailingMean(self.options.smoothing_seconds)

    # ------------------------------------------------------------------------------------ the run

    def run(self, initial_arrays: ArrayRecord, num_rounds: int) -> Result:
        """Run until `num_rounds`, or until another of the ends that the options name."""
        try:
            self._begin(initial_arrays, num_rounds)
            while not self._is_over:
                event = self.clock.next(self.inbox.poll)
                if event is None:
                    raise RuntimeError("the run has no more events, and has not come to its end")
                self.state.now = event.time
                self._handle(event)
                self._set_alarms()
            self._end()
        finally:
            for callback in self.options.callbacks:
                callback.on_close()
        return self.result

    def _begin(self, initial_arrays: ArrayRecord, num_rounds: int) -> None:
        workers = enlist(self.grid, self.inbox, self.options, self.timeout)
        self.state = FederationState(decode(initial_arrays), workers, self.options.weighting)
        self._num_rounds = num_rounds
        if not self.clock.is_virtual:
            self.clock = WallClock()  # time counts from here, not from the wait for nodes
        network = self.options.network
        planner = self.options.planner
        if planner is not None:
            self._make_plan(planner)
            self._measure_statistics()
        for worker in workers:
            worker.overhead = network.upload(
                worker.profile, self.state.upload_bytes(worker)
            ) + network.download(worker.profile, self.state.num_bytes)
            if self.clock.is_virtual:
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
        self._waiting = list(workers)
        self._release_waiting()
        self._set_alarms()

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
            case EventKind.START:
                self._settle_stock_flight(self.state.workers[int(event.subject)])
            case EventKind.ARRIVAL:
                self._arrive(str(event.subject))
            case EventKind.ALARM:
                if self.strategy.alarm(int(event.subject)):
                    self.state.model_changed()
                self._release_waiting()
            case EventKind.PRESENCE:
                self._change_presence(self.state.workers[int(event.subject)])
            case EventKind.RELEASE:
                self._waiting.append(self.state.workers[int(event.subject)])
                self._release_waiting()
            case EventKind.EVALUATION:
                self._evaluate()
                self._again(event, self.options.evaluate_every)
            case EventKind.CHECKPOINT:
                self.state.index += 1
                self.strategy.checkpoint()
                self._round_done()
                self._again(event, self.strategy.check_period)
            case EventKind.DEADLINE:
                if event.subject in self._by_message:
                    self._arrive(str(event.subject))
            case EventKind.STOP:
                self._is_over = True

    def _change_presence(self, worker: Worker) -> None:
        worker.is_away = not worker.is_away
        self.state.workers_changed()
        if not worker.is_away:
            self.strategy.returned(worker)
        self._tell("away" if worker.is_away else "back", worker=worker.id)
        if self.options.planner is not None:
            self._make_plan(self.options.planner)
            self._tell_plan()
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
        for worker in [w for w in self._waiting if self.strategy.may_start(w)]:
            self._waiting.remove(worker)
            self._release(worker)

    def _release(self, worker: Worker) -> None:
        now = self.state.now
        if worker.idle_since is not None:
            worker.blocked += now - worker.idle_since
            worker.idle_since = None
        flight = self._plan(worker, self.strategy.assign(worker))
        arrays = self.state.encoded()
        encode = encode_stock_assignment if worker.is_stock else encode_assignment
        message = encode(
            worker.node_id,
            arrays,
            flight.assignment,
            self.extra,
            self.options.arrayrecord_key,
            self.options.configrecord_key,
        )
        if worker.is_stock:
            flight.sent = arrays
        worker.flight = flight
        if not flight.assignment.continues:
            worker.bytes_down += self.state.download_bytes(worker)
            worker.version = self.state.version
        flight.message_id = self.inbox.push(message)
        # A message that Flower would not take is counted as refused when its answer is due.
        subject = flight.message_id or f"unsent-{flight.assignment.id}"
        self._by_message[subject] = worker
        if not self.clock.is_virtual:
            deadline = 0.0 if flight.message_id is None else self.timeout
            at = now + _microseconds(deadline)
            self.clock.schedule(Event(at, EventKind.DEADLINE, subject))
        elif flight.arrival is None:
            self.clock.schedule(Event(flight.start, EventKind.START, worker.id))
        else:
            self.clock.schedule(Event(flight.arrival, EventKind.ARRIVAL, subject))

    def _plan(self, worker: Worker, work: Work) -> Flight:
        """Make the assignment and, in virtual time, say when what of it happens."""
        now = self.state.now
        number = next(self._assignment_ids)
        steps, seconds = work.steps, work.seconds
        start, step = now, 0
        end = arrival = None
        overlap = overlapped = away = 0
        overlaps = work.overlaps and self.clock.is_virtual
        continues = self.clock.is_virtual and not work.pulls and worker.trained_until is not None
        if self.clock.is_virtual:
            jitter = stream(self.options.seed, worker.id, "jitter", number)
            batch_size = work.batch_size or worker.batch_size
            seconds_a_step = worker.profile.step_seconds(batch_size, jitter) * worker.step_share
            step = max(1, _microseconds(seconds_a_step))
            present = worker.presence
            if not continues:
                size = self.state.download_bytes(worker)
                download = self.options.network.download(worker.profile, size)
                start = present.advance(now, download)
            begin = start
            if (
                overlaps
                and worker.trained_until is not None
                and not present.away_between(worker.trained_until, start)
            ):
                # The step in progress when the model comes is finished first.
                overlap = ceil((start - worker.trained_until) / step)
                begin = worker.trained_until + overlap * step
                overlapped = start - worker.trained_until
            if steps is None:
                assert seconds is not None
                left = start + _microseconds(seconds) - begin
                steps, seconds = max(1, ceil(left / step)) + overlap, None
            else:
                steps += overlap
            if not worker.is_stock:  # how much a stock ClientApp does, only its reply tells
                end = present.advance(begin, (steps - overlap) * step)
                away = present.away_between(begin, end)
                arrival = present.advance(end, self._upload(worker))
        assignment = Assignment(
            number,
            worker.version if continues else self.state.version,
            worker.steps,
            self._learning_rate(),
            steps,
            seconds,
            overlap,
            overlaps or (work.keeps and self.clock.is_virtual),
            continues,
            work.batch_size,
            None if worker.plan is None else worker.plan.portions,
        )
        return Flight(
            assignment, None, now, start, end, arrival, step, overlapped, away, worker.plan
        )

    def _upload(self, worker: Worker) -> int:
        return self.options.network.upload(worker.profile, self.state.upload_bytes(worker))

    def _learning_rate(self) -> float:
        if self.half_life is None:
            return self.learning_rate
        decay: float = 0.5 ** (self.state.seconds / self.half_life)
        return self.learning_rate * decay

    # ------------------------------------------------------------------------------------ commits

    def _settle_stock_flight(self, worker: Worker) -> None:
        """Learn from a stock ClientApp's reply how long it trained, and when it arrives."""
        flight = worker.flight
        assert flight is not None
        subject = flight.message_id or f"unsent-{flight.assignment.id}"
        steps = 1
        if flight.message_id is not None:
            reply = self.inbox.peek(flight.message_id, self.timeout)
            if reply is not None:
                try:
                    steps = self._decode(worker, flight, reply).steps
                except RefusedMessage:
                    steps = 1  # it is refused when it arrives
        present = worker.presence
        flight.end = present.advance(flight.start, steps * flight.step)
        flight.away = present.away_between(flight.start, flight.end)
        flight.arrival = present.advance(flight.end, self._upload(worker))
        self.clock.schedule(Event(flight.arrival, EventKind.ARRIVAL, subject))

    def _arrive(self, subject: str) -> None:
        worker = self._by_message.pop(subject)
        flight = worker.flight
        assert flight is not None
        index = self.state.index
        if self._take_in(worker, flight):
            since = self.state.commits - self._commits_at_statistics
            if self.options.planner is not None and since >= self.state.num_workers:
                self._measure_statistics()
            self.state.model_changed()
        if self.state.index > index:  # a barrier was passed
            self._round_done()
        if self._is_over:
            return
        if worker.failures_in_a_row and not self.clock.is_virtual:
            rest = min(2.0 ** (worker.failures_in_a_row - 1), _LONGEST_REST)
            at = self.state.now + _microseconds(rest)
            self.clock.schedule(Event(at, EventKind.RELEASE, worker.id))
        else:
            self._waiting.append(worker)
        self._release_waiting()

    def _take_in(self, worker: Worker, flight: Flight) -> bool:
        """Apply or refuse what arrived; return whether the model changed."""
        try:
            commit = self._receive(worker, flight)
        except RefusedMessage as error:
            self._account(worker, flight, None)
            return self._refuse(worker, flight, error)
        self._account(worker, flight, commit)
        return self._apply(worker, flight, commit)

    def _receive(self, worker: Worker, flight: Flight) -> Commit:
        if flight.message_id is None:
            raise RefusedMessage("not-sent", "Flower did not take the message")
        if self.clock.is_virtual:
            reply = self.inbox.wait(flight.message_id, self.timeout)
        else:
            reply = self.inbox.take(flight.message_id)
        if reply is None:
            raise RefusedMessage("timeout", f"no reply within {self.timeout:.0f} s")
        return self._decode(worker, flight, reply)

    def _decode(self, worker: Worker, flight: Flight, reply: Message) -> Commit:
        model = self.state.model
        if flight.sent is None:
            if flight.plan is None:
                return decode_commit(reply, flight.assignment, model)
            plan = flight.plan
            return decode_commit(reply, flight.assignment, model, plan.slices, plan.buffers)
        key = self.options.weighted_by_key
        commit = decode_stock_reply(reply, flight.assignment, flight.sent, model, key)
        return stock_steps(commit, worker.batch_size)

    def _account(self, worker: Worker, flight: Flight, commit: Commit | None) -> None:
        """Book the time of a finished assignment, and remember its communication as O_i."""
        now = self.state.now
        if flight.end is None:
            seconds = 0.0 if commit is None else commit.train_seconds
            trained = min(_microseconds(seconds), now - flight.released)
        else:
            trained = flight.end - flight.start - flight.away
        away = worker.presence.away_between(flight.released, now)
        overhead = now - flight.released - trained - away
        # What it trained on while its last commit travelled was booked as communicating then.
        worker.computing += trained + flight.overlapped
        worker.communicating += overhead - flight.overlapped
        if commit is not None:
            worker.overhead = overhead
        keeps = commit is not None and flight.assignment.keeps_model
        worker.trained_until = flight.end if keeps else None
        worker.idle_since = now
        worker.flight = None

    def _apply(self, worker: Worker, flight: Flight, commit: Commit) -> bool:
        worker.commits += 1
        worker.steps += commit.steps
        worker.num_examples = commit.num_examples
        worker.bytes_up += (
            self.state.num_bytes
            if flight.plan is None
            else flight.plan.upload_bytes(self.state.model)
        )
        self.state.note_trained(worker, commit)
        worker.failures_in_a_row = 0
        staleness = self.state.version - commit.version
        changed = self.strategy.apply(worker, commit)
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
        record: dict[str, Any] = {"index": self.state.index, "commits": self.state.commits}
        record |= dict(metrics)
        loss = metrics.get("loss")
        if isinstance(loss, int | float):
            smoothed = self._smoothed.add(self.state.seconds, float(loss))
            record["smoothed_loss"] = smoothed
            target = self.options.target_loss
            if target is not None and smoothed is not None and smoothed <= target:
                record["reached_target"] = True
                self._is_over = True
        self._tell("evaluation", **record)

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
    times = {"released": flight.released, "started": flight.start}
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
