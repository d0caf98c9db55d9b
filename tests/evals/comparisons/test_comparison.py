"""Two runs, and two suites, compared: scores, flips, groups, epochs and clusters."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mlxrun.core.errors import JobError
from mlxrun.evals.comparisons.comparison import compare_paths
from mlxrun.evals.comparisons.pairing import PairingRules
from mlxrun.evals.reports.difference import describe_difference
from mlxrun.evals.run_folders.run_folder import RunFolder
from mlxrun.evals.statistics import compare_scores
from mlxrun.evals.suites.seed_pool import SeedPool
from tests.helpers.batch_fakes import chat, chats
from tests.helpers.eval_runs import HAS_X, run_lines, sampled_chats
from tests.helpers.report_jobs import write_suite


def read_scores(job: Path) -> dict[str, float]:
    return {line.id: line.score or 0.0 for line in RunFolder.open(job).read_lines()}


async def test_two_runs_are_compared_line_by_line(tmp_path: Path) -> None:
    jobs = [await run_lines(tmp_path / str(seed), sampled_chats(60), seed) for seed in (1, 2)]
    first, second = (read_scores(job) for job in jobs)
    [found] = compare_paths(jobs[0], jobs[1], margin=5).comparisons
    worse = [name for name in first if first[name] > second[name]]
    better = [name for name in first if first[name] < second[name]]
    assert worse and better
    assert [flip.id for flip in found.worse] == worse and [flip.id for flip in found.better] == better
    assert (found.total.worse, found.total.better) == (len(worse), len(better))
    assert found.total.result == compare_scores([*first.values()], [*second.values()])
    assert [group.name for group in found.groups] == ["g0", "g1"]
    assert sum(group.result.lines for group in found.groups) == 60
    assert found.total.first is not None and found.total.first.low < found.total.result.first
    assert found.total.equivalence is not None and not found.total.equivalence.is_shown
    assert (found.epochs, found.unscored, found.unknown) == (1, 0, 0)
    shown = json.loads(json.dumps(found.describe()))
    assert shown["total"]["difference"] == pytest.approx(found.total.result.difference)
    assert shown["groups"]["g0"]["second"]["score"] == found.groups[0].result.second
    assert [flip["id"] for flip in shown["worse"]] == worse and shown["total"]["p"] == found.total.result.p


async def test_a_run_is_equal_to_itself(tmp_path: Path) -> None:
    job = await run_lines(tmp_path, sampled_chats(10))
    [found] = compare_paths(job, job).comparisons
    assert (found.total.result.difference, found.total.result.p) == (0, 1)
    assert (found.better, found.worse, found.differences, found.total.is_significant) == ([], [], [], False)


async def test_a_drop_is_significant(tmp_path: Path) -> None:
    """The same lines, with a temperature of which the engine knows nothing and an answer that is cut."""
    lines = [chat(f"q{at}", f"say {at}", {"expected": f"say {at}", "match": "contains"}) for at in range(20)]
    first = await run_lines(tmp_path / "a", lines)
    cut = [line | {"body": line["body"] | {"max_tokens": 2}} for line in lines]
    second = await run_lines(tmp_path / "b", cut)
    [found] = compare_paths(first, second).comparisons
    assert found.total.is_significant and found.total.result.difference == -1
    assert [flip.id for flip in found.worse] == [f"q{at}" for at in range(20)]
    assert found.differences == ["`max_tokens` of 20 lines is 2, was null"]
    assert compare_paths(second, first).comparisons[0].total.result.difference == 1


async def test_seeds_of_a_suite_are_epochs(tmp_path: Path) -> None:
    """The score of a line is the mean of its runs; cells of one name are compared with each other. The
    interval of a side is that of its pool."""
    for side, seeds in (("a", (1, 2, 3)), ("b", (4, 5, 6))):
        for epoch, seed in enumerate(seeds):
            for task in ("add", "sub"):
                await run_lines(tmp_path / side / "m" / task / f"seed-{epoch}", sampled_chats(12), seed)
    found = compare_paths(tmp_path / "a", tmp_path / "b").comparisons
    assert [(each.cell.name, each.epochs) for each in found] == [("m/add", 3), ("m/sub", 3)]
    folders = [
        tmp_path / side / "m" / "add" / f"seed-{epoch}" / "job.jsonl" for side in "ab" for epoch in range(3)
    ]
    scores = [read_scores(folder) for folder in folders]
    means = [
        [sum(run[f"q{at}"] for run in scores[start : start + 3]) / 3 for at in range(12)] for start in (0, 3)
    ]
    total = found[0].total
    assert total.result == compare_scores(*means)
    for interval, jobs in ((total.first, folders[:3]), (total.second, folders[3:])):
        pool = SeedPool()
        for job in jobs:
            pool.add_run(RunFolder.open(job))
        assert interval is not None and interval.bounds == pytest.approx(pool.describe()["interval"])
    assert found[0].total.result.mcnemar is None and found[0].total.result.units == 12
    assert found[0].total.adjusted_p >= found[0].total.result.p


async def test_lines_of_a_cluster_are_resampled_together(tmp_path: Path) -> None:
    jobs = [await run_lines(tmp_path / str(seed), sampled_chats(40, groups=8), seed) for seed in (1, 2)]
    [alone] = compare_paths(jobs[0], jobs[1]).comparisons
    [by_group] = compare_paths(jobs[0], jobs[1], rules=PairingRules(cluster="group")).comparisons
    assert (alone.total.result.units, by_group.total.result.units) == (40, 8)
    assert by_group.total.result.difference == pytest.approx(alone.total.result.difference)
    assert by_group.total.result.mcnemar is None
    assert by_group.total.first is not None and by_group.total.first.method == "clustered"
    lines = [chat(f"q{at}", f"say {at}", HAS_X | {"cluster": f"c{at % 4}"}) for at in range(12)]
    jobs = [await run_lines(tmp_path / f"c{seed}", lines, seed) for seed in (1, 2)]
    assert compare_paths(jobs[0], jobs[1]).comparisons[0].total.result.units == 4


async def test_failed_lines_score_0_and_are_counted(tmp_path: Path) -> None:
    lines = [chat("a", "axe", HAS_X), chat("b", "box", HAS_X)]
    first = await run_lines(tmp_path / "a", lines)
    second = await run_lines(
        tmp_path / "b", [chat("a", "axe", HAS_X), chat("b", "box", HAS_X, max_tokens=-1)]
    )
    [found] = compare_paths(first, second).comparisons
    assert found.total.failed == 1 and [(flip.id, flip.second) for flip in found.worse] == [("b", 0)]


async def test_runs_of_which_all_lines_failed_are_not_compared(tmp_path: Path) -> None:
    """As shares of 0 they would be the same, and equivalent; in a suite, other cells are compared."""
    refused = [chat(f"q{at}", "axe", HAS_X, max_tokens=-1) for at in range(4)]
    for side in ("first", "second"):
        await run_lines(tmp_path / side / "s.out" / "m" / "x" / "seed-1", refused)
    jobs = [tmp_path / side / "s.out" / "m" / "x" / "seed-1" / "job.jsonl" for side in ("first", "second")]
    with pytest.raises(JobError, match=r"job.out.jsonl: nothing to compare: all lines of every run failed"):
        compare_paths(*jobs, margin=2)
    good = [chat(f"q{at}", "axe", HAS_X) for at in range(4)]
    for side in ("first", "second"):
        await run_lines(tmp_path / side / "s.out" / "m" / "y" / "seed-1", good)
        write_suite(tmp_path / side / "s.out")
    found = compare_paths(*(tmp_path / side / "s.out" for side in ("first", "second")))
    assert [each.cell.name for each in found.comparisons] == ["m/y"]
    assert found.unscored == found.describe()["unscored"] == ["m/x"]
    difference = describe_difference(*(tmp_path / side / "s.out" for side in ("first", "second")))
    assert "Without a score on either side: m/x" in difference.notes


async def test_a_side_that_failed_scores_0_beside_one_with_scores(tmp_path: Path) -> None:
    """Also where the other side has only scores of 0."""
    never = {"expected": "xyzzy", "match": "contains"}
    jobs = [
        await run_lines(
            tmp_path / str(most), [chat(f"q{at}", "no", never, max_tokens=most) for at in range(4)]
        )
        for most in (5, -1)
    ]
    [found] = compare_paths(*jobs).comparisons
    assert found.is_scored and found.total.failed == 4 and found.total.result.difference == 0


async def test_runs_without_scores_are_refused(tmp_path: Path) -> None:
    job = await run_lines(tmp_path, [chat("a", "hello")])
    with pytest.raises(JobError, match="have no scores to compare: no line of both has an `eval`"):
        compare_paths(job, job)
    mixed = await run_lines(tmp_path / "b", [*chats(2), chat("a", "hello")])
    assert compare_paths(mixed, mixed).comparisons[0].unscored == 1


async def test_a_pattern_of_clusters_has_to_match(tmp_path: Path) -> None:
    """One that matches no id, or only the empty text, would change nothing; lines that it does not match are
    counted."""
    job = await run_lines(tmp_path, sampled_chats(12))
    for pattern in ("(.+)-epoch", "z*"):
        rules, shown = PairingRules(cluster=re.compile(pattern)), re.escape(repr(pattern))
        with pytest.raises(JobError, match=rf"--cluster {shown}: matches none of the 12 ids, such as 'q0'"):
            compare_paths(job, job, rules=rules)
    (found,) = compare_paths(job, job, rules=PairingRules(cluster=re.compile("q(1)"))).comparisons
    assert found.unclustered == found.describe()["unclustered"] == 9
    assert compare_paths(job, job).comparisons[0].unclustered == 0


async def test_runs_without_a_common_line_are_named(tmp_path: Path) -> None:
    first = await run_lines(tmp_path / "a", sampled_chats(2))
    second = await run_lines(tmp_path / "b", [chat("z", "hello", HAS_X)])
    with pytest.raises(JobError, match=r"have no line in common: 2 lines only in the first \('q0', 'q1'\)"):
        compare_paths(first, second, rules=PairingRules(common=True))
