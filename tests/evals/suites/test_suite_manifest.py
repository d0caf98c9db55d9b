"""suite.json: what is kept from one start to the next, and what a damaged one loses."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import JobError
from mlxrun.evals.suites.suite_manifest import (
    SuiteManifest,
    print_matrix,
    read_suite_manifest,
    update_cell_scores,
)
from tests.helpers.suite_files import CAPITALS, read_cells, write_suite


def make(folder: Path, text: str = CAPITALS) -> SuiteManifest:
    file, cells, _ = read_cells(write_suite(folder, text))
    return SuiteManifest(folder, file, cells)


def test_two_starts(tmp_path: Path) -> None:
    file, (cell,), _ = read_cells(write_suite(tmp_path, CAPITALS))
    first = SuiteManifest(tmp_path, file, [cell])
    first.begin()
    first.count_load(["tiny"])
    first.update(cell, state="running", done=2)
    killed = read_suite_manifest(tmp_path / "suite.json")
    assert killed is not None and killed["state"] == "running" and killed["runs"][0]["ended"] is None
    second = make(tmp_path)
    second.begin()
    second.end(0, "done")
    found = json.loads((tmp_path / "suite.json").read_bytes())
    assert [run["loads"] for run in found["runs"]] == [{"tiny": 1}, {}]
    assert [run["exit"] for run in found["runs"]] == [None, 0]
    assert found["cells"][0]["done"] == 2 and found["cells"][0]["settings"] == {"seed": 0}
    assert found["cells"][0]["job"] == "tiny/capitals/seed-0/job.jsonl"
    assert found["suite"] == {"path": str(tmp_path / "suite.yaml"), "sha256": file.sha256}
    assert found["models"] == {"tiny": {"path": "embedded", "config": None, "set": {}}}
    assert found["tasks"] == ["capitals"]
    assert "mlx" in found["versions"]


def test_models_have_the_order_and_the_settings_of_the_suite(tmp_path: Path) -> None:
    text = CAPITALS.replace("{tiny: }", "{z: {set: {sampling.temperature: 0}}, a: , m: {config: m.yaml}}")
    (tmp_path / "m.yaml").write_text("sampling: {temperature: 1}\n")
    file, cells, _ = read_cells(write_suite(tmp_path, text))
    SuiteManifest(tmp_path, file, cells).begin()
    assert list(json.loads((tmp_path / "suite.json").read_bytes())["models"].items()) == [
        ("z", {"path": "embedded", "config": None, "set": {"sampling.temperature": 0}}),
        ("a", {"path": "embedded", "config": None, "set": {}}),
        ("m", {"path": "embedded", "config": "m.yaml", "set": {}}),
    ]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"format": 9, "cells": []}', b'{"format": 1, "cells": [1]}']
)
def test_a_damaged_one_loses_its_history_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "suite.json").write_bytes(content)
    assert read_suite_manifest(tmp_path / "suite.json") is None
    manifest = make(tmp_path)
    manifest.begin()
    assert len(json.loads((tmp_path / "suite.json").read_bytes())["runs"]) == 1


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    manifest = make(tmp_path)
    (tmp_path / "suite.json.tmp").mkdir()
    with pytest.raises(JobError, match=r"suite\.json: cannot be written"):
        manifest.begin()


def test_scores_of_a_cell_that_was_scored_again(tmp_path: Path) -> None:
    """Only its own. An output that is no cell, or one of a cell that is not listed, changes nothing."""
    manifest = make(tmp_path)
    manifest.begin()
    path = tmp_path / "suite.json"
    before = json.loads(path.read_bytes())
    scores = {"total": {"share": 0.5}}
    for name in ("tiny/capitals/seed-9/job.out.jsonl", "x.out.jsonl"):
        update_cell_scores(tmp_path / name, scores)
        assert json.loads(path.read_bytes()) == before
    update_cell_scores(tmp_path / "tiny/capitals/seed-0/job.out.jsonl", scores)
    after = json.loads(path.read_bytes())
    assert after["cells"][0].pop("scores") == scores
    before["cells"][0].pop("scores")
    assert after == before


def test_a_cell_that_is_scored_again_while_its_suite_runs(tmp_path: Path) -> None:
    """The suite's next change keeps the new scores, until the cell itself gets others."""
    file, (cell,), _ = read_cells(write_suite(tmp_path, CAPITALS))
    manifest = SuiteManifest(tmp_path, file, [cell])
    manifest.begin()
    manifest.update(cell, state="done", scores={"total": {"interval": (0.0, 0.5)}})
    out, other = tmp_path / cell.name / "job.out.jsonl", {"total": {"share": 0.5}}

    def read_scores() -> Any:
        return json.loads((tmp_path / "suite.json").read_bytes())["cells"][0]["scores"]

    update_cell_scores(out, other)
    manifest.count_load(["tiny"])
    assert read_scores() == manifest.records[cell.name]["scores"] == other
    manifest.update(cell, scores={"total": {"share": 1.0}})
    assert read_scores() == {"total": {"share": 1.0}}
    update_cell_scores(out, other)
    manifest.end(0, "done")
    assert read_scores() == other


