"""The difference between two runs in a report is that of `mlxrun compare`."""

from __future__ import annotations

from pathlib import Path

from mlxrun.evals.comparisons.comparison import compare_paths
from mlxrun.evals.comparisons.pairing import PairingRules
from mlxrun.evals.reports.difference import describe_difference
from tests.helpers.batch_fakes import chat, chats
from tests.helpers.report_jobs import run_lines, run_other_answers


async def test_two_runs(tmp_path: Path) -> None:
    first = (await run_lines(tmp_path / "a", chats(8))).paths.out
    second = (await run_lines(tmp_path / "b", [*chats(7), chat("new", "say")])).paths.out
    found = describe_difference(first, second)
    (comparison,) = compare_paths(first, second, rules=PairingRules(common=True)).comparisons
    assert [row.name for row in found.rows] == ["g0", "g1", "total"]
    total = found.rows[-1]
    assert total.group.result.lines == 7
    assert total.group == comparison.total
    assert "does not differ significantly" in found.sentence
    assert any("only in the first" in note and "line-7" in note for note in found.notes)
    assert "<svg" in found.axis and "<svg" in total.plot


async def test_failed_lines_are_named_as_by_compare(tmp_path: Path) -> None:
    lines = chats(8)
    refused = [line | {"body": line["body"] | {"max_tokens": 10**9}} for line in lines[:1]] + lines[1:]
    runs = [
        (await run_lines(tmp_path / name, each)).paths.out for name, each in (("a", refused), ("b", lines))
    ]
    found = describe_difference(*runs)
    assert "1 line failed in the first run, and scored 0" in found.notes


async def test_flips_are_counted(tmp_path: Path) -> None:
    first = (await run_lines(tmp_path / "a", chats(8))).paths.out
    changed = await run_other_answers(tmp_path / "b", chats(8), {"line-1", "line-3"})
    found = describe_difference(first, changed.paths.out)
    assert found.rows, found
    total = found.rows[-1]
    assert (total.group.better, total.group.worse, total.points) == (0, 2, "\u221225.0")


async def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    first = (await run_lines(tmp_path / "a", chats(2))).paths.out
    second = (await run_lines(tmp_path / "b", [chat("x", "y")])).paths.out
    found = describe_difference(first, second)
    assert not found.rows and "not compared" in found.sentence
