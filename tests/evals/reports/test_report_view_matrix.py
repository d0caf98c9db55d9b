"""The matrix of a suite."""

from __future__ import annotations

from pathlib import Path

from mlxrun.evals.reports.page import render_markdown, render_page
from mlxrun.evals.reports.report_runs import read_runs
from mlxrun.evals.reports.report_view import build_matrix
from tests.helpers import suite_files
from tests.helpers.batch_fakes import chat, chats
from tests.helpers.report_jobs import run_lines, run_other_answers, write_suite
from tests.helpers.suite_bench import SuiteBench


async def test_cells_by_model_and_task(tmp_path: Path) -> None:
    suite = tmp_path / "s.out"
    for variant, wrong in (("seed-1", set[str]()), ("seed-2", {"line-0"})):
        await run_other_answers(suite / "big" / "sums" / variant, chats(4), wrong)
    await run_lines(suite / "small" / "sums" / "seed-1", chats(4))
    unfinished = await run_lines(suite / "small" / "names" / "seed-1", chats(4))
    await unfinished.run(fresh=True, limit=1)
    failed = {"name": "lost/sums/seed-1", "model": "lost", "task": "sums", "variant": "seed-1"}
    write_suite(suite, {**failed, "state": "failed", "error": "no weights"})

    matrix = build_matrix(read_runs([suite]))
    assert matrix is not None and matrix.has_variants
    assert (matrix.tasks, matrix.variants) == (["sums", "names"], ["seed-1", "seed-2"])
    (big, (sums, no_names)), (small, (_, names)), (lost, (unloaded, _)) = matrix.rows
    assert (big, lost, small, no_names) == ("big", "lost", "small", None)
    assert unloaded is not None and unloaded.missing == ["seed-1: no weights"]
    assert sums is not None and [each.group.value for each in sums.variants] == [1.0, 0.75]
    assert sums.mean == "87.5\u00a0%"
    assert names is not None and names.missing == ["3 lines not part of the run (--limit)"]


async def test_a_failed_cell_shows_no_score_of_an_earlier_start(tmp_path: Path) -> None:
    suite = tmp_path / "s.out"
    for task in ("sums", "names"):
        await run_lines(suite / "big" / task / "seed-1", chats(4))
    cells = [
        {"name": f"big/{task}/seed-1", "model": "big", "task": task, "variant": "seed-1"}
        for task in ("sums", "names")
    ]
    write_suite(
        suite, {**cells[0], "state": "failed", "error": "another model"}, {**cells[1], "state": "changed"}
    )
    matrix = build_matrix(read_runs([suite]))
    assert matrix is not None
    ((_, (names, sums)),) = matrix.rows
    assert sums is not None and sums.variants == [] and sums.missing == ["seed-1: another model"]
    assert names is not None and len(names.variants) == 1 and names.missing == ["seed-1: changed"]


async def test_other_runs_have_no_matrix(tmp_path: Path) -> None:
    bench = await run_lines(tmp_path, chats(1))
    assert build_matrix(read_runs([bench.job])) is None


async def test_the_score_over_all_seeds_is_on_the_page_and_in_markdown(tmp_path: Path) -> None:
    text = suite_files.CAPITALS + "    seeds: [1, 2]\n"
    bench = SuiteBench(suite_files.write_suite(tmp_path, text))
    assert await bench.run() == 0
    runs = read_runs([bench.folder])
    matrix = build_matrix(runs)
    assert matrix is not None
    ((_, (cell,)),) = matrix.rows
    assert cell is not None and cell.notes == ["all seeds: 0.0 % [0.0, 86.1] (seeds ± 0.0, pass@2 0.0 %)"]
    for page in (render_page(runs), render_markdown(runs)):
        assert "all seeds: 0.0 %" in page and "(seeds ± 0.0, pass@2 0.0" in page


async def test_answers_that_could_not_be_scored_are_no_score_of_zero(tmp_path: Path) -> None:
    suite = tmp_path / "s.out"
    lines = [chat(f"a{at}", "hello", {"expected": "x", "match": "judge"}) for at in range(3)]
    await run_lines(suite / "big" / "sums" / "seed-1", lines)
    write_suite(suite)
    matrix = build_matrix(read_runs([suite]))
    assert matrix is not None
    ((_, (cell,)),) = matrix.rows
    assert cell is not None and cell.variants == [] and cell.missing == ["seed-1: not scored"]


async def test_a_score_with_a_unit_is_not_drawn_on_the_scale_of_shares(tmp_path: Path) -> None:
    suite = tmp_path / "s.out"
    fields = {"prompt_windows": {}, "echo": True, "logprobs": 0, "max_tokens": 0}
    await run_lines(
        suite / "big" / "prose" / "seed-1",
        [{"id": "a", "prompt": "Some text.", **fields, "eval": {"match": "perplexity"}}],
    )
    write_suite(suite)
    matrix = build_matrix(read_runs([suite]))
    assert matrix is not None
    ((_, (cell,)),) = matrix.rows
    assert cell is not None and len(cell.variants) == 1
    (score,) = cell.variants
    assert cell.mean == score.value and score.value.endswith(" bits/byte") and score.plot == ""
    for page in (render_page(read_runs([suite])), render_markdown(read_runs([suite]))):
        assert score.value in page
