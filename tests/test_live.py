"""The live view, against the histories of real runs."""

import io
import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from flower_adsp.live import Follower, LiveView

SHORT = "strategy.check_period=10 run.num_rounds=2"


def shown(follower: Follower) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(follower.progress.render())
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_it_comes_to_what_the_summary_says(run_folder: Callable[..., Path]) -> None:
    folder = run_folder("run", devices="adsp-ec2", overrides=SHORT)
    summary = json.loads((folder / "summary.json").read_text())
    follower = Follower(folder)
    assert follower.read()
    assert not follower.read()
    progress = follower.progress
    assert progress.is_over
    assert (progress.commits, progress.seconds) == (summary["commits"], summary["seconds"])
    assert progress.figures["loss"] == summary["validation"]["loss"]
    for row in summary["devices"]:
        standing = progress.devices[row["worker"]]
        assert standing.commits == row["commits"]
        assert standing.computing <= row["computing"] * summary["seconds"] + 1e-6
    text = shown(follower)
    assert "Adsp" in text
    assert "t2.large" in text


def test_a_growing_history_is_read_in_pieces(run_folder: Callable[..., Path]) -> None:
    folder = run_folder("run", overrides=SHORT)
    history = folder / "history.jsonl"
    whole = history.read_bytes()
    reference = Follower(folder)
    reference.read()
    history.write_bytes(b"")
    follower = Follower(folder)
    for start in range(0, len(whole), 97):
        with history.open("ab") as file:
            file.write(whole[start : start + 97])
        follower.read()
    assert follower.progress == reference.progress
    history.write_bytes(whole[: whole.index(b"\n") + 1])  # as a resumed run cuts it
    follower.read()
    assert follower.progress.commits == 0


def test_many_devices_and_none_yet(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert not follower.read()
    assert "starting" in shown(follower)
    workers = [{"id": number, "device": "d"} for number in range(100)]
    record = {"event": "start", "t": 0.0, "strategy": "Adsp", "workers": workers}
    (tmp_path / "history.jsonl").write_text(json.dumps(record) + "\n")
    follower.read()
    assert "and 60 more devices" in shown(follower)


def test_the_view_draws_the_end(run_folder: Callable[..., Path]) -> None:
    folder = run_folder("run", overrides=SHORT)
    file = io.StringIO()
    with LiveView(folder, Console(file=file, force_terminal=True, width=140)):
        pass
    assert "round 2" in file.getvalue()
