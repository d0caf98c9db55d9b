"""`python -m benchmarks decode-modes` times both modes."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.__main__ import command


def test_both_modes_are_timed(tmp_path: Path) -> None:
    sizes = ["--context", "20", "--steps", "2", "--turns", "1", "--rows", "2", "--rows", "3"]
    done = CliRunner().invoke(command, ["decode-modes", *sizes, "--json", str(tmp_path / "report.json")])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "report.json").read_text())
    assert [row["rows"] for row in found["rows"]] == [2, 3] and "reproducible, ms" in done.output
    assert all(row["ms"]["unchecked"] > 0 and row["ratio"]["reproducible"] > 0 for row in found["rows"])
