"""More than two runs: each with each, Holm's correction, ranks and strengths."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from statsmodels.stats.multitest import multipletests

from mlxrun.cli.main import main
from mlxrun.core.errors import JobError
from mlxrun.core.terminal import open_console
from mlxrun.evals.comparisons.comparison import compare_paths
from mlxrun.evals.comparisons.comparison_table import format_p
from mlxrun.evals.comparisons.pairing import PairingRules
from mlxrun.evals.comparisons.ranking import open_sides, rank_sides
from mlxrun.evals.comparisons.ranking_table import print_ranking
from mlxrun.evals.statistics import adjust_by_holm
from tests.helpers.batch_fakes import chat
from tests.helpers.eval_runs import run_lines
from tests.helpers.report_jobs import write_suite


def make_lines(words: int, count: int = 40) -> list[Any]:
    """Lines of which one in two needs more words than the others; `words`: the most that are answered."""
    return [
        chat(
            f"q{at}",
            f"say {at}",
            {"expected": f"say {at}"[: 3 + 2 * (at % 3)], "match": "contains"},
            max_tokens=words,
        )
        for at in range(count)
    ]


async def run_sides(folder: Path) -> list[Path]:
    jobs = []
    for name, words in (("short", 3), ("middle", 5), ("long", 20)):
        jobs.append(await run_lines(folder / name, make_lines(words), name=f"{name}.jsonl"))
    return jobs


async def test_each_run_is_compared_with_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = await run_sides(tmp_path)
    [ranking], _ = rank_sides(open_sides(jobs))
    assert [(pair.first, pair.second) for pair in ranking.pairs] == [
        ("short", "middle"),
        ("short", "long"),
        ("middle", "long"),
    ]
    alone = [compare_paths(jobs[a], jobs[b]).comparisons[0] for a, b in ((0, 1), (0, 2), (1, 2))]
    for pair, wanted in zip(ranking.pairs, alone, strict=True):
        assert pair.comparison.total == wanted.total
    assert [side.name for side in ranking.sides] == ["long", "middle", "short"]
    scores = [side.score for side in ranking.sides]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == 3
    adjusted = multipletests([each.total.result.p for each in alone], method="holm")[1]
    assert [pair.p for pair in ranking.pairs] == pytest.approx(list(adjusted))
    assert [(side.best, side.worst) for side in ranking.sides] == [(1, 1), (2, 2), (3, 3)]
    strengths = [side.strength for side in ranking.sides if side.strength is not None]
    ratings = [each.rating for each in strengths]
    assert len(ratings) == 3 and ratings == sorted(ratings, reverse=True) and ratings[0] > 0 > ratings[2]
    print_ranking(ranking, open_console(width=150))
    text = capsys.readouterr().out
    assert "difference of the row less the column, in points, over 40 lines; * p < 0.05, by Holm" in text
    for pair in ranking.pairs:
        difference = 100 * pair.comparison.total.result.difference
        assert f"{difference:+.1f} (p {format_p(pair.p)}) *" in text
        assert f"{-difference:+.1f} (p {format_p(pair.p)}) *" in text
    assert json.loads(json.dumps(ranking.describe(), allow_nan=False))["ranking"][0]["name"] == "long"


async def test_runs_that_do_not_differ_share_their_ranks(tmp_path: Path) -> None:
    jobs = [await run_lines(tmp_path / name, make_lines(20, 8), name=f"{name}.jsonl") for name in "abc"]
    [ranking], _ = rank_sides(open_sides(jobs))
    assert [(side.best, side.worst) for side in ranking.sides] == [(1, 3)] * 3
    assert all(side.strength is not None and side.strength.rating == 0 for side in ranking.sides)


async def test_the_models_of_a_suite_by_task(tmp_path: Path) -> None:
    suite = tmp_path / "s.out"
    for model, words in (("small", 3), ("large", 20)):
        for task in ("x", "y"):
            await run_lines(suite / model / task / "seed-1", make_lines(words, 20))
    write_suite(suite)
    rankings, _ = rank_sides(open_sides([suite]))
    assert [ranking.cell for ranking in rankings] == ["x", "y"]
    assert [side.name for side in rankings[0].sides] == ["large", "small"]
    first, second = (ranking.pairs[0] for ranking in rankings)
    assert first.p == second.p == pytest.approx(2 * first.comparison.total.result.p)


async def test_failed_runs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = make_lines(20, 8)
    refused = [line | {"body": line["body"] | {"max_tokens": 10**9}} for line in lines]
    runs = {"good": lines, "refused": refused, "other": lines}
    jobs = [await run_lines(tmp_path / name, each, name=f"{name}.jsonl") for name, each in runs.items()]
    jobs.append(await run_lines(tmp_path / "begun", lines, name="begun.jsonl", limit=5))
    for order in ([1, 0, 2, 3], [0, 1, 2, 3]):  # also the side that is first in all pairs
        [ranking], _ = rank_sides(open_sides([jobs[at] for at in order]), PairingRules(common=True))
        print_ranking(ranking, open_console(width=150))
        out = capsys.readouterr().out.splitlines()
        assert "8 lines failed in refused, and scored 0" in out
        assert f"begun: {tmp_path / 'begun' / 'begun.out.jsonl'} (unfinished)" in out
        assert "left out: 3 lines only in good ('q5', 'q6', 'q7')" in out
        assert not any("failed in good" in line or line.startswith(("good:", "other:")) for line in out)
        found = ranking.describe()
        assert found["unfinished"] == [str(tmp_path / "begun" / "begun.out.jsonl")]
        failed = {
            side["name"]: count
            for pair in found["pairs"][:3]
            for side, count in ((pair["first"], pair["failed_first"]), (pair["second"], pair["failed"]))
        }
        assert failed["good"] == failed["begun"] == 0 and failed["refused"] in (5, 8)


async def test_an_unfinished_suite_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = tmp_path / "s.out"
    for model, words in (("small", 3), ("large", 20)):
        await run_lines(suite / model / "x" / "seed-1", make_lines(words, 8), limit=5)
    write_suite(suite)
    [ranking], _ = rank_sides(open_sides([suite]))
    print_ranking(ranking, open_console(width=150))
    out = capsys.readouterr().out
    assert f"small: {suite}/small/x/seed-1/job.out.jsonl (unfinished)\n" in out
    assert f"large: {suite}/large/x/seed-1/job.out.jsonl (unfinished)\n" in out


async def test_what_cannot_be_ranked_is_named(tmp_path: Path) -> None:
    job = await run_lines(tmp_path / "a", make_lines(3, 4))
    with pytest.raises(JobError, match="is no suite of several models; give another run"):
        open_sides([job])
    suite = tmp_path / "s.out"
    await run_lines(suite / "small" / "x" / "seed-1", make_lines(3, 4))
    write_suite(suite)
    with pytest.raises(JobError, match=r"s.out: has runs of one model only, small; give another run"):
        open_sides([suite])
    with pytest.raises(JobError, match="one of these is given twice"):
        open_sides([job, job, job])


@pytest.mark.parametrize("values", [[0.01, 0.04, 0.03, 0.005], [0.5, 0.9], [0.04, 0.04], [1.0], []])
def test_holm_is_that_of_statsmodels(values: list[float]) -> None:
    wanted = list(multipletests(values, method="holm")[1]) if values else []
    assert adjust_by_holm(values) == pytest.approx(wanted)


async def test_what_a_ranking_of_a_suite_leaves_out_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model without a run, and a cell that only one model has."""
    suite = tmp_path / "s.out"
    for cell in ("small/x", "large/x", "huge/x", "huge/y"):
        await run_lines(suite / cell / "seed-1", make_lines(20, 8))
    failed = "absent/x/seed-1"
    write_suite(suite, {"name": failed, "job": f"{failed}/job.jsonl", "state": "failed"})
    assert await asyncio.to_thread(main, ["compare", str(suite), "--common"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-2:] == [
        "left out, as not all sides have them: y/seed-1",
        "left out, as no cell of them has begun: absent",
    ]
    assert await asyncio.to_thread(main, ["compare", str(suite), "--common", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["left_out"], found["absent"]) == (["y/seed-1"], ["absent"])
    assert {side["name"] for side in found["rankings"][0]["ranking"]} == {"small", "large", "huge"}
