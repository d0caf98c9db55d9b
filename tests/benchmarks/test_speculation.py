"""`python -m benchmarks speculation`: a small run; how fast it is is not asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import command
from mlxrun.model.compute_methods import ComputeMethods
from mlxrun.model.probe.report import ProbeReport


def test_answers_are_forced_drafted_and_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ProbeReport(ComputeMethods("paged"), ())
    monkeypatch.setattr("mlxrun.engine.factory.choose_methods", lambda *given: chosen)
    out = tmp_path / "report.json"
    given = ["speculation", "--scale", "0.1", "--repeat", "1", "--rows", "1", "--json", str(out)]
    given += ["--workload", "edit", "--workload", "prose"]
    done = CliRunner().invoke(command, given, standalone_mode=False)
    assert done.exception is None, done.output
    found = json.loads(out.read_text())["workloads"]
    assert found["edit, 1 rows"]["accepted"] > 20 > found["prose, 1 rows"]["accepted"]
    assert all(case["differing_answers"] == 0 for case in found.values())
