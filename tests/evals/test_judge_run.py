"""A judge over the answers of a run, on an engine that echoes."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import JobError
from mlxrun.core.request import Request, TokenEvent
from mlxrun.evals import judge_verdict
from mlxrun.evals.comparisons.comparison import compare_paths
from mlxrun.evals.comparisons.pairing import PairingRules
from mlxrun.evals.exports.exported_run import ExportedRun, ExportNames
from mlxrun.evals.history import add_runs
from mlxrun.evals.judge import Judge, parse_judge
from mlxrun.evals.judge_run import run_judge
from mlxrun.evals.run_folders.run_folder import RunFolder
from mlxrun.jobs.run.stop_signals import StopSignals
from mlxrun.jobs.scoring.score_groups import Scores
from mlxrun.jobs.scoring.scorer_process import ScorerLimits, ScorerPool
from tests.helpers.batch_fakes import Bench, FakeClient, by_id, chat, chats, make_config, read, write_job
from tests.helpers.raw_clients import until
from tests.helpers.scorer_bombs import list_scorers, make_bomb_schema

# The engine answers with the prompt and two letters of x, y and z, so this judge says what the template says.
TEMPLATE = "{{ 'yes' if answer.startswith(expected | string) else 'no' }} for {{ id }}:"
JUDGE: dict[str, Any] = {"prompt": TEMPLATE, "verdict": {"choices": {"yes": 1, "no": 0}}}


def make_judge(**changes: Any) -> Judge:
    return parse_judge({**JUDGE, **changes}, "judge")


class JudgeBench:
    """A run of a job, and judges over it. `client`: the judge's engine."""

    def __init__(self, folder: Path, lines: list[Any]) -> None:
        self.run = Bench(write_job(folder, lines))
        self.judge = Bench(self.run.paths.folder / "judge" / "job.jsonl")

    async def score(self, judge: Judge) -> Scores:
        """Judge the run with a new engine."""
        self.judge.client = FakeClient(self.judge.model_info)
        self.judge.said.clear()
        stop = StopSignals(self.judge.said.append)
        return await run_judge(self.run.paths, judge, self.judge.make_setup(), stop, self.judge.said.append)

    @property
    def evals(self) -> dict[str, dict[str, Any]]:
        return {record["custom_id"]: record["eval"] for record in read(self.run.paths.out)}

    def read_scoring(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run.paths.manifest.read_text())["scoring"]
        return found


def lines_of(count: int) -> list[dict[str, Any]]:
    """Lines of which every second one has what is expected."""
    return [
        chat(f"line-{i}", f"say {i}", {"expected": f"say {i if i % 2 else 'x'}", "group": "g"})
        for i in range(count)
    ]


async def test_answers_are_judged_once(tmp_path: Path) -> None:
    """The scores, the records, the manifest; a second pass computes nothing, a new line only itself."""
    bench = JudgeBench(tmp_path, [*lines_of(6), chat("long", "LONG", {"expected": "x", "group": "g"})])
    await bench.run.run()
    scores = await bench.score(make_judge())
    group = scores.groups["g"]
    assert (group.lines, group.correct, group.failed, group.unscored) == (7, 3, 1, 0)
    assert bench.judge.ran == 6 and bench.evals["line-1"] == {
        "score": 1,
        "match": "judge",
        "group": "g",
        "expected": "say 1",
        "extracted": "yes",
    }
    facts = bench.read_scoring()["judge"]
    assert facts["sha256"] == make_judge().digest and facts["template"] == JUDGE
    assert facts["model"]["fingerprint"] and facts["job"] == "judge/job.jsonl"
    assert RunFolder.open(bench.run.job).check() == []
    before = by_id(bench.run.paths.out)
    assert (await bench.score(make_judge())).describe() == scores.describe()
    assert bench.judge.ran == 0 and by_id(bench.run.paths.out) == before
    write_job(tmp_path, [*lines_of(7)])
    await bench.run.run()
    await bench.score(make_judge())
    assert list(bench.judge.client.tries) == ["no for line-6:"]


async def test_another_template_or_model_judges_again(tmp_path: Path) -> None:
    bench = JudgeBench(tmp_path, lines_of(2))
    await bench.run.run()
    await bench.score(make_judge())
    first = bench.read_scoring()["scorers"]["judge"]
    other = make_judge(prompt=TEMPLATE.replace("yes", "no"))
    assert (await bench.score(other)).groups["g"].correct == 0
    assert bench.judge.ran == 1  # the other line's prompt is the same
    assert bench.read_scoring()["scorers"]["judge"] != first
    bench.judge.config = replace(bench.judge.config, sampling=replace(bench.judge.config.sampling, top_k=3))
    await bench.score(other)
    assert bench.judge.ran == 2 and "judges all answers again" in bench.judge.said[0]
    assert list((bench.judge.paths.earlier).glob("*/job.out.jsonl"))


