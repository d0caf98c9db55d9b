"""Runs a judge over the answers of a run, and scores the run by its verdicts.

The judge's requests are an ordinary job, `judge/job.jsonl` in the run folder, which may be interrupted.
Answers are not judged again while answers, template and model stay the same. With another model or other
settings, the judge's earlier answers are moved to `earlier`. Answers of failed lines are not judged.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlxrun.core.durable_writes import write_atomically
from mlxrun.core.errors import JobError
from mlxrun.evals.judge import Judge, find_question
from mlxrun.evals.judge_verdict import VerdictError, read_limited
from mlxrun.evals.rescoring import check_run, rescore
from mlxrun.evals.run_folders.run_folder import RUNNING, RunFolder
from mlxrun.evals.run_folders.run_line import RunLine
from mlxrun.jobs.lines.job_file import NO_SCORERS, JobLine
from mlxrun.jobs.lines.line_keys import digest_settings
from mlxrun.jobs.records.output_records import read_talk
from mlxrun.jobs.records.run_paths import JobPaths, wrap_write_errors
from mlxrun.jobs.run.job_run import JobOptions, JobRun, JobSetup
from mlxrun.jobs.run.progress import ProgressMeter, ProgressView, make_view
from mlxrun.jobs.run.stop_signals import StopSignals
from mlxrun.jobs.scoring.answer_text import is_cut
from mlxrun.jobs.scoring.eval_spec import OF_LOGPROBS, EvalReader, count_choices
from mlxrun.jobs.scoring.line_scores import LineTries, run_scorers
from mlxrun.jobs.scoring.score_groups import Scores
from mlxrun.jobs.scoring.verdict import ScoredAnswer, Verdict

JUDGE = "judge"  # the folder below the run folder, and what records call the match


@dataclass(frozen=True, slots=True)
class JudgeVerdicts:
    """The verdicts of a judge as a scorer. `verdicts`: by the id of the judge's line."""

    verdicts: Mapping[str, Verdict]
    digest: str
    name: str = JUDGE

    def score(self, answer: ScoredAnswer) -> Verdict:
        """Look up the verdict on an answer."""
        found = self.verdicts.get(_name_line(str(answer.line["custom_id"]), answer.index))
        return found or Verdict(0, note="the judge failed: it has no verdict on this answer")


async def run_judge(
    paths: JobPaths,
    judge: Judge,
    setup: JobSetup,
    stop: StopSignals,
    say: Callable[[str], None],
    view: Callable[[ProgressMeter], ProgressView] = make_view,
) -> Scores:
    """Judge the answers of the run at `paths`, and score it. `setup`: of the judge's model, whose engine
    starts if an answer is left to be judged. JobError if the run is running, or is not as its job left it."""
    run = RunFolder.open(paths.out)
    if run.state == RUNNING:
        raise JobError(f"{run.name}: its job is running; wait for it before its answers are judged")
    job = await asyncio.to_thread(_write_job, run, judge)
    setup = replace(setup, evals=NO_SCORERS, user=None)
    fresh = _has_other_settings(job, setup)
    if fresh:
        say("the judge's model or settings have changed; it judges all answers again")
    await JobRun(job, setup, JobOptions(fresh=fresh), say, stop, view).run()
    return await stop.run(run_scorers(_score_run, run, judge, job))


def _score_run(run: RunFolder, judge: Judge, job: JobPaths) -> Scores:
    judged = RunFolder.open(job.out)
    verdicts = {each.id: _read_verdict(each, judge) for each in judged.read_lines()}
    parts = [[name, each.score, each.extracted, each.note] for name, each in sorted(verdicts.items())]
    digest = hashlib.sha256(json.dumps([judge.digest, parts]).encode()).hexdigest()
    facts = {
        "judge": {
            "template": judge.content,
            "sha256": judge.digest,
            "model": judged.manifest["model"],
            "config_hash": judged.manifest["config_hash"],
            "settings_sha256": digest_settings(judged.manifest["settings"]),
            "job": f"{JUDGE}/{job.job.name}",
            "output_sha256": judged.manifest["output"]["sha256"],
        }
    }
    return rescore(run, EvalReader(scorer=JudgeVerdicts(verdicts, digest)), facts)


def _has_other_settings(job: JobPaths, setup: JobSetup) -> bool:
    """Whether earlier answers of the judge are of another model or of other settings."""
    if not job.has_answers() or not job.manifest.exists():
        return False
    known = RunFolder.open(job.out).manifest["settings"]
    return digest_settings(known) != digest_settings(setup.collect_settings())


def _write_job(run: RunFolder, judge: Judge) -> JobPaths:
    """Write the judge's job, a line for each choice of each answered line. An equal file is left as it is."""
    check_run(run)
    folder = run.paths.folder / JUDGE
    with wrap_write_errors(folder):
        folder.mkdir(exist_ok=True)
    lines = [line for each in run.read_lines() for line in _make_lines(each, judge)]
    if not lines:
        raise JobError(f"{run.name}: there are no answers to be judged")
    data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    path = folder / "job.jsonl"
    if not path.exists() or path.read_bytes() != data:
        with wrap_write_errors(path):
            write_atomically(path, data)
    return JobPaths(path)


def _make_lines(each: RunLine, judge: Judge) -> Iterator[dict[str, Any]]:
    line = each.line
    if each.answer is None or not isinstance(line, JobLine):
        return
    wanted = line.eval
    if wanted is not None and wanted.name in OF_LOGPROBS:
        return  # it is scored by the logprobs of its prompts, and has no answer
    columns = {
        "question": find_question(line.body),
        "expected": None if wanted is None else wanted.expected,
        "group": "all" if wanted is None else wanted.group,
        "id": line.custom_id,
        "line": {"custom_id": line.custom_id, "url": line.url, "body": line.body},
        **(read_talk(each.record) if "transcript" in each.record else {}),
    }
    answers = each.answers[: count_choices(line.body)]
    for index, answer in enumerate(answers):
        answer = answer.encode("utf-8", "replace").decode()  # a lone surrogate is no text
        yield judge.make_line(_name_line(line.custom_id, index), {**columns, "answer": answer})


def _name_line(custom_id: str, index: int) -> str:
    """The id of the judge's line about one choice of a line. No two are equal, whatever the ids are."""
    return f"{index + 1}/{custom_id}"


def _read_verdict(each: RunLine, judge: Judge) -> Verdict:
    """The verdict in a record of the judge's job. One that failed, or cannot be read, has a note."""
    if each.answer is None:
        return Verdict(0, note=f"the judge failed: {each.error}"[:500])
    cut = " (it was cut at max_tokens)" if is_cut(each.response) else ""

    def read(answer: str) -> Verdict:
        try:
            return Verdict(*read_limited(judge.reader, answer))
        except VerdictError as error:
            return Verdict(0, note=f"the judge failed: {error}{cut}"[:500])

    return LineTries().call(read, each.answer)
