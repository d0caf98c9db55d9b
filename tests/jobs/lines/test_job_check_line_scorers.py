"""The scorers that lines of a job name, loaded before anything else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.api.parsers.registry import choose_formats
from mlxrun.core.errors import JobError
from mlxrun.jobs.lines.job_check import load_line_scorers, make_eval_reader
from mlxrun.jobs.run.job_run import JobSetup
from mlxrun.jobs.run.line_answerer import LinePreparer
from tests.helpers.batch_fakes import Bench, by_id, chat, chats, read, write_job

CODE = """
def count(answer):
    if answer.startswith("bad"):
        raise RuntimeError("no")
    return min(1, len(answer) / 10)
"""


@pytest.fixture
def scorer(tmp_path: Path) -> str:
    (tmp_path / "s.py").write_text(CODE)
    return f"{tmp_path}/s.py:count"


def test_all_scorers_of_a_file(tmp_path: Path, scorer: str) -> None:
    job = write_job(tmp_path, [*chats(2), "bad", chat("a", "x", {"scorer": scorer}), chat("b", '"scorer"')])
    found = load_line_scorers(job)
    assert list(found) == [scorer] and found[scorer].name == scorer
    assert make_eval_reader(job).describe() == {"scorers": {scorer: found[scorer].digest}}
    assert load_line_scorers(write_job(tmp_path, chats(2), "other.jsonl")) == {}


def test_a_scorer_that_cannot_be_loaded(tmp_path: Path) -> None:
    job = write_job(tmp_path, [*chats(2), chat("a", "x", {"scorer": "no_such_module:f"})])
    with pytest.raises(JobError, match=r"job.jsonl:3: eval.scorer: scorer 'no_such_module:f': cannot be imp"):
        load_line_scorers(job)


async def test_a_job_with_a_scorer(tmp_path: Path, scorer: str) -> None:
    """One line's failure harms no other; the source's digest is in the manifest; another source scores the
    answers again and computes none."""
    wanted = {"scorer": scorer, "group": "s"}
    bench = Bench(write_job(tmp_path, [chat("a", "12345678", wanted), chat("b", "bad", wanted), *chats(2)]))
    bench.evals = make_eval_reader(bench.job)
    outcome = await bench.run()
    records = {record["custom_id"]: record["eval"] for record in read(bench.paths.out)}
    assert outcome.exit_code == 1 and (records["a"]["score"], records["a"]["match"]) == (1, scorer)
    assert records["b"]["score"] == 0 and "raised RuntimeError: no" in records["b"]["note"]
    assert (outcome.scores.groups["s"].unscored, outcome.scores.groups["g0"].correct) == (1, 1)
    first = json.loads(bench.paths.manifest.read_text())["scoring"]["scorers"][scorer]
    (tmp_path / "s.py").write_text(CODE.replace("10", "40"))
    bench.evals = make_eval_reader(bench.job)
    before = by_id(bench.paths.out)
    outcome = await bench.run()
    assert bench.ran == 0 and outcome.scores.groups["s"].scores.value == pytest.approx(10 / 40 / 2)
    assert json.loads(bench.paths.manifest.read_text())["scoring"]["scorers"][scorer] != first
    assert {name for name, data in by_id(bench.paths.out).items() if data != before[name]} == {"a"}


async def test_a_server_runs_no_code_of_clients(tmp_path: Path, scorer: str) -> None:
    """Without loaded scorers the line is refused by name."""
    bench = Bench(write_job(tmp_path, [chat("a", "x", {"scorer": scorer}), *chats(2)]))
    with pytest.raises(JobError, match=":1: eval.scorer .* is not loaded"):
        await bench.run()


async def test_a_multiple_choice_by_logprob(tmp_path: Path) -> None:
    """From the job's line to the score: the engine's logprobs of the prompts are those that are compared."""
    prompts = ["Capital of France: Paris", "Capital of France: Rome", "Capital of France: Bonn"]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 0}
    wanted = {"match": "likeliest", "expected": 0, "context_chars": 18, "group": "mc"}
    bench = Bench(
        write_job(
            tmp_path, [{"id": "a", **body, "eval": wanted}, {"id": "b", **body, "n": 2, "eval": wanted}]
        )
    )
    outcome = await bench.run()
    record = read(bench.paths.out)[0]
    sums = []
    for choice in record["response"]["body"]["choices"]:
        pairs = zip(choice["logprobs"]["text_offset"], choice["logprobs"]["token_logprobs"], strict=True)
        sums.append(sum(logprob for offset, logprob in pairs if offset >= 18))
    best = max(range(3), key=sums.__getitem__)
    assert (record["eval"]["extracted"], record["eval"]["score"]) == (best, int(best == 0))
    assert record["eval"]["scores"].keys() == {"acc", "acc_norm", "acc_bytes"}
    assert outcome.scores.cut_by_length == 0
    assert read(bench.paths.errors)[0]["error"]["message"] == "eval.match likeliest needs `n: 1`"


async def test_all_choices_of_a_line(tmp_path: Path) -> None:
    """The table and scores.json have pass@k and the majority."""
    wanted = {"expected": "^say 1[xyz]x$", "match": "regex"}
    bench = Bench(write_job(tmp_path, [chat(f"line-{at}", "say 1", wanted, n=8) for at in range(20)]))
    outcome = await bench.run()
    metrics = json.loads(bench.paths.scores.read_text())["total"]["metrics"]
    assert list(metrics) == ["mean", "pass@8", "pass^8", "majority"]
    assert metrics["pass^8"] < metrics["mean"] < metrics["pass@8"]
    assert metrics["mean"] == round(outcome.scores.compute_total().scores.value, 10)


CLEAN = """
def is_clean(answer, response):
    return answer.startswith("fine") and "SECRET" not in f"{answer} {response}"
"""


@pytest.mark.parametrize(
    "url", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions", "twin"]
)
async def test_reasoning_models_are_scored_by_their_answers(tmp_path: Path, url: str) -> None:
    """Through all endpoints, from the engine's tokens to what a scorer gets. A raw completion is not parsed;
    `after` leaves its reasoning out. The twin: a model whose reasoning no parser knows."""
    text = "<think>SECRET</think>fine"
    path = tmp_path / "s.py"
    path.write_text(CLEAN)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 60}
    if url == "/v1/responses":
        body = {"input": text}
    elif url == "/v1/messages":
        body |= {"model": "m", "thinking": {"type": "adaptive"}}
    elif url == "/v1/completions":
        body = {"prompt": text, "max_tokens": 60}
    scored: dict[str, Any] = {"scorer": f"{path}:is_clean"}
    if url == "/v1/completions":
        scored = {"match": "regex", "expected": "^fine..$", "after": "</think>"}
    endpoint = "/v1/chat/completions" if url == "twin" else url
    bench = ReasoningBench(write_job(tmp_path, [{"id": "a", "url": endpoint, **body, "eval": scored}]))
    bench.reasoning = "none" if url == "twin" else "qwen3"
    bench.evals = make_eval_reader(bench.job)
    await bench.run()
    record = read(bench.paths.out)[0]
    assert "SECRET" in json.dumps(record["response"])  # the record keeps the reasoning
    assert record["eval"]["score"] == (0 if url == "twin" else 1), record["eval"]


class ReasoningBench(Bench):
    """A bench whose model reasons in <think> tags."""

    reasoning = "none"

    def make_setup(self) -> JobSetup:
        formats = choose_formats(None, [], tools="none", reasoning=self.reasoning)
        preparer = LinePreparer(self.model_info, self.config, self.job.parent, formats=formats)
        return replace(super().make_setup(), preparer=preparer)
