"""`python -m benchmarks speculation`: a small run; how fast it is is not asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import command
from mlxrun.model.compute_methods import ComputeMethods
from mlxrun.model.probe.report import ProbeReport
from mlxrun.model.speculation import draft_build


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


def test_a_draft_model_agrees_as_often_as_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ProbeReport(ComputeMethods("paged"), ())
    monkeypatch.setattr("mlxrun.engine.factory.choose_methods", lambda *given: chosen)
    seconds = iter((0.05, 1.0))
    monkeypatch.setattr(draft_build, "time_step", lambda adapter, methods: next(seconds))
    out = tmp_path / "report.json"
    given = ["speculation", "--scale", "0.1", "--repeat", "1", "--rows", "1", "--json", str(out)]
    given += ["--workload", "prose", "--draft", "tiny", "--acceptance", "0.9"]
    done = CliRunner().invoke(command, given, standalone_mode=False)
    assert done.exception is None, done.output
    report = json.loads(out.read_text())
    assert report["drafts"] == {
        **{"method": "draft", "problem": None, "draft": "tiny", "acceptance": 0.9, "cost": 0.05}
    }
    found = report["workloads"]["prose, 1 rows"]
    assert 0.3 < found["accepted"] / found["drafted"] < 0.95 and found["accepted"] > 20
    assert found["differing_answers"] == 0
