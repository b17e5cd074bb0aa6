"""What all benchmarks share: their options, their tables, and the files they write."""

import argparse
import json
import platform
import resource
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flower_adsp.messages import software_versions


def arguments(description: str) -> argparse.Namespace:
    """Return the options ``--quick`` and ``--json FILE``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a smaller version, within minutes")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser.parse_args()


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print rows as a table."""
    cells = [[_text(row.get(column)) for column in columns] for row in rows]
    widths = [
        max(len(column), *(len(line[index]) for line in cells))
        for index, column in enumerate(columns)
    ]
    for line in [list(columns), *cells]:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def median(seconds: Sequence[float | None]) -> float | None:
    """Return the median, a run that never got there counting as infinite; None if that is it."""
    value = statistics.median(float("inf") if s is None else s for s in seconds)
    return None if value == float("inf") else value


def write(path: Path | None, seeds: Sequence[int], **content: Any) -> None:
    """Write the results with what is needed to make them again."""
    if path is None:
        return
    whole = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "seeds": list(seeds),
        "versions": {**software_versions(), "machine": platform.machine()},
        **content,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def peak_resident() -> int:
    """Return the most memory, in bytes, that this process has had resident.

    Linux counts what the parent had when it started this one in ``ru_maxrss``, so it is not asked.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
