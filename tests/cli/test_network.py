import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_adsp.cli import main
from flower_adsp.network.collectives import COLLECTIVES
from tests.network.test_trees import is_spanning


def test_trees_and_their_rivals_are_printed_and_written(tmp_path: Path) -> None:
    arguments = ["network", "plan", "--devices", "rpi-mixed", "--num-supernodes", "4"]
    result = CliRunner().invoke(main, [*arguments, "--output", str(tmp_path / "plan")])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    rows = {line.split()[0]: line.split() for line in lines[1 : 1 + len(COLLECTIVES)]}
    assert list(rows) == list(COLLECTIVES)
    written = json.loads((tmp_path / "plan" / "collective.json").read_text())
    for kind in COLLECTIVES:
        assert float(rows[kind][2]) == pytest.approx(written[kind]["reduce_mbps"], rel=1e-3)
    trees = written["packed-trees"]["trees"]
    assert sum(tree["part"] for tree in trees) == pytest.approx(1)
    for tree in trees:
        assert is_spanning(frozenset(map(tuple, tree["edges"])), 0, 5)
    assert sum("% of the data" in line for line in lines) == len(trees)
    assert (tmp_path / "plan" / "trees.svg").read_text().count("% of the data") >= 1
    assert (tmp_path / "plan" / "trees.png").stat().st_size > 1000


def test_wrong_settings_exit_with_2() -> None:
    result = CliRunner().invoke(main, ["network", "plan", "--devices", "toasters"])
    assert result.exit_code == 2
    assert "toasters" in result.output
