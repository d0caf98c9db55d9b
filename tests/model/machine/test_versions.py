"""The installed libraries beside the ranges that were tested."""

from __future__ import annotations

import pytest

from mlxrun.model.machine import versions
from mlxrun.model.machine.versions import check_versions, list_library_versions, read_requirements


def test_the_tested_ranges_are_the_packages_own_dependencies() -> None:
    names = {finding.name for finding in check_versions(read_requirements())}
    assert {"mlx", "mlx-lm", "mlx-vlm", "transformers"} <= names
    assert "pytest" not in names


@pytest.mark.parametrize(
    ("version", "level"),
    [("0.32.4", "ok"), ("0.32.9", "ok"), ("0.33.0", "off"), ("0.31.0", "off"), (None, "off")],
)
def test_a_version_outside_the_tested_range_is_off(
    version: str | None, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that moved is found by name, with the range that works."""
    monkeypatch.setattr(versions, "find_version", lambda name: version)
    (finding,) = check_versions(["mlx-lm>=0.32.2,<0.33"])
    assert finding.level == level
    assert finding.facts == {"installed": version, "tested": "<0.33,>=0.32.2"}
    assert ("pip install" in finding.advice) == (level == "off")


def test_requirements_of_other_platforms_and_extras_do_not_count() -> None:
    lines = ["click; platform_system == 'Nowhere'", "click; extra == 'dev'"]
    assert check_versions(lines) == []


def test_the_versions_that_decide_results_are_listed() -> None:
    found = list_library_versions()
    assert {"python", "mlx", "mlx-lm", "mlx-vlm", "transformers", "numpy"} <= set(found)
    assert all(found.values())
