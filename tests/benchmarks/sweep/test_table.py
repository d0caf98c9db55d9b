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


def test_audio_is_a_column_of_families_that_see() -> None:
    results = [
        *(FamilyResult("vision", "a", "exact"), FamilyResult("vision", "b", "refused", "why")),
        FamilyResult("vision", "mimo_v2", "exact"),
        *(FamilyResult("audio", "a", "exact", "x | y"), FamilyResult("audio", "b", "refused", "why")),
    ]
    rows = [line for line in render_markdown(results, {}).splitlines() if line.startswith("| `")]
    assert rows == [
        "| `a` | exact |  | exact: x \\| y |",
        "| `b` | refused | why | refused |",
        "| `mimo_v2` | exact |  | refused: its processor encodes sounds with a model of its own |",
    ]


def test_the_summary_counts_each_result() -> None:
    assert summarize(RESULTS) == "3 families: 1 exact, 1 exact by a slower way, 1 refused"
