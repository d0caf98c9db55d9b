"""The texts of flips are read from the runs once more."""

from __future__ import annotations

from pathlib import Path

from mlxrun.evals.comparisons.comparison import compare_paths
from mlxrun.evals.comparisons.comparison_table import read_flip_texts
from mlxrun.evals.run_folders.run_folder import RunFolder
from tests.helpers.batch_fakes import chat
from tests.helpers.eval_runs import HAS_X, run_lines, sampled_chats


async def test_the_first_flips_each_way_have_their_texts(tmp_path: Path) -> None:
    jobs = [await run_lines(tmp_path / str(seed), sampled_chats(30), seed) for seed in (1, 2)]
    [found] = compare_paths(jobs[0], jobs[1]).comparisons
    answers = read_flip_texts(found, 2)
    assert set(answers) == {flip.id for flip in (*found.better[:2], *found.worse[:2])} and len(answers) == 4
    flip = found.worse[0]
    first, second = (
        next(line.answer for line in RunFolder.open(job).read_lines() if line.id == flip.id) for job in jobs
    )
    assert answers[flip.id] == {
        "prompt": f"say {flip.id[1:]}",
        "expected": "x",
        "first": first,
        "second": second,
    }
    assert "x" in str(first) and "x" not in str(second)
    assert read_flip_texts(found, 0) == {}


async def test_failed_lines_have_their_reason(tmp_path: Path) -> None:
    wanted = {"expected": ["x", "é"], "match": "contains"}
    first = await run_lines(tmp_path / "a", [chat("a", "axe", wanted), chat("b", "axe", HAS_X)])
    second = await run_lines(
        tmp_path / "b", [chat("a", "axe", wanted, max_tokens=-1), chat("b", "axe", HAS_X)]
    )
    [found] = compare_paths(first, second).comparisons
    [answers] = read_flip_texts(found, 5).values()
    assert answers["expected"] == '["x", "é"]' and str(answers["second"]).startswith("(failed: max_tokens")
