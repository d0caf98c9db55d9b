"""Scoring the answers of a run again: records, journal, scores.json and manifest stay consistent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import JobError
from mlxrun.evals.rescoring import check_run, rescore
from mlxrun.evals.run_folders.run_folder import RunFolder
from mlxrun.jobs.records.manifest import hash_file
from mlxrun.jobs.records.output_records import BatchStamp
from mlxrun.jobs.scoring.eval_spec import EvalReader
from mlxrun.jobs.scoring.verdict import ScoredAnswer, Verdict
from tests.helpers.batch_fakes import Bench, by_id, chat, chats, edit_line, finish_job, read, write_job


class LengthScorer:
    """Scores answers by their length."""

    name = "length"
    digest = "1"

    def score(self, answer: ScoredAnswer) -> Verdict:
        return Verdict(min(1, len(answer.text) / 14), answer.text)


def list_problems(bench: Bench) -> list[str]:
    return [str(problem) for problem in RunFolder.open(bench.job).check()]


def strip_evals(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "eval"} for record in read(path)]


async def test_an_edited_eval(tmp_path: Path) -> None:
    """The files are those that `mlxrun batch` makes of the edited job, and the next `mlxrun batch` has
    nothing to do."""
    bench = await finish_job(tmp_path)
    answers = strip_evals(bench.paths.out)
    lines = [{**line, "eval": {"expected": "1", "match": "contains", "group": "new"}} for line in chats(12)]
    write_job(tmp_path, [*lines, "bad", chat("long", "LONG")])
    scores = rescore(RunFolder.open(bench.job), EvalReader())
    group = scores.groups["new"]
    assert (group.lines, group.correct) == (12, 3)  # 1, 10 and 11
    assert strip_evals(bench.paths.out) == answers and list_problems(bench) == []
    manifest = json.loads(bench.paths.manifest.read_text())
    assert manifest["input"]["sha256"] == hash_file(bench.job)
    assert manifest["output"]["sha256"] == hash_file(bench.paths.out)
    assert manifest["scores"] == scores.describe() and "scoring" not in manifest
    written = json.loads(bench.paths.scores.read_text())
    assert written == {"format": 1, "counts": manifest["counts"], **scores.describe()}
    before = [path.read_bytes() for path in (bench.paths.out, bench.paths.errors)]
    await bench.run()
    assert bench.ran == 0
    assert [path.read_bytes() for path in (bench.paths.out, bench.paths.errors)] == before
    assert json.loads(bench.paths.manifest.read_text())["scores"] == scores.describe()


async def test_a_job_that_goes_on_after_its_run_was_opened(tmp_path: Path) -> None:
    """The manifest keeps its later runs."""
    bench = Bench(write_job(tmp_path, chats(6)))
    await bench.run(limit=2)
    run = RunFolder.open(bench.job)
    await bench.run()
    before = json.loads(bench.paths.manifest.read_text())
    rescore(run, EvalReader())
    after = json.loads(bench.paths.manifest.read_text())
    assert len(after["runs"]) == 2 and after["runs"] == before["runs"]
    assert after["tokens"] == before["tokens"] and run.manifest == after


async def test_a_scorer_and_back(tmp_path: Path) -> None:
    """Lines without an `eval` are scored too. Scoring by the job file restores every byte."""
    bench = Bench(write_job(tmp_path, [*chats(4), chat("plain", "x"), chat("long", "LONG")]))
    await bench.run()
    before, run = by_id(bench.paths.out), RunFolder.open(bench.job)
    scores = rescore(run, EvalReader(scorer=LengthScorer()))
    assert {name: group.lines for name, group in scores.groups.items()} == {"g0": 2, "g1": 2, "all": 2}
    assert scores.groups["all"].failed == 1
    found = {record["custom_id"]: record["eval"] for record in read(bench.paths.out)}
    assert (found["line-1"]["score"], found["line-1"]["expected"]) == (0.5, "say 1")
    assert found["plain"]["match"] == "length"
    assert json.loads(bench.paths.manifest.read_text())["scoring"] == {
        "scorer": "length",
        "scorers": {"length": "1"},
    }
    assert list_problems(bench) == []
    rescore(RunFolder.open(bench.job), EvalReader())
    assert by_id(bench.paths.out) == before and list_problems(bench) == []
    assert "scoring" not in json.loads(bench.paths.manifest.read_text())


async def test_a_scorer_that_changed_unseen(tmp_path: Path) -> None:
    """All answers are scored by what the scorer does now, though its digest is that of before."""
    bench = Bench(write_job(tmp_path, chats(2)))
    await bench.run()
    scorer = LengthScorer()
    assert rescore(RunFolder.open(bench.job), EvalReader(scorer=scorer)).compute_total().value == 0.5
    scorer.score = lambda answer: Verdict(1)  # type: ignore[method-assign]
    assert rescore(RunFolder.open(bench.job), EvalReader(scorer=scorer)).compute_total().value == 1


async def test_a_batch_of_a_server(tmp_path: Path) -> None:
    """Its id is a part of the keys of its lines."""
    folder = tmp_path / "batch_1"
    folder.mkdir()
    bench = Bench(write_job(folder, chats(2)), stamp=BatchStamp("batch_1", 7))
    await bench.run()
    scores = rescore(RunFolder.open(bench.job), EvalReader(changes={"match": "exact"}))
    assert (scores.compute_total().lines, scores.compute_total().correct) == (2, 0)
    assert not bench.paths.dropped.exists()


async def test_an_unfinished_run(tmp_path: Path) -> None:
    """What is done is scored, and the rest runs later."""
    bench = Bench(write_job(tmp_path, chats(6)))
    await bench.run(limit=2)
    scores = rescore(RunFolder.open(bench.job), EvalReader(changes={"match": "exact"}))
    assert (scores.compute_total().lines, scores.compute_total().correct) == (2, 0)
    manifest = json.loads(bench.paths.manifest.read_text())
    assert manifest["output"]["sha256"] is None and manifest["counts"]["done"] == 2
    outcome = await bench.run()
    assert bench.ran == 4 and outcome.scores.compute_total().correct == 6


async def test_scores_that_are_gone(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, chats(2)))
    await bench.run()
    assert bench.paths.scores.exists()
    write_job(tmp_path, [{key: each[key] for key in each if key != "eval"} for each in chats(2)])
    assert rescore(RunFolder.open(bench.job), EvalReader()).groups == {}
    assert not bench.paths.scores.exists() and "eval" not in read(bench.paths.out)[0]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("edited", "was edited"),
        ("line", "the record of line 'line-1' is of another request"),
        ("eval", r"job.jsonl:2: eval.tolerance must be a number"),
        ("changes", r"job.jsonl:1: eval.expected must be a number"),
    ],
)
async def test_what_cannot_be_scored_changes_nothing(tmp_path: Path, damage: str, reason: str) -> None:
    """It is named, and no answer is moved away."""
    bench = Bench(write_job(tmp_path, chats(3)))
    await bench.run()
    lines, reader = chats(3), EvalReader()
    if damage == "edited":
        edit_line(bench.paths.out, 1, lambda data: data.replace(b"say", b"SAY", 1))
    elif damage == "line":
        lines[1] = chat("line-1", "say something else")
    elif damage == "eval":
        lines[1]["eval"] = {"expected": 1, "match": "number", "tolerance": "x"}
    else:
        reader = EvalReader(changes={"match": "number"})
    write_job(tmp_path, lines)
    files = (bench.paths.out, bench.paths.journal, bench.paths.manifest, bench.paths.scores)
    before = [path.read_bytes() for path in files]
    with pytest.raises(JobError, match=reason):
        rescore(RunFolder.open(bench.job), reader)
    assert [path.read_bytes() for path in files] == before and not bench.paths.dropped.exists()


@pytest.mark.parametrize(
    "where", ["mlxrun.jobs.records.reconciliation.replace_file", "mlxrun.evals.rescoring.write_json"]
)
async def test_a_kill_between_the_files_is_healed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Records are new, and the journal or the manifest is not: the next call completes them."""
    bench = Bench(write_job(tmp_path, chats(3)))
    await bench.run()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    reader = EvalReader(changes={"match": "exact"})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(where, fail)
        rescore(RunFolder.open(bench.job), reader)
    assert list_problems(bench) != []  # journal or manifest have digests of before
    assert rescore(RunFolder.open(bench.job), reader).compute_total().correct == 0
    assert list_problems(bench) == []


async def test_checking_writes_nothing(tmp_path: Path) -> None:
    bench = await finish_job(tmp_path)
    check_run(RunFolder.open(bench.job))
    edit_line(bench.paths.errors, 0, lambda data: data.replace(b"not JSON", b"NOT JSON"))
    with pytest.raises(
        JobError, match=r"job.errors.jsonl:\d: .*edited.*; mlxrun batch runs changed lines again"
    ):
        check_run(RunFolder.open(bench.job))
