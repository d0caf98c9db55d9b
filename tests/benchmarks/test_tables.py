"""The tables of README and docs/benchmarks.md have the figures of benchmarks/results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tables import (
    BLOCK,
    MEMORY,
    PAGES,
    TABLES,
    fill_tables,
    format_figure,
    format_ratio,
    make_table,
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert BLOCK.search(text)
    assert fill_tables(text) == text, "python -m benchmarks.tables"


def test_every_kept_engine_result_is_in_a_table() -> None:
    names = [name for page in PAGES for _, name, _ in BLOCK.findall(page.read_text(encoding="utf-8"))]
    assert sorted(names) == sorted(TABLES)


def test_predicted_peaks_are_within_ten_percent() -> None:
    ratios = [float(row.split(" | ")[-1].rstrip(" |")) for row in make_table(MEMORY)[2:]]
    assert len(ratios) >= 12 and all(0.9 <= ratio <= 1.1 for ratio in ratios)


def test_a_changed_figure_is_found() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    assert fill_tables(text.replace(" tok/s |", "1 tok/s |", 1)) == text


def test_a_table_that_nothing_makes_is_an_error() -> None:
    with pytest.raises(KeyError):
        fill_tables("<!-- measured: nothing -->\n\nold\n\n<!-- end -->")


def test_figures_have_units() -> None:
    values = {"wall_s": (0.0264, 1.653, 16.94), "peak_bytes": (56e6, 114.087e9), "decode_tps": (4365.2,)}
    shown = [format_figure(value, measure) for measure, each in values.items() for value in each]
    assert shown == ["26 ms", "1.65 s", "16.9 s", "56 MB", "114.1 GB", "4,365 tok/s"]
    assert [*map(format_ratio, (0.826, 9.994, 16.55, 195.2))] == ["0.83", "9.99", "16.6", "195"]
