"""Families in a report: those of the sweep in a checkout, and a word about it where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.sweep.sweep import list_families
from mlxrun.cli.bench.serve.family_report import FAMILIES, SKIPPED, check_families, describe_families


def test_the_sweep_knows_them() -> None:
    assert len(set(FAMILIES)) == 10 and set(FAMILIES) <= {family for _, family in list_families()}


def test_the_wheel_says_that_it_has_none(tmp_path: Path) -> None:
    said: list[str] = []
    found = check_families(said.append, root=tmp_path)
    assert found == {"results": [], "skipped": SKIPPED} and SKIPPED in said[0]
    assert describe_families(found) == f"families: not checked: {SKIPPED}"


@pytest.mark.slow
def test_a_family_is_checked() -> None:
    found = check_families(lambda text: None, ("llama",))
    assert [(each["family"], each["status"]) for each in found["results"]] == [("llama", "exact")]
    assert describe_families(found) == "families: 1 of 1 answer as the library does"


def test_a_sweep_that_fails_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "benchmarks" / "sweep").mkdir(parents=True)
    for name, code in (("__init__", ""), ("__main__", "raise SystemExit(3)"), ("sweep/command", "")):
        (tmp_path / "benchmarks" / f"{name}.py").write_text(code)
    found = check_families(lambda text: None, ("llama",), tmp_path)
    assert found["results"] == [] and "sweep --json llama` ended with exit code 3" in found["skipped"]


def test_a_wrong_family_is_named() -> None:
    statuses = {"llama": "exact", "qwen2": "slower", "phi3": "wrong", "gpt_oss": "unbuilt"}
    results: list[dict[str, Any]] = [{"family": name, "status": each} for name, each in statuses.items()]
    text = describe_families({"results": results, "skipped": None})
    assert text == "families: 2 of 4 answer as the library does; phi3 wrong, gpt_oss unbuilt"
