"""The files of a run, read and put in order for figures and tables."""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from flower_adsp.errors import FlowerAdspError
from flower_adsp.tracking.files import CONFIG, HISTORY, SUMMARY

Record = Mapping[str, Any]

COMPUTING, COMMUNICATING, BLOCKED, AWAY = "computing", "communicating", "blocked", "away"
OPEN = "not reported yet"


class UnreadableRun(FlowerAdspError, ValueError):
    """A folder does not hold what a report needs."""


@dataclass(frozen=True)
class Span:
    """What a device did from one second of the run's clock to another.

    Attributes
    ----------
    start, end : float
        Seconds of the run's clock.
    activity : str
        ``computing``, ``communicating``, ``blocked``, ``away`` or ``not reported yet``, which is
        all that can be said after a device's latest answer.
    """

    start: float
    end: float
    activity: str


@dataclass(frozen=True)
class Run:
    """A run as its folder describes it.

    Attributes
    ----------
    folder : Path
        Where its files are.
    records : list[Record]
        The lines of ``history.jsonl``.
    summary : Mapping[str, Any]
        What ``summary.json`` holds; empty for a run that has not come to its end.
    settings : Mapping[str, Any]
        The settings of ``config.json``; empty where there is none.
    notes : list[str]
        What the reader of a report has to know: that the run is not whole, for instance.
    """

    folder: Path
    records: list[Record]
    summary: Mapping[str, Any]
    settings: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The strategy's name, as the settings give it."""
        strategy = self.settings.get("strategy", {})
        return str(strategy.get("name") or self.records[0].get("strategy") or self.folder.name)

    @cached_property
    def end(self) -> float:
        """The last second that the history tells of."""
        return float(self.records[-1]["t"])

    def events(self, *names: str) -> list[Record]:
        """Return the records of these events, in order."""
        return [record for record in self.records if record["event"] in names]

    @cached_property
    def devices(self) -> dict[int, str]:
        """The device of each worker, by the worker's number."""
        found = {worker["id"]: worker["device"] for worker in self.records[0]["workers"]}
        for record in self.events("joined"):
            found[record["worker"]] = record["device"]
        return dict(sorted(found.items()))

    @cached_property
    def commits(self) -> dict[int, list[Record]]:
        """Each worker's commits, in order."""
        found: dict[int, list[Record]] = {worker: [] for worker in self.devices}
        for record in self.events("commit"):
            found[record["worker"]].append(record)
        return found

    @cached_property
    def spans(self) -> dict[int, list[Span]]:
        """What each worker did, without gaps from its first assignment on."""
        answers: dict[int, list[Record]] = defaultdict(list)
        for record in self.events("commit", "refused"):
            if "released" in record:
                answers[record["worker"]].append(record)
        absences = self._absences()
        return {
            worker: _spans(answers[worker], absences.get(worker, []), self.end)
            for worker in self.devices
        }

    def _absences(self) -> dict[int, list[tuple[float, float]]]:
        left: dict[int, float] = {}
        found: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for record in self.events("away", "resting", "back", "rested"):
            worker = record["worker"]
            if record["event"] in ("away", "resting"):
                left.setdefault(worker, record["t"])
            elif worker in left:
                found[worker].append((left.pop(worker), record["t"]))
        for worker, start in left.items():
            found[worker].append((start, self.end))
        return found


def _spans(answers: list[Record], absences: list[tuple[float, float]], end: float) -> list[Span]:
    """Return what one worker did between its release for the first assignment and the end."""
    spans: list[Span] = []
    now = None
    for record in answers:
        released, started = record["released"], record["started"]
        trained = record.get("trained", record["t"])
        began = min(released, started)  # with slices, a first forward pass may begin before
        if now is not None:
            spans[-1] = replace(spans[-1], end=min(now, began))
            spans += _idle(now, began, absences)
        spans.append(Span(began, started, COMMUNICATING))
        spans.append(Span(started, max(started, trained), COMPUTING))
        spans.append(Span(max(started, trained), record["t"], COMMUNICATING))
        now = record["t"]
    rest = _idle(0.0 if now is None else now, end, absences)
    spans += [span if span.activity == AWAY else replace(span, activity=OPEN) for span in rest]
    return [span for span in spans if span.end > span.start]


def _idle(start: float, end: float, absences: list[tuple[float, float]]) -> list[Span]:
    """Return the time without an assignment, cut into absence and waiting."""
    spans, now = [], start
    for left, back in absences:
        left, back = max(left, now), min(back, end)
        if back > left:
            spans += [Span(now, left, BLOCKED), Span(left, back, AWAY)]
            now = back
    return [*spans, Span(now, end, BLOCKED)]


def read_run(folder: Path) -> Run:
    """Read a run's folder.

    Parameters
    ----------
    folder : Path
        A folder that ``flower-adsp run`` or ``flwr run`` has written; the run may still go on, or
        have been cut off.

    Returns
    -------
    Run
        The run, with a note for each file that is missing or not whole.

    Raises
    ------
    UnreadableRun
        If there is no history, or one that is damaged other than at its end.
    """
    if not folder.is_dir():
        raise UnreadableRun(f"there is no folder {folder}")
    history = folder / HISTORY
    if not history.is_file():
        raise UnreadableRun(
            f"{folder} holds no {HISTORY}; a report needs the folder of a run of one of this "
            "package's strategies, which print it when they start"
        )
    notes: list[str] = []
    records = _read_history(history, notes)
    summary = _read_json(folder / SUMMARY)
    if not summary:
        notes.append(
            f"The run has not come to its end: there is no {SUMMARY}. "
            f"`flower-adsp resume {folder}` goes on with it."
        )
    settings = _read_json(folder / CONFIG).get("settings", {})
    return Run(folder, records, summary, settings or summary.get("config", {}), notes)


def _read_history(path: Path, notes: list[str]) -> list[Record]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            _check(record, records)
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines) and records and not line.endswith("\n"):
                notes.append(f"The last line of {HISTORY} is cut off and was left out.")
                break
            raise UnreadableRun(
                f"{path}, line {number}, is not a record of a run ({error}): {line[:60]!r}; "
                "restore the file, or delete that line to make the report without it"
            ) from None
        records.append(record)
    if not records:
        raise UnreadableRun(f"{path} is empty; the run ended before it had begun")
    return records


def _check(record: Any, earlier: list[Record]) -> None:
    """Raise if a record lacks what all have, or what its kind has."""
    if not isinstance(record, dict):
        raise TypeError("not a JSON object")
    float(record["t"])
    if record["event"] == "start":
        for worker in record["workers"]:
            int(worker["id"]), str(worker["device"])
    elif not earlier:
        raise ValueError("the first event must be 'start'")
    elif record["event"] == "commit":
        int(record["worker"]), float(record["loss"]), int(record["steps"])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UnreadableRun(f"{path} is not JSON: {error}; delete it, or restore it") from None
    if not isinstance(content, dict):
        raise UnreadableRun(f"{path} holds no JSON object")
    return content
