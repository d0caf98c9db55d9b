"""The suites in jobs/short/, of at most fifteen lines each, on the built-in model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxrun.cli.main import main
from tests.helpers.batch_fakes import read

SHORT = Path(__file__).parents[3] / "jobs/short"
NAMES = ("gsm8k-like", "mmlu-like", "perplexity", "vqa", "tool-loop", "pass-at-k")


def test_these_are_all() -> None:
    assert {path.stem for path in SHORT.glob("*.yaml")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_fifteen_lines_are_enough(name: str, tmp_path: Path) -> None:
    """With the comment. Each has a score that the model can reach."""
    path = SHORT / f"{name}.yaml"
    assert len(path.read_text().splitlines()) <= 15
    flags = ["-o", str(tmp_path), "--limit", "3", "--set", "engine.load_check=false"]
    assert main(["eval", str(path), *flags]) == 0
    (cell,) = json.loads((tmp_path / "suite.json").read_text())["cells"]
    total, records = cell["scores"]["total"], read(tmp_path / cell["name"] / "job.out.jsonl")
    assert total["lines"] == len(records) >= 2 and not total.get("unscored")
    if name == "perplexity":
        assert total["value"] > 0 and total["measure"]["unit"] == "bits/byte"
        return
    assert total["share"] >= 0.5
    if name == "tool-loop":
        assert all(each["agent"]["calls"] == 1 for each in records)
    if name == "pass-at-k":
        assert all(each["eval"]["scores"].keys() == {"mean", "pass@1", "pass@3", "maj@3"} for each in records)
