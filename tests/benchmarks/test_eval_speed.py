"""Samples of the harness are read as records of the suite are, speeds leave the start out, the suite runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import eval_speed
from benchmarks.eval_speed import Side, _build_report, _parse_options, _read_samples, main
from mlxrun.cli.bench.models import find_folder


def test_answers_of_the_harness_are_the_likeliest_choice_and_the_text(tmp_path: Path) -> None:
    choices = [
        {
            "doc_id": 1,
            "resps": [[["-3.0", "False"]], [["-1.0", "False"]], [["-2.0", "False"]], [["-9.0", "False"]]],
        },
        {"doc_id": 0, "resps": [[[-3.0, False]], [[-4.0, False]], [[-5.0, False]], [[-2.5, False]]]},
    ]
    answers = [{"doc_id": 0, "resps": [[" red"]]}, {"doc_id": 1, "resps": [["blue "]]}]
    for task, rows in (("choices", choices), ("answers", answers)):
        path = tmp_path / "model" / f"samples_speed_{task}_2026.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert _read_samples(tmp_path) == [3, 1, "red", "blue"]


def test_speeds_are_of_the_rows_that_a_start_does_not_have() -> None:
    options = _parse_options(["--out", "a.json", "--rows", "52"])
    sides = [Side("suite", (), "", {}), Side("peer", (), "", {})]
    starts, wholes = {"suite": [90.0, 5.0], "peer": [9.0, 10.0]}, {"suite": [15.0], "peer": [60.0]}
    report = _build_report(options, sides, starts, wholes, {"suite": [1, "a"], "peer": [1, "b"]})
    assert [each["items_per_s"] for each in report["sides"].values()] == [10.0, 2.0]
    assert report["ratios"]["peer"] == {"items_per_s": 5.0, "whole": 4.0}
    assert report["sides"]["peer"]["same_as_suite"] == 1


@pytest.mark.sweep
def test_the_suite_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_speed, "START_ROWS", 1)
    out = tmp_path / "speed.json"
    assert (
        main(["--out", str(out), "--model", str(find_folder("embedded")), "--rows", "2", "--repeat", "1"])
        == 0
    )
    report = json.loads(out.read_text())
    assert report["items"] == 4 and report["sides"]["suite"]["same_as_suite"] == 4
