"""What a comparison prints."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.terminal import open_console
from mlxrun.evals.comparisons.comparison import compare_paths
from mlxrun.evals.comparisons.comparison_table import (
    PIPED_WIDTH,
    format_p,
    print_comparison,
    read_flip_texts,
)
from mlxrun.evals.comparisons.pairing import PairingRules
from tests.helpers.batch_fakes import chat
from tests.helpers.eval_runs import run_lines, sampled_chats


def show(first: Path, second: Path, answers: int = 0, margin: float | None = None) -> list[str]:
    """The lines of the first comparison, without those that are empty."""
    out = io.StringIO()
    [found, *_] = compare_paths(first, second, margin=margin).comparisons
    print_comparison(found, read_flip_texts(found, answers), open_console(out, PIPED_WIDTH))
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


async def test_a_drop_is_shown_by_group_with_its_flips(tmp_path: Path) -> None:
    def make_line(at: int) -> dict[str, Any]:
        wanted = {"expected": f"[say] {at}", "match": "contains", "group": f"[g{at % 2}]"}
        return chat(f"q{at}", f"[say] {at}", wanted, max_tokens=20)

    lines = [make_line(at) for at in range(40)]
    first = await run_lines(tmp_path / "a", lines)
    second = await run_lines(
        tmp_path / "b",
        [line | {"body": line["body"] | {"max_tokens": 3}} for line in lines],
    )
    shown = show(first, second, answers=1, margin=2)
    assert shown[:2] == [
        f"first : {tmp_path / 'a' / 'job.out.jsonl'}",
        f"second: {tmp_path / 'b' / 'job.out.jsonl'}",
    ]
    cells = [line.split() for line in shown]
    assert cells[2][0] == "group" and cells[4][:2] == ["[g0]", "20"] and cells[6][:2] == ["total", "40"]
    assert "-100.0" in cells[6] and cells[6][-4:] == ["<.001", "*", "not", "shown"]
    assert shown[7] == "p of a group is adjusted for the number of groups; intervals are not"
    assert shown[8] == "McNemar's test: 0 better, 40 worse, p < .001 (mid-p; exact <.001)"
    assert "40 lines worse: q0, q1, q2" in shown[11] and "... (20 more in --json)" in shown[11]
    assert shown[12:17] == [
        "  q0: 1 -> 0",
        "    prompt:    [say] 0",
        "    expected:  [say] 0",
        f"    first:     {shown[15].split()[1]} {shown[15].split()[2]}",
        "    second:    [sa",
    ]
    assert shown[17:19] == ["What else differs:", "  `max_tokens` of 40 lines is 3, was 20"]
    assert shown[19] == (
        "Result: the second run scores 100.0 points lower; significant; "
        "equivalence within 2 points is not shown."
    )


async def test_equal_runs_are_said_to_be_equal(tmp_path: Path) -> None:
    job = await run_lines(tmp_path, sampled_chats(5))
    shown = show(job, job)
    assert shown[-2] == "Nothing else differs: model, settings, versions and device are the same."
    assert shown[-1] == "Result: the scores are the same (p = 1)."


async def test_epochs_and_runs_that_are_unfinished_are_named(tmp_path: Path) -> None:
    for side in "ab":
        for seed in (1, 2):
            folder = tmp_path / side / "m" / "t" / f"seed-{seed}"
            await run_lines(folder, sampled_chats(6), seed, limit=4)
    shown = show(tmp_path / "a", tmp_path / "b")
    assert shown[0] == "== m/t" and shown[1].count("/job.out.jsonl (unfinished)") == 2
    assert shown[3] == "2 runs of each side; the score of a line is the mean of its runs"


@pytest.mark.parametrize(
    ("p", "text"), [(1.0, "1"), (0.0363, ".036"), (0.5, ".5"), (0.00098, "<.001"), (0.00123, ".0012")]
)
def test_p_values_have_two_digits(p: float, text: str) -> None:
    assert format_p(p) == text


async def test_answers_that_could_not_be_scored_are_counted(tmp_path: Path) -> None:
    lines = [chat("a", "x", {"match": "judge"}), chat("b", "x", {"expected": "x", "match": "contains"})]
    runs = [await run_lines(tmp_path / name, lines) for name in ("a", "b")]
    (found,) = compare_paths(*runs).comparisons
    assert found.describe()["total"]["unscored"] == 1
    assert any(line.startswith("1 line could not be scored in a run") for line in show(*runs))


async def test_failed_lines_of_both_sides_are_counted(tmp_path: Path) -> None:
    lines = sampled_chats(5)
    refused = [line | {"body": line["body"] | {"max_tokens": 10**9}} for line in lines]
    runs = [await run_lines(tmp_path / name, each) for name, each in (("a", refused), ("b", lines))]
    assert "5 lines failed in the first run, and scored 0" in show(*runs)
    assert "5 lines failed in the second run, and scored 0" in show(*reversed(runs))


async def test_lines_that_a_pattern_of_clusters_does_not_match_are_counted(tmp_path: Path) -> None:
    job = await run_lines(tmp_path, sampled_chats(12))
    rules = PairingRules(cluster=re.compile("q(1)"))
    (found,) = compare_paths(job, job, rules=rules).comparisons
    out = io.StringIO()
    print_comparison(found, read_flip_texts(found, 0), open_console(out, PIPED_WIDTH))
    assert "warning: --cluster gives 9 lines no cluster; each is one of its own" in out.getvalue()
