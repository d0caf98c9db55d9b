"""`python -m benchmarks busy-cores` measures a small batch beside other programs on both sides."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.__main__ import command


def test_both_sides_are_measured(tmp_path: Path) -> None:
    sizes = ["--others", "0", "--others", "1", "--turns", "1"]
    done = CliRunner().invoke(command, ["busy-cores", *sizes, "--json", str(tmp_path / "report.json")])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "report.json").read_text())
    assert [row["others"] for row in found["rows"]] == [0, 1]
    assert all(seconds > 0 for row in found["rows"] for seconds in row["seconds"].values())
    assert "other programs" in done.output
