"""docs/suites.md is made from the settings of suites."""

from __future__ import annotations

from mlxrun.evals.suites.suite_reference import render_suite_files, render_suite_reference


def test_generated_files_are_up_to_date() -> None:
    for path, text in render_suite_files().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run `make generate`"


def test_the_page_has_every_key_with_its_type_and_default() -> None:
    page = render_suite_reference()
    assert "| `count` | integer, 1 to 1000 | `5` | Number of examples. |" in page
    assert "| `endpoint` | chat \\| completion | `chat` |" in page
    assert "| `models` | mapping | required |" in page
    assert "| `limit` | integer or null, 1 or more | `null` |" in page
