"""Reports as Markdown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlxrun.evals.reports.page import render_markdown, render_page
from mlxrun.evals.reports.report_runs import read_runs
from tests.helpers.batch_fakes import chat, chats
from tests.helpers.report_jobs import (
    hostile_lines,
    mixed_lines,
    read_lines,
    run_changed,
    run_lines,
    run_other_answers,
    write_suite,
)


async def test_one_run(tmp_path: Path) -> None:
    text = render_markdown(await read_lines(tmp_path, mixed_lines())).replace("\u00a0", " ")
    assert text.startswith(
        "## job on embedded\n\n**50.0 %** of 4 lines, 95 % interval \\[15.0, 85.0\\]. 2 failed"
    )
    head = "| group | lines | score | 95 % interval | failed | cut |\n| :-- | --: | --: | --: | --: | --: |\n"
    assert f"\n\n{head}| a | " in text
    assert "| b | 2 | 50.0 % | [9.5, 90.5] | 1 | 1 |" in text
    assert "Lines that failed or could not be scored:\n\n- 1 × " in text
    assert "mlxrun 0" in text


async def test_two_runs_have_their_flips(tmp_path: Path) -> None:
    first = await run_lines(tmp_path / "a", chats(6))
    second = await run_other_answers(tmp_path / "b", chats(6), {"line-1"})
    text = render_markdown(read_runs([first.paths.out, second.paths.out])).replace("\u00a0", " ")
    assert "0 lines better and 1 worse, of 6." in text
    assert "| total | 6 | 100.0 % | 83.3 % | −16.7 |" in text
    assert re.search(r"\| line-1 \| say 1 \| ✓ say 1\w\w \| ✗ say 1\w\w \|", text)


@pytest.mark.parametrize("count", [1, 7])
async def test_metrics_have_columns(tmp_path: Path, count: int) -> None:
    """Of many runs too, whose scores are folded. Each run has two groups and a total."""
    outs = []
    for at in range(count):
        bench = await run_changed(
            tmp_path / str(at),
            chats(2),
            lambda record: record["eval"].update(scores={"pass@3": 1, "maj@3": 0}),
        )
        outs.append(bench.paths.out)
    text = render_markdown(read_runs(outs)).replace("\u00a0", " ")
    assert len(re.findall(r"^\| group .*\| cut \| maj@3 \| pass@3 \|$", text, re.M)) == 1
    assert len(re.findall(r"\| 0 \| 0 \| 0.0 % \| 100.0 % \|$", text, re.M)) == 3 * count
    assert ("<summary>Scores of every run" in text) == (count > 6)


@pytest.mark.parametrize("count", [1, 2])
async def test_metrics_of_some_lines_are_named_with_their_number(tmp_path: Path, count: int) -> None:
    """Of several runs with the run; on the page too."""
    outs = []
    for at in range(count):
        bench = await run_changed(
            tmp_path / str(at),
            chats(3),
            lambda record: record["custom_id"] == "line-1" and record["eval"].update(scores={"pass^3": 1}),
        )
        outs.append(bench.paths.out)
    runs = read_runs(outs)
    text, page = render_markdown(runs), render_page(runs)
    says = "pass^3: of 1 of 3 lines; the others do not have it"
    label = f"{runs.runs[0].label}: " if count > 1 else ""
    assert text.count(f"\n\n{says}\n\n") == (count == 1) and text.count(says) == count
    assert page.count(says) == count and f'<p class="note"><bdi>{label}{says}</bdi></p>' in page


async def test_a_suite_has_its_matrix(tmp_path: Path) -> None:
    suite = tmp_path / "s.out"
    for name in ("m1/sums/seed-1", "m1/sums/seed-2", "m2/names/seed-1"):
        await run_lines(suite / name, chats(4))
    write_suite(suite)
    text = render_markdown(read_runs([suite])).replace("\u00a0", " ")
    assert "| model | sums | names |" in text
    assert "| m1 | 100.0 % (100.0 %, 100.0 %) | not run |" in text


async def test_hostile_texts_stay_in_their_cells(tmp_path: Path) -> None:
    first = await run_lines(tmp_path / "a", hostile_lines())
    ids = {line["custom_id"] for line in hostile_lines()}
    second = await run_other_answers(tmp_path / "b", hostile_lines(), ids)
    text = render_markdown(read_runs([first.paths.out, second.paths.out]))
    tags = set(re.findall(r"(?<!\\)<[^>]*>", text))
    assert tags == {"<details>", "</details>", "<summary>", "</summary>"}
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, table


async def test_problems_are_named(tmp_path: Path) -> None:
    bench = await run_lines(tmp_path, chats(3))
    bench.paths.journal.unlink()
    assert "Problems in the run folders" in render_markdown(read_runs([bench.job]))


async def test_answers_that_could_not_be_scored_have_a_column(tmp_path: Path) -> None:
    lines = [chat("a", "x", {"match": "judge", "group": "j"}), *chats(2)]
    text = render_markdown(await read_lines(tmp_path, lines)).replace("\u00a0", " ")
    assert "| failed | cut | unscored |" in text and "| j | 1 | not scored |" in text
    assert "- 1 × not scored: no judge has scored this answer yet" in text
    assert [row[-3:] for row in text.splitlines() if row.startswith("| j |")] == ["1 |"]
