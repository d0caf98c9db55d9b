"""`mlxrun batch`: runs a JSONL job on an engine in this process, or on workers."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxrun.cli.long_runs import keep_awake, raise_open_files
from mlxrun.cli.options import (
    add_config_options,
    add_model_option,
    add_ray_option,
    list_first,
    load_command_config,
    name_model,
    say,
)
from mlxrun.cli.run_setup import judge_fit, load_preparer, make_command_setup, read_engines
from mlxrun.core.errors import MlxrunError
from mlxrun.core.terminal import print_line

if TYPE_CHECKING:
    from mlxrun.api.text.model_info import ModelInfo
    from mlxrun.config.loading import LoadedConfig
    from mlxrun.config.settings import Config
    from mlxrun.jobs.lines.job_check import CheckedLines
    from mlxrun.jobs.records.run_paths import JobPaths
    from mlxrun.jobs.run.job_run import JobOptions, JobSetup
    from mlxrun.jobs.run.progress import ProgressMeter
    from mlxrun.jobs.scoring.eval_spec import EvalReader

EPILOG = """\b
Examples:
  mlxrun batch jobs/eval.jsonl                     answers in jobs/eval.out.jsonl, scores on the screen
  mlxrun batch jobs/eval.jsonl                     again: continues where it was killed or interrupted
  mlxrun batch jobs/eval.jsonl --dry-run           counts lines, tokens, images; loads no weights
  mlxrun batch jobs/eval.jsonl --model qwen3-8b-4bit     a model of the hub, or of a folder
  mlxrun batch big.jsonl -c prod.yaml -o /data/big.out.jsonl --limit 100
  mlxrun batch big.jsonl --set batch.order=input --set scheduler.max_running=64
  mlxrun batch big.jsonl --ray                     a worker on each GPU of this machine (docs/scale.md)
  mlxrun batch big.jsonl --ray 10.0.0.1:6379       a worker on each GPU of a Ray cluster
  mlxrun batch s3://bucket/big.jsonl               answers in s3://bucket/big.out.jsonl (mlxrun[remote], s3fs)

\b
A line of JOBS has OpenAI's batch format or a short one; an `eval` key scores the answer:
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "What is 2 + 3?"}]}}
  {"id": "b", "messages": [...], "max_tokens": 20,
   "eval": {"expected": "5", "match": "number", "group": "sums"}}
  {"id": "c", "prompt": "Once upon a time", "temperature": 0}
`match` is exact, contains, contains_all, regex, json, number, json_schema, choice, f1, bleu, chrf, chrf++,
ter, likeliest, perplexity or judge; a list in `expected` holds alternatives. docs/jobs.md has their options;
`mlxrun score` scores a finished job again.
Image parts may be paths relative to JOBS, unless JOBS is a URL.

\b
JOBS x.jsonl writes x.out.jsonl, x.errors.jsonl (lines that failed, with their line number and reason) and
x.out.jsonl.run/ (manifest.json, scores.json, status.json, journal.jsonl; until all lines are done also
answers.jsonl and cache/, to continue partial answers and prompts). Lines that are done are not run again
unless they changed. With another model or other sampling settings, give another -o, or --fresh; with other
versions of the libraries or on another device, one of these or --mixed.
Press Ctrl-C to stop and keep all finished lines; press it again to stop immediately.

