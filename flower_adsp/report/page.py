"""One page about one run or several, which needs no other file, and its figures as files."""

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flower_adsp.errors import ConfigError
from flower_adsp.report.runs import Run, read_run
from flower_adsp.tracking.files import REPORT

FIGURE_FOLDER = "figures"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem;
  color: #1a1a1a; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th { border-bottom: 2px solid #666; font-weight: 600; }
th:first-child, td:first-child, td.text { text-align: left; }
img { max-width: 100%; height: auto; }
.note { border-left: 4px solid #D55E00; padding: .3rem .8rem; background: #fdf3ec; }
details pre { overflow-x: auto; background: #f5f5f5; padding: .8rem; }
@media print { body { margin: 0; max-width: none; } h2, img, tr { break-inside: avoid; } }
"""


def write_report(folders: Sequence[Path], output: Path) -> Path:
    """Write ``report.html`` about runs, and its figures as PNG and SVG.

    Parameters
    ----------
    folders : Sequence[Path]
        Folders of runs. With more than one, the page compares them.
    output : Path
        Folder for ``report.html`` and the folder ``figures``.

    Returns
    -------
    Path
        The page.

    Raises
    ------
    UnreadableRun
        If a folder holds no run, or a damaged one.
    ConfigError
        If matplotlib is not installed.
    """
    runs = [read_run(folder) for folder in folders]
    sections = _comparison(runs) if len(runs) > 1 else _single(runs[0])
    sections += _figures(runs, output / FIGURE_FOLDER)
    sections += [_settings(run) for run in runs]
    title = " and ".join(dict.fromkeys(run.name for run in runs))
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n" + "\n".join(sections) + "\n</body>\n</html>\n"
    )
    path = output / REPORT
    partial = path.with_suffix(".partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(path)
    return path


def comparison_rows(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table that compares runs.

    A figure that a run does not have, such as the accuracy of one that is not whole, is ``-``.
    """
    head = [
        "run", "seconds to target", "loss", "accuracy", "seconds", "commits", "steps",
        "computing", "blocked", "MB up", "MB down",
    ]  # fmt: skip
    return head, [_comparison_row(run) for run in runs]


def _comparison_row(run: Run) -> list[str]:
    numbers = run.summary
    devices = numbers.get("devices", [])

    def mean(key: str) -> str:
        return _percent(sum(d[key] for d in devices) / len(devices)) if devices else "-"

    test = numbers.get("test", {})
    return [
        run.name,
        _number(numbers.get("seconds_to_target"), ".1f"),
        _number(test.get("loss"), ".4f"),
        _number(test.get("accuracy"), ".4f"),
        _number(numbers.get("seconds", run.end), ".1f"),
        _number(numbers.get("commits"), "d"),
        _number(numbers.get("steps"), "d"),
        mean("computing"),
        mean("blocked"),
        _number(_megabytes(numbers.get("bytes_up")), ".1f"),
        _number(_megabytes(numbers.get("bytes_down")), ".1f"),
    ]


def _comparison(runs: Sequence[Run]) -> list[str]:
    head, rows = comparison_rows(runs)
    sections = [_notes(run) for run in runs if run.notes] + [
        "<h2>Comparison</h2>",
        _table(head, rows),
        _same_settings(runs),
    ]
    return [section for section in sections if section]


def _same_settings(runs: Sequence[Run]) -> str:
    """Say what, besides the strategy, is not the same in all runs."""
    different = []
    for key in ("seed", "devices", "network", "task", "train", "run", "plan"):
        values = [run.settings.get(key) for run in runs]
        if any(value != values[0] for value in values):
            different.append(key)
    if different:
        return (
            '<p class="note">Beside the strategy, the runs differ in '
            f"{html.escape(', '.join(different))}; see their settings below.</p>"
        )
    return "<p>All runs have the same seed, devices, network, data and training.</p>"


def _single(run: Run) -> list[str]:
    numbers = run.summary
    sections = [_notes(run)] if run.notes else []
    if not numbers:
        return sections
    head, rows = comparison_rows([run])
    sections += ["<h2>In short</h2>", _table(head, rows)]
    if "H" in numbers:
        sections.append(
            f"<p>{len(run.devices)} devices, H = {numbers['H']:.2f}: not waiting can save at most "
            f"1 &minus; 1/H = {_percent(numbers['not_waiting_limit'])} of the time at equal total "
            f"steps. Commits refused: {numbers['refused']}.</p>"
        )
    if numbers.get("devices"):
        head = ["worker", "device", "steps/s", "steps", "commits", "computing", "communicating",
                "blocked", "refused"]  # fmt: skip
        rows = [
            [
                str(row["worker"]),
                row["device"],
                f"{row['speed']:.3f}",
                str(row["steps"]),
                str(row["commits"]),
                *(_percent(row[key]) for key in ("computing", "communicating", "blocked")),
                ", ".join(f"{count} {kind}" for kind, count in row["refused"].items()) or "0",
            ]
            for row in numbers["devices"]
        ]
        sections += ["<h2>Devices</h2>", _table(head, rows)]
    return sections


def _figures(runs: Sequence[Run], folder: Path) -> list[str]:
    """Draw what there is to draw, save it, and return it as sections."""
    try:
        from flower_adsp.report.figures import FIGURES, save_figure
    except ImportError as error:
        raise ConfigError(
            f"a report needs matplotlib ({error}); pip install 'flower-adsp[report]' brings it"
        ) from None
    sections = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, title, make, shows_several in FIGURES:
        each = [list(runs)] if shows_several else [[run] for run in runs]
        for number, shown in enumerate(each):
            figure = make(shown)
            if figure is None:
                continue
            many = len(each) > 1
            stem = f"{name}-{number + 1}" if many else name
            save_figure(figure, folder, stem)
            heading = f"{title}: {shown[0].name}" if many else title
            sections += [
                f"<h2>{html.escape(heading)}</h2>",
                _image(folder / f"{stem}.svg", heading),
            ]
    return sections


def _image(path: Path, description: str) -> str:
    encoded = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{html.escape(description)}" src="data:image/svg+xml;base64,{encoded}">'


def _settings(run: Run) -> str:
    lines = io.StringIO()
    for section, content in sorted(run.settings.items()):
        if isinstance(content, Mapping):
            lines.writelines(f"{section}.{key} = {value}\n" for key, value in content.items())
        else:
            lines.write(f"{section} = {content}\n")
    return (
        f"<details><summary>Settings of {html.escape(run.name)}</summary>"
        f"<pre>{html.escape(lines.getvalue())}</pre></details>"
    )


def _notes(run: Run) -> str:
    return "\n".join(
        f'<p class="note">{html.escape(run.folder.name)}: {html.escape(note)}</p>'
        for note in run.notes
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ['<div class="wide"><table>', "<tr>"]
    lines += [f"<th>{html.escape(cell)}</th>" for cell in head]
    lines.append("</tr>")
    for row in rows:
        lines.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>")
    return "\n".join([*lines, "</table></div>"])


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "-"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _megabytes(count: Any) -> float | None:
    return count / 1e6 if isinstance(count, int) else None
