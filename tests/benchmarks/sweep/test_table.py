"""The page of models: versions, counts, and a row for each family."""

from __future__ import annotations

from benchmarks.sweep.family import FamilyResult
from benchmarks.sweep.left_out import LEFT_OUT
from benchmarks.sweep.table import render_markdown, summarize

RESULTS = [
    FamilyResult("text", "b", "slower", "rows decode one by one", 1e-6),
    FamilyResult("text", "A", "exact", "", 0.0),
    FamilyResult("text", "c", "refused", "a | b"),
]


def test_the_page() -> None:
    page = render_markdown(RESULTS, {"mlx": "1.2", "mlx-lm": "3.4"})
    assert "with mlx 1.2, mlx-lm 3.4." in page
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [
        "| `A` | exact |  |",
        "| `b` | exact by a slower way | rows decode one by one |",
        "| `c` | refused | a \\| b |",
    ]
    assert "## Vision" not in page and "Not checked" not in page


def test_the_page_names_the_vision_families_that_are_left_out() -> None:
    page = render_markdown([FamilyResult("vision", "llava", "exact")], {})
    assert "Not checked, with the reason:" in page
    for reason, families in LEFT_OUT.items():
        line = next(line for line in page.splitlines() if line.startswith(f"- {reason}: "))
        assert all(f"`{family}`" in line for family in families)


def test_the_summary_counts_each_result() -> None:
    assert summarize(RESULTS) == "3 families: 1 exact, 1 exact by a slower way, 1 refused"