\b
Exit codes: 0 all lines done; 1 some failed or could not be scored; 2 config or job file; 3 engine, memory,
or the disk is full; 130 interrupted, resumable.
"""

SHOWN_REASONS = 3  # of failures; all are in the errors file


@click.command(epilog=EPILOG)
@click.argument("jobs", type=click.Path())
@add_model_option
@add_config_options
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    metavar="OUT",
    help="Where the answers go, a path or a URL. Default: JOBS with the ending .out.jsonl.",
)
@click.option(
    "--fresh", is_flag=True, help="Start over; answers of earlier runs are moved to OUT.run/earlier."
)
@click.option("--retry-failed", is_flag=True, help="Run lines that failed in an earlier run again.")
@click.option(
    "--mixed", is_flag=True, help="Go on with other versions, or on another device, than earlier runs had."
)
@click.option("--strict", is_flag=True, help="Validate all lines first; if one is refused, run none.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N lines of JOBS.")
@click.option(
    "--scorer", metavar="MODULE:FUNCTION", help="Score answers by a Python function, in place of `match`."
)
@add_ray_option
@click.option(
    "--dry-run",
    is_flag=True,
    help="Count lines, tokens and images, estimate memory and time, show what would be refused.",
)
def command(
    jobs: str,
    model: str | None,
    config_path: Path | None,
    sets: tuple[str, ...],
    output: str | None,
    dry_run: bool,
    scorer: str | None,
    ray_address: str | None,
    **flags: Any,
) -> int:
    """Run the JSONL job JOBS; the same command continues an interrupted job."""
    import mlxrun.model  # noqa: F401  its limits of memory are checked before more is imported
    from mlxrun.cli.signal_loop import run_async
    from mlxrun.engine.prefix_cache.cache_folder import get_default_folder
    from mlxrun.jobs.lines.job_check import make_eval_reader, report_likelihood_lines
    from mlxrun.jobs.lines.job_file import check_job_file
    from mlxrun.jobs.run.job_run import JobOptions
    from mlxrun.jobs.run.remote_job import open_paths

    spool = get_default_folder().with_name("jobs")
    with open_paths(jobs, output, spool, say, publish=not dry_run) as paths:
        check_job_file(paths.job)  # before the model, which may take minutes to download or load
        evals = make_eval_reader(paths.job, scorer)
        if scorer is not None:
            report_likelihood_lines(paths.job, str(jobs), say)
        loaded = load_command_config(config_path, sets, name_model(model, "--model"))
        options = JobOptions(**flags)
        if dry_run:
            return run_async(_dry_run(loaded, paths, options))
        raise_open_files()
        with keep_awake(loaded.config.batch.keep_awake):
            return run_async(_run(ray_address, loaded, paths, options, evals))


async def _run(
    ray_address: str | None, loaded: LoadedConfig, paths: JobPaths, options: JobOptions, evals: EvalReader
) -> int:
    if ray_address is None:
        setup = make_command_setup(loaded, paths.job.parent, paths.cache)
        return await _run_job(setup, paths, options, evals, notes_pace=True)
    from mlxrun.cli.ray_setup import run_on_ray

    async with run_on_ray(ray_address, loaded, paths, options.mixed) as setup:
        return await _run_job(setup, paths, options, evals)


async def _run_job(
    setup: JobSetup, paths: JobPaths, options: JobOptions, evals: EvalReader, notes_pace: bool = False
) -> int:
    from mlxrun.jobs.records.run_paths import list_common_reasons
    from mlxrun.jobs.run.job_run import JobRun
    from mlxrun.jobs.run.progress import pluralize
    from mlxrun.jobs.run.stop_signals import StopSignals
    from mlxrun.jobs.scoring.score_groups import print_scores

    setup = replace(setup, evals=evals)
    outcome = await JobRun(paths, setup, options, say, StopSignals(say)).run()
    if notes_pace:
        _note_pace(setup, outcome.meter)
    print_scores(outcome.scores, sys.stdout)
    if cut := outcome.scores.cut_by_length:
        print_line(f"{pluralize(cut, 'answer')} cut at the maximum number of tokens (finish_reason: length)")
    if broken := outcome.scores.broken:
        print_line(f"{pluralize(broken, 'answer')} could not be scored; `note` in {paths.out} says why")
    meter = outcome.meter
    reused = f", {meter.cached_share:.0%} of prompt tokens reused" if meter.reused else ""
    output = f": {paths.out}" if paths.out.exists() else ""  # created at the first answer
    print_line(f"{outcome.format_done()} done{reused}{output}")
    if outcome.has_more and (outcome.failed or outcome.done < meter.lines):
        print_line(f"{meter.format_done()} done, {meter.failed} failed (--limit)")
    if outcome.failed:
        plain = outcome.failed - outcome.scores.compute_total().failed  # the table has the others
        where = f" ({plain} without an `eval`)" if plain > 0 and outcome.scores.groups else ""
        print_line(f"{outcome.failed} failed: {paths.errors}{where}")
        reasons = [f"{times} x {reason}" for reason, times in list_common_reasons(paths.errors)]
        for line in list_first(reasons, SHOWN_REASONS):
            say(f"  {line}")
    return outcome.exit_code


def _find_paces_file() -> Path:
    from mlxrun.server.data_folder import find_data_folder

    return find_data_folder(os.environ) / "job-paces.jsonl"


def _note_pace(setup: JobSetup, meter: ProgressMeter) -> None:
    """Note how fast this run was, if it was long enough to tell."""
    from mlxrun.jobs.records.job_paces import JobPace, note_pace
    from mlxrun.jobs.run.progress import SURE_LINES, SURE_SECONDS

    seconds = meter.seconds
    if seconds >= SURE_SECONDS and meter.run_done >= SURE_LINES:
        prompt, digest = meter.computed + meter.reused, setup.model_info.digests["model"]
        counts = meter.run_done, prompt, meter.reused, meter.output
        note_pace(_find_paces_file(), JobPace(digest, int(time.time()), round(seconds, 3), *counts))


def _describe_time(model_info: ModelInfo, found: CheckedLines) -> str | None:
    """How long the job may take, by earlier jobs of this model; None if there are none."""
    from mlxrun.jobs.records.job_paces import estimate_seconds, read_paces
    from mlxrun.jobs.run.progress import format_duration, pluralize

    paces = read_paces(_find_paces_file(), model_info.digests["model"])
    lines = found.lines - found.refused
    bounds = estimate_seconds(paces, lines, found.prompt_tokens, found.max_tokens) if lines else None
    if bounds is None:
        return None
    answered = sum(pace.lines for pace in paces)
    output = sum(pace.output_tokens for pace in paces) / answered
    low, high = map(format_duration, bounds)
    span = low if low == high else f"{low} to {high}"
    earlier = f"{len(paces)} earlier {'job' if len(paces) == 1 else 'jobs'} of this model here"
    answers = f"whose lines had {pluralize(round(output), 'output token')}"
    return f"{span} without loading, by {earlier}, {answers}"


def _describe_memory(config: Config, info: ModelInfo, tokens: int) -> str:
    """Whether rows of so many tokens fit, and how many at a time."""
    from mlxrun.model.fit.verdict import WantedRows

    try:
        return judge_fit(config, WantedRows(tokens=min(tokens, info.context_length))).verdict
    except MlxrunError as error:
        return f"not known: {error}"


async def _dry_run(loaded: LoadedConfig, paths: JobPaths, options: JobOptions) -> int:
    from mlxrun.jobs.lines.job_check import check_job
    from mlxrun.jobs.run.progress import pluralize

    def report(number: int, reason: str) -> None:
        say(f"{paths.job}:{number}: {reason}")

    model_info, preparer = load_preparer(loaded.config, paths.job.parent, weights=False)
    found = await check_job(paths.job, preparer, options.limit, report)
    refused = f"{found.refused} would be refused" if found.refused else "none would be refused"
    print_line(f"{pluralize(found.lines, 'line')}, {refused}")
    print_line(
        f"{pluralize(found.requests, 'answer')} with at most {pluralize(found.max_tokens, 'token')} in total"
    )
    print_line(f"{pluralize(found.prompt_tokens, 'prompt token')}, the longest prompt has {found.longest}")
    print_line(pluralize(found.images, "image"))
    if found.largest and model_info.pooled is None:
        for at, (config, info) in enumerate(read_engines(loaded.config, model_info)):
            whose = f" of {config.model.path}, which plays the user" if at else ""
            print_line(f"memory{whose}: {_describe_memory(config, info, found.largest)}")
    if (time_needed := _describe_time(model_info, found)) is not None:
        print_line(f"time: {time_needed}")
    return 1 if found.refused else 0
