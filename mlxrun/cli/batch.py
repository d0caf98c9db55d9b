"""`mlxrun batch`: runs a JSONL job on an engine in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxrun.cli.options import add_config_options, load_command_config

if TYPE_CHECKING:
    from mlxrun.batch.job_run import JobOptions
    from mlxrun.batch.line_answerer import LinePreparer
    from mlxrun.batch.run_paths import JobPaths
    from mlxrun.config.loading import LoadedConfig
    from mlxrun.model.model_info import LoadedModelInfo

EPILOG = """\b
Examples:
  mlxrun batch jobs/eval.jsonl                     answers in jobs/eval.out.jsonl, scores on the screen
  mlxrun batch jobs/eval.jsonl                     again: continues where it was killed or interrupted
  mlxrun batch jobs/eval.jsonl --dry-run           counts lines, tokens, images; loads no weights
  mlxrun batch big.jsonl -c prod.yaml -o /data/big.out.jsonl --limit 100
  mlxrun batch big.jsonl --set batch.order=input --set scheduler.max_running=64

\b
A line of JOBS has OpenAI's batch format or a short one; an `eval` key scores the answer:
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "What is 2 + 3?"}]}}
  {"id": "b", "messages": [...], "max_tokens": 20,
   "eval": {"expected": "5", "match": "number", "group": "sums"}}
  {"id": "c", "prompt": "Once upon a time", "temperature": 0}
`match` is exact, contains, regex, json or number. Image parts may be paths relative to JOBS.

\b
JOBS x.jsonl writes x.out.jsonl, x.errors.jsonl (lines that failed, with their line number and reason) and
x.out.jsonl.run/ (manifest.json, journal.jsonl, status.json; until all lines are done also answers.jsonl and
cache/, to continue partial answers and prompts). Lines that are done are not run again unless they changed.
Press Ctrl-C to stop and keep all finished lines; press it again to stop immediately.

\b
Exit codes: 0 all lines done; 1 some failed; 2 config or job file; 3 engine; 130 interrupted, resumable.
"""

SHOWN_REASONS = 3  # of failures; all are in the errors file


@click.command(epilog=EPILOG)
@click.argument("jobs", type=click.Path(path_type=Path))
@add_config_options
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="OUT", help="Where the answers go.")
@click.option("--fresh", is_flag=True, help="Delete the results of earlier runs and start over.")
@click.option("--retry-failed", is_flag=True, help="Run lines that failed in an earlier run again.")
@click.option("--strict", is_flag=True, help="Validate all lines first; if one is refused, run none.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N lines of JOBS.")
@click.option("--dry-run", is_flag=True, help="Count lines, tokens and images, show what would be refused.")
def command(
    jobs: Path,
    config_path: Path | None,
    sets: tuple[str, ...],
    output: Path | None,
    dry_run: bool,
    **flags: Any,
) -> int:
    """Run the JSONL job JOBS; the same command continues an interrupted job."""
    import asyncio

    from mlxrun.batch.job_run import JobOptions
    from mlxrun.batch.run_paths import JobPaths

    loaded = load_command_config(config_path, sets)
    paths = JobPaths(jobs, output)
    options = JobOptions(**flags)
    return asyncio.run(_dry_run(loaded, paths, options) if dry_run else _run(loaded, paths, options))


async def _run(loaded: LoadedConfig, paths: JobPaths, options: JobOptions) -> int:
    from mlxrun.batch.job_cache import choose_engine_config
    from mlxrun.batch.job_run import JobRun, JobSetup
    from mlxrun.batch.score_table import list_common_reasons, pluralize, print_scores
    from mlxrun.batch.stop_signals import StopSignals
    from mlxrun.engine.client import EngineClient
    from mlxrun.model.doctor import describe_device

    model_info, preparer = _load_preparer(loaded, paths, weights=True)

    async def start() -> EngineClient:
        return await EngineClient.start(choose_engine_config(loaded.config, paths), model_info)

    setup = JobSetup(loaded.config, loaded.digest, model_info, preparer, start, describe_device)
    outcome = await JobRun(paths, setup, options, _say, StopSignals(_say)).run()
    print_scores(outcome.scores, sys.stdout)
    meter = outcome.meter
    reused = f", {meter.cached_share:.0%} of prompt tokens reused" if meter.reused else ""
    output = f": {paths.out}" if paths.out.exists() else ""  # created at the first answer
    click.echo(f"{meter.done} of {pluralize(meter.total, 'line')} done{reused}{output}")
    if meter.failed:
        click.echo(f"{meter.failed} failed: {paths.errors}")
        reasons = list_common_reasons(paths.errors)
        for reason, times in reasons[:SHOWN_REASONS]:
            _say(f"  {times} x {reason}")
        if len(reasons) > SHOWN_REASONS:
            _say(f"  ... and {len(reasons) - SHOWN_REASONS} more")
    return outcome.exit_code


async def _dry_run(loaded: LoadedConfig, paths: JobPaths, options: JobOptions) -> int:
    from mlxrun.batch.job_check import check_job
    from mlxrun.batch.score_table import pluralize

    def report(number: int, reason: str) -> None:
        _say(f"{paths.job}:{number}: {reason}")

    _, preparer = _load_preparer(loaded, paths, weights=False)
    found = await check_job(paths.job, preparer, options.limit, report)
    refused = f"{found.refused} would be refused" if found.refused else "none would be refused"
    click.echo(f"{pluralize(found.lines, 'line')}, {refused}")
    click.echo(
        f"{pluralize(found.requests, 'answer')} with at most {pluralize(found.max_tokens, 'token')} in total"
    )
    click.echo(f"{pluralize(found.prompt_tokens, 'prompt token')}, the longest prompt has {found.longest}")
    click.echo(pluralize(found.images, "image"))
    return 1 if found.refused else 0


def _load_preparer(
    loaded: LoadedConfig, paths: JobPaths, *, weights: bool
) -> tuple[LoadedModelInfo, LinePreparer]:
    from mlxrun.batch.line_answerer import LinePreparer
    from mlxrun.model.model_info import load_model_info
    from mlxrun.parsers.registry import detect_formats

    model_info = load_model_info(loaded.config.model, weights=weights)
    formats = detect_formats(model_info.chat_template, model_info.tokenizer, loaded.config.parsers)
    return model_info, LinePreparer(model_info, loaded.config, paths.job.parent, formats=formats)


def _say(text: str) -> None:
    click.echo(text, err=True)
