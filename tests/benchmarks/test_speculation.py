"""`python -m benchmarks speculation`: a small run; how fast it is is not asserted."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner
from mlx_lm.utils import load_model

from benchmarks import mtp_model
from benchmarks.__main__ import command
from mlxrun.model.load_check.report import LoadCheckReport
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.speculation import build


def test_answers_are_forced_drafted_and_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = LoadCheckReport(ComputeMethods("paged"), ())
    monkeypatch.setattr("mlxrun.model.model_loading.choose_methods", lambda *given: chosen)
    monkeypatch.setattr("mlxrun.engine.build_drafts.find_device_problem", lambda: None)
    out = tmp_path / "report.json"
    given = ["speculation", "--scale", "0.1", "--repeat", "1", "--rows", "1", "--json", str(out)]
    given += ["--workload", "edit", "--workload", "prose"]
    done = CliRunner().invoke(command, given, standalone_mode=False)
    assert done.exception is None, done.output
    found = json.loads(out.read_text())["workloads"]
    assert found["edit, 1 rows"]["accepted"] > 20 > found["prose, 1 rows"]["accepted"]
    assert all(case["differing_answers"] == 0 for case in found.values())


def test_a_draft_model_agrees_as_often_as_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = LoadCheckReport(ComputeMethods("paged"), ())
    monkeypatch.setattr("mlxrun.model.model_loading.choose_methods", lambda *given: chosen)
    monkeypatch.setattr("mlxrun.engine.build_drafts.find_device_problem", lambda: None)
    seconds = iter((0.05, 1.0, 1.0, 1.0))
    monkeypatch.setattr(build, "time_step", lambda *given: next(seconds))
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


def run(tmp_path: Path, *given: str) -> dict[str, Any]:
    out = tmp_path / "report.json"
    options = ["--scale", "0.1", "--repeat", "1", "--rows", "1", "--json", str(out)]
    done = CliRunner().invoke(command, ["speculation", *options, *given], standalone_mode=False)
    assert done.exception is None, done.output
    return dict(json.loads(out.read_text()))


@pytest.fixture
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding by pages on a CPU, where drafts cost nothing."""
    chosen = LoadCheckReport(ComputeMethods("paged"), ())
    monkeypatch.setattr("mlxrun.model.model_loading.choose_methods", lambda *given: chosen)
    monkeypatch.setattr("mlxrun.engine.build_drafts.find_device_problem", lambda: None)
    monkeypatch.setattr("mlxrun.engine.build_drafts.measure_row_cost", lambda *given: 0.0)
    monkeypatch.setattr(build, "time_draft", lambda *given: 0.0)


@pytest.mark.usefixtures("free_drafts")
def test_a_preset_gets_a_head_that_agrees_as_often_as_it_is_told(tmp_path: Path) -> None:
    report = run(tmp_path, "--method", "mtp", "--workload", "prose", "--acceptance", "0.9")
    assert report["drafts"]["method"] == "mtp" and report["drafts"]["problem"] is None
    found = report["workloads"]["prose, 1 rows"]
    assert 0.3 < found["accepted"] / found["drafted"] < 0.95 and found["accepted"] > 20
    assert found["differing_answers"] == 0


@pytest.mark.usefixtures("free_drafts")
def test_a_model_is_trained_with_its_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two steps it predicts little."""
    monkeypatch.setattr(mtp_model, "LENGTH", 48)
    monkeypatch.setattr(mtp_model, "train_mtp_model", partial(mtp_model.train_mtp_model, steps=2))
    report = run(tmp_path, "--method", "mtp", "--model", "trained")
    found = report["workloads"]["language, 1 rows"]
    assert found["drafted"] > 0 and found["differing_answers"] == 0


def test_added_layers_add_nothing(tmp_path: Path) -> None:
    mtp_model.train_mtp_model(tmp_path, print, steps=1)
    tokens = mx.array(mtp_model.make_prompts(2, 20))
    before = load_model(tmp_path, strict=False)[0](tokens)
    mtp_model.add_layers(tmp_path, 5)
    deeper = load_model(tmp_path, strict=False)[0]
    assert len(deeper.layers) == 5 and mx.array_equal(deeper(tokens), before)


def test_the_language_is_for_the_trained_model(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["speculation", "--workload", "language"], standalone_mode=False)
    assert "--workload language needs --model trained" in str(done.exception)
