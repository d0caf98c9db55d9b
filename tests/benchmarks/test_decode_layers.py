"""`python -m benchmarks decode-layers` times both kinds of layers; a CPU computes both by the library."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.__main__ import command


def test_both_kinds_of_layers_are_timed(tmp_path: Path) -> None:
    sizes = ["--layers", "2", "--context", "40", "--steps", "2", "--turns", "1", "--rows", "2"]
    done = CliRunner().invoke(command, ["decode-layers", *sizes, "--json", str(tmp_path / "report.json")])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["check"] and [row["rows"] for row in found["rows"]] == [2]
    assert found["rows"][0]["library_ms"] > 0 and "gain" in done.output


def test_a_model_that_is_no_preset() -> None:
    done = CliRunner().invoke(command, ["decode-layers", "--model", "nothing"])
    assert "no preset" in str(done.exception)