async def test_scales_change_without_judging_again(tmp_path: Path) -> None:
    """Only the reading of the verdicts differs."""
    bench = JudgeBench(tmp_path, lines_of(2))
    await bench.run.run()
    await bench.score(make_judge())
    scores = await bench.score(make_judge(verdict={"choices": {"yes": 0.5, "no": 0}}))
    assert bench.judge.ran == 0 and scores.groups["g"].value == 0.25


async def test_all_choices_are_judged(tmp_path: Path) -> None:
    """By the answer that each of them is."""
    wanted = {"expected": "say 1", "metrics": ["pass@2", "mean"]}
    bench = JudgeBench(tmp_path, [chat("a", "say 1", wanted, n=2), chat("b", "say 2", wanted, n=2)])
    await bench.run.run()
    await bench.score(make_judge(prompt="{{ 'yes' if 'say 1' in answer else 'no' }}: {{ answer }}"))
    assert bench.judge.ran == 4
    assert bench.evals["a"]["choices"] == [1, 1] and bench.evals["b"]["choices"] == [0, 0]
    assert bench.evals["a"]["scores"] == {"pass@2": 1, "mean": 1}


async def test_ids_that_look_like_those_of_choices(tmp_path: Path) -> None:
    """Each line and each choice has a verdict of its own."""
    wanted = {"expected": "say 1"}
    lines = [chat("a", "say 1", wanted, n=2), *(chat(name, "no", wanted) for name in ("a#2", "2/a", "1/a"))]
    bench = JudgeBench(tmp_path, lines)
    await bench.run.run()
    scores = await bench.score(make_judge(prompt="{{ 'yes' if 'say 1' in answer else 'no' }}: {{ answer }}"))
    assert {name: found["score"] for name, found in bench.evals.items()} == {
        "a": 1,
        "a#2": 0,
        "2/a": 0,
        "1/a": 0,
    }
    assert bench.judge.ran == 5 and scores.groups["all"].unscored == 0


async def test_failures_of_the_judge_are_named(tmp_path: Path) -> None:
    """They fail the score of their line, and no other."""
    bench = JudgeBench(tmp_path, lines_of(4))
    await bench.run.run()
    prompt = "{% if id == 'line-1' %}LONG{% elif id == 'line-3' %}well{% else %}no{% endif %} {{ answer }}"
    scores = await bench.score(make_judge(prompt=prompt, generation={"max_tokens": 4}))
    assert (scores.groups["g"].unscored, scores.groups["g"].failed) == (2, 0)
    notes = {name: str(found.get("note")) for name, found in bench.evals.items()}
    assert notes["line-0"] == "None" and notes["line-1"].startswith("the judge failed: the engine got 'LONG")
    assert notes["line-3"].startswith("the judge failed: it was to choose one of yes, no")
    assert notes["line-3"].endswith("(it was cut at max_tokens)")
    assert RunFolder.open(bench.run.job).check() == []


async def test_a_verdict_that_takes_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb as the schema of verdicts is a failure of the judge for each answer, and ends with a signal."""
    verdict = {"json": "ok", "schema": make_bomb_schema(), "number": {}}
    judge = make_judge(prompt='{"ok": true} {{ answer }}', verdict=verdict)
    bench = JudgeBench(tmp_path, lines_of(2))
    await bench.run.run()
    others = set(list_scorers(os.getpid()))  # idle ones of other tests
    with monkeypatch.context() as patch:
        patch.setattr(judge_verdict, "OWN", ScorerPool(ScorerLimits(600.0, 1_000_000_000)))
        task = asyncio.create_task(bench.score(judge))
        await until(lambda: not set(list_scorers(os.getpid())) <= others and bench.judge.ran == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert judge_verdict.OWN._idle == []
    monkeypatch.setattr(judge_verdict, "OWN", ScorerPool(ScorerLimits(0.5, 1_000_000_000)))
    assert (await bench.score(judge)).groups["g"].unscored == 2
    note = "the scorer was ended 2 times: it took more than 0.5 s"
    assert bench.evals["line-0"]["note"] == bench.evals["line-1"]["note"] == note


async def test_lines_that_wait_for_a_judge(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`match: judge` scores nothing until it is judged, and the record says so; the log does not for each."""
    bench = JudgeBench(tmp_path, [chat("a", "say 1", {"match": "judge", "expected": "say", "group": "g"})])
    outcome = await bench.run.run()
    assert outcome.scores.groups["g"].unscored == 1
    assert "no judge has scored this answer yet" in bench.evals["a"]["note"]
    assert "line 1 scores" not in caplog.text
    assert (await bench.score(make_judge())).groups["g"].correct == 1
    assert "note" not in bench.evals["a"]


