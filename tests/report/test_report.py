"""Reports, from whole runs and from what is left of others."""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flower_adsp.report.page import comparison_rows, write_report
from flower_adsp.report.runs import AWAY, COMPUTING, OPEN, Span, UnreadableRun, read_run

Runner = Callable[..., Path]
SHORT = "strategy.check_period=10 run.num_rounds=2"


def write_history(folder: Path, *records: dict[str, Any], end: str = "\n") -> Path:
    folder.mkdir(exist_ok=True)
    text = "\n".join(json.dumps(record) for record in records) + end
    (folder / "history.jsonl").write_text(text)
    return folder


def start(*devices: str) -> dict[str, Any]:
    workers = [{"id": number, "device": name} for number, name in enumerate(devices)]
    return {"event": "start", "t": 0.0, "strategy": "Adsp", "workers": workers}


def commit(worker: int, released: float, started: float, trained: float, t: float) -> Any:
    times = {"released": released, "started": started, "trained": trained}
    return {"event": "commit", "t": t, "worker": worker, "loss": 1.0, "steps": 2, **times}


def test_spans_say_what_a_device_did(tmp_path: Path) -> None:
    folder = write_history(
        tmp_path / "run",
        start("slow", "idle"),
        commit(0, 0.0, 1.0, 5.0, 6.0),
        {"event": "away", "t": 7.0, "worker": 0},
        {"event": "back", "t": 9.0, "worker": 0},
        commit(0, 10.0, 10.0, 14.0, 14.5),
        {"event": "end", "t": 20.0},
    )
    run = read_run(folder)
    assert run.spans[0] == [
        Span(0.0, 1.0, "communicating"),
        Span(1.0, 5.0, "computing"),
        Span(5.0, 6.0, "communicating"),
        Span(6.0, 7.0, "blocked"),
        Span(7.0, 9.0, "away"),
        Span(9.0, 10.0, "blocked"),
        Span(10.0, 14.0, "computing"),
        Span(14.0, 14.5, "communicating"),
        Span(14.5, 20.0, OPEN),
    ]
    assert run.spans[1] == [Span(0.0, 20.0, OPEN)]
    assert len(run.commits[0]) == 2


def test_spans_of_a_real_run_add_up_to_its_summary(run_folder: Runner) -> None:
    run = read_run(run_folder("run", devices="coming-and-going", overrides=SHORT + "0"))
    assert {span.activity for spans in run.spans.values() for span in spans} >= {COMPUTING, AWAY}
    for worker, spans in run.spans.items():
        assert all(a.end == pytest.approx(b.start) for a, b in pairwise(spans))
        assert spans[-1].end == pytest.approx(run.end)
        assert len(run.commits[worker]) == run.summary["devices"][worker]["commits"]


def test_a_page_needs_no_other_file_and_its_figures_stand_beside_it(run_folder: Runner) -> None:
    folder = run_folder(
        "run",
        strategy="adsp-search",
        plan="dsparse",
        task="mnist-resnet",
        overrides="strategy.check_period=30 run.num_rounds=2 task.batch_size=2",
    )
    page = write_report([folder], folder).read_text()
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    names = {path.name for path in (folder / "figures").iterdir()}
    stems = ("loss", "timeline", "commit-rate", "plan", "memory", "traffic")
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")}
    assert page.count("<img") == len(stems)
    for said in ("Who trains which layers", "H = ", "strategy.check_period = 30"):
        assert said in page
    assert (folder / "figures" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_run_gives_the_same_page(run_folder: Runner, tmp_path: Path) -> None:
    folder = run_folder("run", overrides=SHORT)
    pages = [
        write_report([folder], tmp_path / name).read_bytes()
        for name in ("a", "b")
        if (tmp_path / name).mkdir() is None
    ]
    assert pages[0] == pages[1]


def test_several_runs_are_compared(run_folder: Runner, tmp_path: Path) -> None:
    first = run_folder("first", overrides=SHORT)
    second = run_folder("second", strategy="fedasync", overrides="run.num_rounds=20")
    third = run_folder("third", strategy="fedasync", overrides="run.num_rounds=20", seed=1)
    head, rows = comparison_rows([read_run(first), read_run(second)])
    assert [row[0] for row in rows] == ["adsp", "fedasync"]
    summary = json.loads((first / "summary.json").read_text())
    assert rows[0][head.index("accuracy")] == f"{summary['test']['accuracy']:.4f}"
    assert rows[0][head.index("commits")] == str(summary["commits"])
    page = write_report([second, third], tmp_path).read_text()
    assert "the runs differ in seed" in page
    assert page.count("Settings of fedasync") == 2


def test_half_a_run_is_reported_with_a_note(run_folder: Runner) -> None:
    folder = run_folder("run", overrides=SHORT)
    (folder / "summary.json").unlink()
    history = folder / "history.jsonl"
    history.write_bytes(history.read_bytes()[:-20])
    run = read_run(folder)
    assert any("has not come to its end" in note and "resume" in note for note in run.notes)
    assert any("cut off" in note for note in run.notes)
    page = write_report([folder], folder).read_text()
    assert "has not come to its end" in page
    assert "<img" in page


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, ["holds no history.jsonl"]),
        ("", ["is empty"]),
        ('{"event": "end", "t": 1}\n', ["line 1", "must be 'start'"]),
        ('{"event": "start", "t": 0, "workers": [{"id": 0}]}\n', ["line 1", "device"]),
        ("{half\n", ["line 1", "{half"]),
        ("[1]\n", ["line 1", "not a JSON object"]),
    ],
)
def test_a_folder_without_a_run_is_named(tmp_path: Path, text: str | None, said: list[str]) -> None:
    if text is not None:
        (tmp_path / "history.jsonl").write_text(text)
    with pytest.raises(UnreadableRun) as caught:
        read_run(tmp_path)
    for part in (str(tmp_path), *said):
        assert part in str(caught.value)


def test_a_damaged_line_is_named_by_its_number(tmp_path: Path) -> None:
    folder = write_history(tmp_path / "run", start("a"), commit(0, 0, 0, 1, 1))
    history = folder / "history.jsonl"
    history.write_text(history.read_text() + "#garbage\n" + '{"event": "end", "t": 2.0}\n')
    with pytest.raises(UnreadableRun, match=r"line 3.*#garbage.*delete that line"):
        read_run(folder)


def test_a_damaged_summary_is_named(tmp_path: Path) -> None:
    folder = write_history(tmp_path / "run", start("a"))
    (folder / "summary.json").write_text("{")
    with pytest.raises(UnreadableRun, match=r"summary\.json is not JSON"):
        read_run(folder)


def test_a_device_name_cannot_bring_markup_into_the_page(tmp_path: Path) -> None:
    folder = write_history(tmp_path / "run", start("a"), {"event": "end", "t": 1.0})
    (folder / "config.json").write_text(json.dumps({"settings": {"strategy": {"name": "<b>"}}}))
    page = write_report([folder], folder).read_text()
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
