"""`mlxrun batch`: runs a JSONL job on the engine of this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxrun.cli.options import config_options, load

if TYPE_CHECKING:
    from mlxrun.batch.job_run import JobOptions
    from mlxrun.batch.run_paths import Paths
    from mlxrun.config.loading import Loaded

EPILOG = """\b
Examples:
  mlxrun batch jobs/eval.jsonl                     answers in jobs/eval.out.jsonl, scores on the screen
  mlxrun batch jobs/eval.jsonl                     again: goes on where it was killed or interrupted
  mlxrun batch jobs/eval.jsonl --dry-run           counts lines, tokens, images; loads no weights
  mlxrun batch big.jsonl -c prod.yaml -o /data/big.out.jsonl --limit 100
  mlxrun batch big.jsonl --set batch.order=input --set scheduler.max_running=64

\b
A line of JOBS is OpenAI's batch form or a short one; an `eval` key scores the answer:
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "What is 2 + 3?"}]}}
  {"id": "b", "messages": [...], "max_tokens": 20,
   "eval": {"expected": "5", "match": "number", "group": "sums"}}
  {"id": "c", "prompt": "Once upon a time", "temperature": 0}
`match` is exact, contains, regex, json or number. Image parts may be paths relative to JOBS.

\b
JOBS x.jsonl writes x.out.jsonl, x.errors.jsonl (lines that failed, with their line number and reason) and
x.out.jsonl.run/ (manifest.json, journal.jsonl, status.json; until all is done answers.jsonl and cache/, so
that half answers and prompts go on too). Lines that are done are not run again, changed ones are. Ctrl-C
once stops in order, twice at once.

\b
Exit codes: 0 all lines done; 1 some failed; 2 config or job file; 3 engine; 130 interrupted, can go on.
"""


@click.command(epilog=EPILOG)
@click.argument("jobs", type=click.Path(path_type=Path))
@config_options
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="OUT", help="Where the answers go.")
@click.option("--fresh", is_flag=True, help="Forget what earlier runs did and start over.")
@click.option("--retry-failed", is_flag=True, help="Run lines again that failed in an earlier run.")
@click.option("--strict", is_flag=True, help="Check all lines first; if one is refused, run none.")
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
    """Run the JSONL job JOBS; run it again and it goes on where it was."""
    import asyncio

    from mlxrun.batch.job_run import JobOptions
    from mlxrun.batch.run_paths import Paths

    loaded = load(config_path, sets)
    paths = Paths.of(jobs, output)
    options = JobOptions(**flags)
    return asyncio.run(_dry_run(loaded, paths, options) if dry_run else _run(loaded, paths, options))


async def _run(loaded: Loaded, paths: Paths, options: JobOptions) -> int:
    from mlxrun.batch.job_cache import engine_config
    from mlxrun.batch.job_run import JobRun, JobSetup
    from mlxrun.batch.line_answerer import Preparer
    from mlxrun.batch.score_table import count, print_scores, reasons
    from mlxrun.engine.client import EngineClient
    from mlxrun.model.doctor import describe_device
    from mlxrun.model.model_info import load_model_info
    from mlxrun.parsers.registry import detect_formats

    host = load_model_info(loaded.config.model, weights=True)

    async def start() -> EngineClient:
        return await EngineClient.start(engine_config(loaded.config, paths), host)

    formats = detect_formats(host.chat_template, host.tokenizer, loaded.config.parsers)
    prepare = Preparer(host, loaded.config, paths.job.parent, formats=formats)
    setup = JobSetup(loaded.config, loaded.digest, host, prepare, start, describe_device)
    outcome = await JobRun(paths, setup, options, _say).run()
    print_scores(outcome.scores, sys.stdout)
    meter = outcome.meter
    saved = f", {meter.cached_share:.0%} of prompt tokens reused" if meter.reused else ""
    where = f": {paths.out}" if paths.out.exists() else ""  # made at the first answer
    click.echo(f"{meter.done} of {count(meter.total, 'line')} done{saved}{where}")
    if meter.failed:
        click.echo(f"{meter.failed} failed: {paths.errors}")
        for reason, times in reasons(paths.errors):
            _say(f"  {times} x {reason}")
    return outcome.exit_code


async def _dry_run(loaded: Loaded, paths: Paths, options: JobOptions) -> int:
    from mlxrun.batch.job_check import check_job
    from mlxrun.batch.line_answerer import Preparer
    from mlxrun.batch.score_table import count
    from mlxrun.model.model_info import load_model_info
    from mlxrun.parsers.registry import detect_formats

    host = load_model_info(loaded.config.model)
    formats = detect_formats(host.chat_template, host.tokenizer, loaded.config.parsers)
    prepare = Preparer(host, loaded.config, paths.job.parent, formats=formats)
    found = await check_job(paths.job, prepare, options.limit, _say)
    refused = f"{found.refused} would be refused" if found.refused else "none would be refused"
    click.echo(f"{count(found.lines, 'line')}, {refused}")
    click.echo(f"{count(found.requests, 'answer')} of at most {count(found.max_tokens, 'token')} together")
    click.echo(f"{count(found.prompt_tokens, 'prompt token')}, the longest prompt has {found.longest}")
    click.echo(count(found.images, "image"))
    return 1 if found.refused else 0


def _say(text: str) -> None:
    click.echo(text, err=True)