async def test_a_run_that_waits_for_its_judge_has_no_score(tmp_path: Path) -> None:
    """It is not compared with a judged one, noted in a history or exported, as if all its answers were wrong.
    A judged run is, and one whose lines failed, which score 0."""
    lines = [chat(f"line-{i}", f"say {i}", {"match": "judge", "expected": f"say {i}"}) for i in range(4)]
    for name in ("judged", "waiting", "failing"):
        (tmp_path / name).mkdir()
    judged, waiting = (JudgeBench(tmp_path / name, lines) for name in ("judged", "waiting"))
    failing = JudgeBench(tmp_path / "failing", [line | {"body": {"messages": 5}} for line in lines])
    for bench in (judged, waiting, failing):
        await bench.run.run()
    await judged.score(make_judge())
    history, why = tmp_path / "nightly.jsonl", r"waiting/job.out.jsonl: .*none of its answers could be scored"
    for paths in itertools.permutations((judged.run.job, waiting.run.job)):
        with pytest.raises(JobError, match=why):
            compare_paths(*paths)
    with pytest.raises(JobError, match=why):
        add_runs(history, [RunFolder.open(waiting.run.job)])
    with pytest.raises(JobError, match=why):
        ExportedRun.check(RunFolder.open(waiting.run.job), ExportNames())
    [found] = compare_paths(judged.run.job, failing.run.job, rules=PairingRules(any_prompt=True)).comparisons
    assert found.total.result.second == 0 and found.total.failed == 4
    for bench in (judged, failing):
        ExportedRun.check(RunFolder.open(bench.run.job), ExportNames())
    rows = add_runs(history, [RunFolder.open(judged.run.job)])
    assert [row.value for row in rows] == [1.0]
    assert [row.value for row in add_runs(tmp_path / "b.jsonl", [RunFolder.open(failing.run.job)])] == [0.0]


async def test_reasoning_is_not_judged(tmp_path: Path) -> None:
    """The twin of the template that shows it: there is none to show."""
    bench = JudgeBench(tmp_path, lines_of(1))
    await bench.run.run()
    await bench.score(make_judge(prompt="{{ row | string }} {{ answer }}"))
    shown = read(bench.judge.job)[0]["messages"][0]["content"]
    assert "reasoning" not in shown and "say 0" in shown


async def test_an_interrupted_judge_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has judged is kept, and the run keeps its scores until all is judged."""
    bench = JudgeBench(tmp_path, lines_of(8))
    bench.judge.config = make_config(concurrency=1)
    await bench.run.run()
    before, answer, calls = by_id(bench.run.paths.out), FakeClient.answer_body, list[str]()

    async def stop_later(self: FakeClient, request: Request, text: str) -> AsyncGenerator[TokenEvent, None]:
        calls.append(text)
        if len(calls) == 6:
            raise JobError("the disk is full")
        async for event in answer(self, request, text):
            yield event

    with monkeypatch.context() as patch, pytest.raises(JobError, match="the disk is full"):
        patch.setattr(FakeClient, "answer_body", stop_later)
        await bench.score(make_judge())
    done = {name.removeprefix("1/") for name in by_id(bench.judge.paths.out)}
    assert len(done) == 5 and by_id(bench.run.paths.out) == before
    scores = await bench.score(make_judge())
    judged = {text.split(" for ")[1].rstrip(":") for text in bench.judge.client.tries}
    assert len(judged) == 3 and not judged & done and scores.groups["g"].correct == 4


async def test_runs_that_cannot_be_judged(tmp_path: Path) -> None:
    """Nothing is computed, and the judge's job is not written."""
    bench = JudgeBench(tmp_path, chats(2))
    await bench.run.run()
    data = bench.run.paths.out.read_bytes()
    bench.run.paths.out.write_bytes(data.replace(b"say 0", b"SAY 0", 1))
    with pytest.raises(JobError, match="edited"):
        await bench.score(make_judge())
    assert bench.judge.ran == 0 and not bench.judge.job.exists()
    (tmp_path / "failed").mkdir()
    failed = JudgeBench(tmp_path / "failed", [chat("long", "LONG")])
    await failed.run.run()
    with pytest.raises(JobError, match="there are no answers to be judged"):
        await failed.score(make_judge())
