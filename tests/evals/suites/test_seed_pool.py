"""Cells that differ only in their seeds are pooled, by question."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from scipy import stats

from mlxrun.core.errors import JobError
from mlxrun.evals.run_folders.run_folder import RunFolder
from mlxrun.evals.run_folders.run_line import RunLine
from mlxrun.evals.suites.seed_pool import SeedPool, pool_seeds
from mlxrun.evals.suites.suite_manifest import format_pool, update_cell_scores
from mlxrun.jobs.lines.job_file import RawLine, parse_line
from mlxrun.jobs.scoring import line_scores
from mlxrun.jobs.scoring.intervals import ScoreMean
from mlxrun.jobs.scoring.perplexity import BITS_PER_BYTE
from mlxrun.jobs.scoring.verdict import Verdict
from tests.helpers.batch_fakes import read
from tests.helpers.eval_runs import run_lines, sampled_chats
from tests.helpers.suite_bench import SuiteBench
from tests.helpers.suite_files import CAPITALS, CITIES, write_suite

# Answers end in two letters of x, y and z, by seed, of which the pattern takes the first that is an x or a y.
SAMPLED = """
    models: {tiny: , other: {set: {model.names: [o]}}}
    tasks:
      letters:
        data: cities.csv
        prompt: "Capital of {{ country }}?"
        expected: letter
        match: regex
        eval: {pattern: "[xy]", capture: 0}
    seeds: [1, 2, 3]
    vary: {sampling.top_p: [1, 0.5]}
