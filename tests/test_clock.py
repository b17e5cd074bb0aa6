import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_adsp.clock import Event, EventKind, VirtualClock, WallClock


def nothing() -> list[str]:
    return []


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(list(EventKind))), max_size=30),
)
def test_virtual_events_come_in_order_of_time_kind_and_sequence(
    planned: list[tuple[int, EventKind]],
) -> None:
    clock = VirtualClock()
    for number, (at, kind) in enumerate(planned):
        clock.schedule(Event(at, kind, number))
    events = []
    while (event := clock.next(nothing)) is not None:
        assert clock.now() == event.time
        events.append((event.time, event.kind, event.subject))
    expected = sorted((at, kind, number) for number, (at, kind) in enumerate(planned))
    assert events == expected


def test_virtual_time_never_runs_backwards() -> None:
    clock = VirtualClock()
    clock.schedule(Event(5, EventKind.ARRIVAL))
    clock.next(nothing)
    clock.schedule(Event(4, EventKind.ARRIVAL))
    with pytest.raises(RuntimeError, match="backwards"):
        clock.next(nothing)


def test_at_equal_times_commits_come_before_evaluation_and_checkpoint() -> None:
    clock = VirtualClock()
    for kind in (EventKind.STOP, EventKind.CHECKPOINT, EventKind.EVALUATION, EventKind.ARRIVAL):
        clock.schedule(Event(7, kind))
    kinds = [clock.next(nothing).kind for _ in range(4)]  # type: ignore[union-attr]
    assert kinds == [
        EventKind.ARRIVAL,
        EventKind.EVALUATION,
        EventKind.CHECKPOINT,
        EventKind.STOP,
    ]


def test_wall_clock_gives_replies_as_they_arrive_and_alarms_when_due() -> None:
    clock = WallClock(poll_interval=0.01)
    clock.schedule(Event(50_000, EventKind.CHECKPOINT, 1))
    batches = iter([["a", "b"], [], []])
    events = [clock.next(lambda: next(batches, [])) for _ in range(3)]
    assert [event.subject for event in events] == ["a", "b", 1]
    assert events[2].kind is EventKind.CHECKPOINT
    assert events[2].time >= 50_000
    assert [event.time for event in events] == sorted(event.time for event in events)


def test_wall_clock_is_monotonic_and_counts_from_its_beginning() -> None:
    clock = WallClock()
    first = clock.now()
    time.sleep(0.01)
    assert 0 <= first < 1_000_000
    assert clock.now() - first >= 9_000
