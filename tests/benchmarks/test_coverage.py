"""`python -m benchmarks coverage`: the simulation, and the figures that are kept of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from click.testing import CliRunner

from benchmarks import coverage
from benchmarks.__main__ import command

KEPT = Path(coverage.__file__).parent / "results/coverage-seeds.json"


def test_the_pooled_interval_covers_what_it_says_and_others_do_not() -> None:
    """The twin is the interval that takes answers for questions: it is far too narrow."""
    found = coverage.measure_shape(np.random.default_rng(1), 1000, 30, 5, 0.9, 1.0)
    assert 0.91 <= found["pooled"]["coverage"] <= 0.98
    assert found["independent"]["coverage"] < 0.85 < found["clustered"]["coverage"]
    assert found["pooled"]["width"] > found["independent"]["width"] > 0


def test_the_command_shows_a_row_for_each_shape(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    result = CliRunner().invoke(command, ["coverage", "--suites", "10", "--json", str(path)])
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    shapes = len(coverage.QUESTIONS) * len(coverage.SEEDS) * len(coverage.KINDS)
    assert len(report["rows"]) == shapes and report["settings"] == {"suites": 10, "seed": 0}
    assert "10 simulated suites a row" in result.output


def test_the_kept_figures_are_those_of_the_page() -> None:
    """docs/evals.md says the smallest coverage from 100 questions on, and of all shapes."""
    report = json.loads(KEPT.read_text())
    lowest = {
        least: min(row["pooled"]["coverage"] for row in report["rows"] if row["questions"] >= least)
        for least in (10, 100)
    }
    text = " ".join((KEPT.parents[2] / "docs/evals.md").read_text().split())
    assert f"{lowest[100]:.1%}".replace("%", " %") in text and f"{lowest[10]:.1%}".replace("%", " %") in text
    assert report["settings"]["suites"] >= 4000 and "coverage" in report["command"]
