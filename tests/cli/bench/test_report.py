"""The tables of benchmark reports, and the notes below them."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from mlxrun.cli.bench.engine.measurement import MEASURES
from mlxrun.cli.bench.report import build_notes, build_rows, format_value, print_report
from tests.cli.bench.engine.test_benchmark import VOCAB, fake_sides

LONG = "inter-token p99 while the long prompt prefills"


def fake_report() -> dict[str, Any]:
    _, _, part = fake_sides(1)
    part["chunk"] = {"tokens": 512, "seconds": 0.5, "p99_in_chunks": {"mlxrun": 0.9, "mlx-lm": None}}
    return {
        "versions": {"mlxrun": "0.1"},
        "device": {"backend": "cpu", "name": "some CPU"},
        "model": {"name": "tiny", "dtype": "float32", "vocab": VOCAB},
        "settings": {"scale": 0.01, "repeat": 1},
        "workloads": {"uniform": part},
    }


def test_the_table_has_every_measure_with_values_and_the_ratio() -> None:
    report = fake_report()
    part = report["workloads"]["uniform"]
    cells = {row[0]: row[1:] for row in build_rows(part)}
    assert list(cells)[0] == "whole workload" and len(cells) == 10
    assert set(cells) == {
        m.title for key, m in MEASURES.items() if key in part["sides"]["mlxrun"]["runs"][0]
    } - {LONG}
    assert cells["whole workload"] == ("25.000 s", "28.000 s", "1.12")
    assert cells["peak memory"] == ("0.0 MB", "0.0 MB", "2.00")
    assert any("512 tokens" in line and "mlxrun 0.90" in line for line in build_notes(report))


def test_piped_it_is_a_markdown_table() -> None:
    out = io.StringIO()
    print_report(fake_report(), Console(file=out))
    lines = [line.strip() for line in out.getvalue().splitlines() if line.strip()]
    table = [line for line in lines if line.startswith("|")]
    assert table[0].split("|")[1].strip() == "workload"
    assert len({line.count("|") for line in table}) == 1 and len(table) == 2 + 10
    assert sum(set(line) <= set("|-:") for line in table) == 1


def test_without_a_peer_there_is_one_column_and_no_ratio() -> None:
    report = fake_report()
    part = report["workloads"]["uniform"]
    del part["sides"]["mlx-lm"], part["ratio"], part["same_tokens"]
    assert all(len(row) == 2 for row in build_rows(part))


def test_an_error_is_shown_as_it_is() -> None:
    """MLX begins errors with a word in square brackets, which rich takes for a style."""
    report, out = fake_report(), io.StringIO()
    report["workloads"]["uniform"]["sides"]["mlx-lm"]["error"] = "[malloc] [bold]no room"
    print_report(report, Console(file=out))
    assert "uniform: mlx-lm FAILED in run 2: [malloc] [bold]no room" in out.getvalue()
    assert [cell.strip() for cell in out.getvalue().splitlines()[3].split("|")[2:-1]] == [
        "runs",
        "1",
        "1, then FAILED",
        "-",
    ]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "ms", "-"),
        (0.0123, "ms", "12.3 ms"),
        (12.3456, "s", "12.346 s"),
        (0.256, "%", "26%"),
        (1.234, "x", "1.23 x"),
        (1234.5, "tok/s", "1,234 tok/s"),
        (2.34, "1/s", "2.3 1/s"),
        (7, "", "7"),
        (99_000_000, "bytes", "99.0 MB"),
        (1_234_000_000, "bytes", "1.234 GB"),
    ],
)
def test_numbers_with_their_units(value: float | None, unit: str, text: str) -> None:
    assert format_value(value, unit) == text