RECORD = {
    "name": "n",
    "task": "t",
    "variant": "seed-0",
    "state": "done",
    "done": 4,
    "failed": 0,
    "cut_by_length": 0,
}


def make_scores(share: float, interval: list[float] | None) -> dict[str, Any]:
    return {"groups": {}, "total": {"share": share, "interval": interval}}


def test_the_matrix() -> None:
    broken = {"groups": {}, "total": {"share": 1, "interval": None, "unscored": 3}}
    records = [
        {**RECORD, "model": "a", "scores": make_scores(0.725, [0.651, 0.789])},
        {**RECORD, "model": "[b]", "scores": broken, "failed": 2, "cut_by_length": 1},
        {**RECORD, "model": "a", "task": "other", "scores": None},
        {**RECORD, "model": "[b]", "task": "other", "scores": None, "state": "failed"},
        {**RECORD, "model": "a", "task": "third", "scores": make_scores(0, None), "state": "todo"},
        {**RECORD, "model": "[b]", "task": "third", "scores": make_scores(0.5, None), "state": "failed"},
    ]
    stream = io.StringIO()
    print_matrix(records, stream)
    rows = [line.split("  ") for line in stream.getvalue().splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells == [
        ["task", "variant", "a", "[b]"],
        ["t", "seed-0", "72.5 % [65.1, 78.9]", "100.0 % (2 failed, 3 unscored, 1 cut)"],
        ["other", "seed-0", "4 lines", "failed"],
        ["third", "seed-0", "0.0 % (first 4)", "failed"],
    ]


def test_a_cell_without_a_score_has_none_of_zero() -> None:
    """Its scorer failed on every answer; one that gave 0 is shown as 0."""
    totals = [
        {"share": 0.0, "interval": [0, 0.1], "unscored": unscored, "lines": 4} for unscored in (4, 3, 0)
    ]
    records = [{**RECORD, "model": f"m{at}", "scores": {"total": each}} for at, each in enumerate(totals)]
    stream = io.StringIO()
    print_matrix(records, stream)
    row = stream.getvalue().splitlines()[1]
    assert "not scored (4 unscored)" in row
    assert "0.0 % [0.0, 10.0] (3 unscored)" in row and row.rstrip().endswith("0.0 % [0.0, 10.0]")


def test_the_matrix_has_a_row_of_all_seeds_after_theirs() -> None:
    scores, names = make_scores(0.5, [0.4, 0.6]), ("seed-1,k-2", "seed-2,k-2", "seed-3")
    records = [{**RECORD, "model": "a", "variant": name, "scores": scores, "name": name} for name in names]
    pool = {"cells": [*names[:2]], "share": 0.625, "interval": [0.55, 0.7], "seed_deviation": 0.0123}
    pool["scores"] = {"pass@2": 0.75, "pass^2": 0.5, "majority": 0.6}
    stream = io.StringIO()
    print_matrix(records, stream, [pool])
    rows = [line.split("  ") for line in stream.getvalue().splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [row[1] for row in cells] == ["variant", *names[:2], "all seeds,k-2", names[2]]
    assert cells[3][2] == "62.5 % [55.0, 70.0] (seeds ± 1.2, pass@2 75.0 %)"


def test_metrics_are_below_the_matrix() -> None:
    total = {"share": 0.95, "interval": [0.873, 1], "metrics": {"mean": 0.95, "pass@3": 1.0}}
    records = [
        {**RECORD, "model": "a", "scores": {"total": total}},
        {**RECORD, "model": "b", "scores": {"total": {**total, "metrics": {"maj@3": 0.5}}}},
        {**RECORD, "model": "c", "scores": make_scores(0.5, None)},
        {**RECORD, "model": "d", "scores": {"total": total}, "state": "failed"},
    ]
    stream = io.StringIO()
    print_matrix(records, stream)
    cells = [re.split(r"  +", line.strip()) for line in stream.getvalue().splitlines()[2:]]
    assert cells == [
        ["task", "variant", "model", "mean", "pass@3", "maj@3"],
        ["t", "seed-0", "a", "95.0 %", "100.0 %"],
        ["t", "seed-0", "b", "50.0 %"],
    ]