"""
ROWS = "country,letter\n" + "".join(f"C{at},x\n" for at in range(12))


async def run_seeds(folder: Path, count: int) -> list[RunFolder]:
    lines = sampled_chats(10)
    return [RunFolder.open(await run_lines(folder / str(seed), lines, seed)) for seed in range(count)]


async def test_a_question_is_the_cluster_of_its_answers(tmp_path: Path) -> None:
    pool, wanted, means = SeedPool(), ScoreMean(), []
    for run in await run_seeds(tmp_path, 4):
        pool.add_run(run)
        scores = {each["custom_id"]: each["eval"]["score"] for each in read(run.paths.out)}
        for name, score in scores.items():
            wanted.add(score, name)
        means.append(fmean(scores.values()))
    found, interval = pool.describe(), wanted.compute_pooled_interval()
    assert interval is not None and len(set(means)) > 1
    assert found["answers"] == 40 and found["share"] == pytest.approx(fmean(means))
    assert found["interval"] == pytest.approx([interval.low, interval.high])
    assert found["seed_shares"] == pytest.approx(means)
    assert found["seed_deviation"] == pytest.approx(stdev(means))


async def test_answers_are_not_taken_for_questions(tmp_path: Path) -> None:
    """The twin: the same answers as so many questions would have a narrower interval."""
    pool, flat = SeedPool(), ScoreMean()
    (run,) = await run_seeds(tmp_path, 1)
    for _ in range(4):  # a sampled answer that comes out alike each time tells nothing new
        pool.add_run(run)
        for each in read(run.paths.out):
            flat.add(each["eval"]["score"])
    narrow, found = flat.compute_interval(), pool.describe()["interval"]
    assert narrow is not None and narrow.high - narrow.low < 0.7 * (found[1] - found[0])


async def test_seeds_are_the_samples_of_pass_at_k(tmp_path: Path) -> None:
    pool, right = SeedPool(), dict[str, list[int]]()
    for run in await run_seeds(tmp_path, 3):
        pool.add_run(run)
        for each in read(run.paths.out):
            right.setdefault(each["custom_id"], []).append(each["eval"]["score"])
    found = pool.describe()["scores"]
    assert found["pass@3"] == pytest.approx(fmean(map(any, right.values())))
    assert found["pass^3"] == pytest.approx(fmean(map(all, right.values())))
    assert found["majority"] == pytest.approx(fmean(sum(each) >= 2 for each in right.values()))
    assert 0 < found["pass^3"] < found["pass@3"] < 1


async def test_a_suite_pools_what_differs_in_its_seed_alone(tmp_path: Path) -> None:
    bench = SuiteBench(write_suite(tmp_path, SAMPLED, cities_csv=ROWS))
    assert await bench.run() == 0
    pools = bench.read()["pools"]
    assert [pool["cells"][0] for pool in pools] == [
        f"{model}/letters/seed-1,top_p-{value}" for model in ("tiny", "other") for value in ("1", "0.5")
    ]
    assert all(len(pool["cells"]) == 3 and pool["answers"] == 36 for pool in pools)
    cells = {each["name"]: each["scores"]["total"]["share"] for each in bench.read()["cells"]}
    shares = [cells[name] for name in pools[0]["cells"]]
    assert pools[0]["seed_shares"] == pytest.approx(shares) and len(set(shares)) > 1


async def test_pools_are_of_finished_cells_and_kept_while_outputs_stay(tmp_path: Path) -> None:
    bench = SuiteBench(write_suite(tmp_path, SAMPLED.replace("[1, 0.5]", "[1]"), cities_csv=ROWS))
    assert await bench.run("tiny/letters/seed-1") == 0
    assert bench.read()["pools"] == []
    assert await bench.run("tiny") == 0
    (pool,) = bench.read()["pools"]
    records: list[dict[str, Any]] = bench.read()["cells"]
    marked = {**pool, "share": 9}
    assert pool_seeds(bench.folder, records, [marked]) == [marked]
    out = bench.folder / pool["cells"][0] / "job.out.jsonl"
    manifest = out.with_name("job.out.jsonl.run") / "manifest.json"
    found = json.loads(manifest.read_text())
    found["output"]["sha256"] = "other"
    manifest.write_text(json.dumps(found))
    assert pool_seeds(bench.folder, records, [marked])[0]["share"] == pool["share"]
    update_cell_scores(out, records[0]["scores"])
    assert bench.read()["pools"][0]["outputs"][0] == "other"


async def test_a_pool_is_computed_again_when_only_failed_lines_change(tmp_path: Path) -> None:
    long = "word " * 5000  # more than the context
    path = write_suite(tmp_path, CAPITALS + "    seeds: [1, 2]\n", cities_csv=CITIES + f"{long},Rome,EU,4\n")
    bench = SuiteBench(path)
    assert await bench.run() == 1
    (before,) = bench.read()["pools"]
    write_suite(tmp_path, CAPITALS + "    seeds: [1, 2]\n")  # without the line that failed
    assert await bench.run() == 0
    (after,) = bench.read()["pools"]
    assert (before["outputs"], before["answers"], after["answers"]) == (after["outputs"], 8, 6)


async def test_pools_of_which_all_lines_failed_are_told_apart(tmp_path: Path) -> None:
    """None of them has an output."""
    long = "word " * 5000
    text = """
        models: {tiny: }
        tasks:
          one: {rows: [{q: LONG, a: x}], prompt: "{{ q }}", expected: a}
          two: {rows: [{q: LONG, a: x}, {q: LONGER, a: y}], prompt: "{{ q }}", expected: a}
        seeds: [1, 2]
    """
    bench = SuiteBench(write_suite(tmp_path, text.replace("LONG", long)))
    for _ in range(2):
        assert await bench.run() == 1
        pools = bench.read()["pools"]
        assert [(pool["outputs"], pool["answers"]) for pool in pools] == [
            ([None, None], 2),
            ([None, None], 4),
        ]
        assert {format_pool(pool) for pool in pools} == {"not scored"}


async def test_a_seed_that_no_judge_has_scored_has_no_pool(tmp_path: Path) -> None:
    """Its zeros would halve the score. Where all seeds wait, the pool has no score."""
    judged, waiting = sampled_chats(4), [line | {"eval": {"match": "judge"}} for line in sampled_chats(4)]
    runs = [
        RunFolder.open(await run_lines(tmp_path / str(seed), lines, seed), f"seed-{seed}")
        for seed, lines in enumerate((judged, waiting, waiting))
    ]
    pool, mixed = SeedPool(), SeedPool()
    for run in runs[1:]:
        pool.add_run(run)
    assert format_pool(pool.describe()) == "not scored"
    for run in runs:
        mixed.add_run(run)
    with pytest.raises(JobError, match="seed-1: none of its answers could be scored"):
        mixed.describe()


async def test_a_pool_with_an_edited_record_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = SuiteBench(write_suite(tmp_path, SAMPLED.replace("[1, 0.5]", "[1]"), cities_csv=ROWS))
    assert await bench.run("tiny") == 0
    out = bench.folder / "tiny/letters/seed-2,top_p-1/job.out.jsonl"
    out.write_bytes(out.read_bytes().replace(b"Capital", b"capital", 1))
    assert pool_seeds(bench.folder, bench.read()["cells"], []) == []
    assert "was edited or damaged" in caplog.text


SECONDS = {"unit": "s", "better": "lower", "aggregate": "mean"}


def test_scores_with_a_unit_are_pooled_by_question() -> None:
    """Two seeds of three questions: the interval is that of three means."""
    pool = SeedPool(means=[2.0, 3.0])
    for at, pair in enumerate(((1.0, 2.0), (2.0, 4.0), (3.0, 3.0))):
        for score in pair:
            result = {"score": score, "match": "m.py:f", "measure": SECONDS}
            record = {"custom_id": f"q{at}", "error": None, "eval": result}
            pool._add_line(RunLine(f"q{at}", at, None, record))
    found = pool.describe()
    wanted = stats.ttest_1samp([1.5, 3.0, 3.0], 0).confidence_interval(0.95)
    assert found["value"] == 2.5 and found["share"] is None and "scores" not in found
    assert found["interval"] == pytest.approx([wanted.low, wanted.high])
    low, high = wanted
    assert format_pool(found) == f"2.500 s [{low:.3f}, {high:.3f}] (seeds ± 0.707)"


@pytest.mark.parametrize(
    ("options", "answers", "majority"),
    [
        ({"ignore_case": True}, [("Paris", 1), ("PARIS", 1), ("Rome", 0), ("Rome", 0), ("paris", 1)], 1),
        ({}, [("Paris", 1), ("PARIS", 0), ("Rome", 0), ("Rome", 0), ("paris", 0)], 0),
        ({}, [("caf\u00e9", 1), ("cafe\u0301", 1), ("Rome", 0), ("Rome", 0), ("caf\u00e9", 1)], 1),
    ],
)
def test_answers_that_are_compared_as_equal_vote_together(
    options: dict[str, Any], answers: list[tuple[str, int]], majority: int
) -> None:
    """As in the metrics of one run: by `ignore_case`, and in Unicode's composed form."""
    given = {"id": "q", "prompt": "x", "eval": {"expected": answers[0][0], **options}}
    line = parse_line(RawLine(1, 0, json.dumps(given).encode()))
    pool = SeedPool(means=[0.0] * len(answers))
    for extracted, score in answers:
        result = {"score": score, "match": "exact", "extracted": extracted}
        pool._add_line(RunLine("q", 0, line, {"custom_id": "q", "error": None, "eval": result}))
    assert pool.describe()["scores"]["majority"] == majority


@pytest.mark.parametrize("failed", [0, 2])
async def test_a_seed_without_a_score_in_the_unit_has_no_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: int
) -> None:
    """As 0 it would be the best of all seeds."""
    sums, pool = {"bits": 16.0, "tokens": 1.0, "words": 1.0, "bytes": 8.0}, SeedPool()
    verdict = Verdict(2.0, sums=sums, measure=BITS_PER_BYTE)
    monkeypatch.setattr(line_scores, "score_perplexity", lambda response, text: verdict)
    for seed in range(3):
        fields = {"prompt_windows": {}, "echo": True, "logprobs": 0, "max_tokens": 9 if seed == failed else 0}
        lines = [
            {"id": f"t{at}", "prompt": f"Text {at}", **fields, "eval": {"match": "perplexity"}}
            for at in range(4)
        ]
        pool.add_run(RunFolder.open(await run_lines(tmp_path / str(seed), lines, seed), f"seed-{seed}"))
    with pytest.raises(JobError, match=f"seed-{failed}: its lines have no score in the unit"):
        pool.describe()
