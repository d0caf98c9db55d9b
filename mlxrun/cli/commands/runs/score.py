"""`mlxrun score`: scores the answers of a run again, by other rules, a Python function or a judge."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxrun.cli.options import add_config_options, load_command_config, parse_field, say
from mlxrun.core.errors import JobError
from mlxrun.core.terminal import print_line
from mlxrun.jobs.scoring.eval_spec import MATCHES

if TYPE_CHECKING:
    from mlxrun.config.loading import LoadedConfig
    from mlxrun.evals.judge import Judge
    from mlxrun.evals.run_folders.run_folder import RunFolder
    from mlxrun.jobs.scoring.score_groups import Scores

EPILOG = """\b
Examples:
  mlxrun score jobs/eval.jsonl                                by the `eval` of the job file, which was edited
  mlxrun score jobs/eval.jsonl --match number --eval tolerance=1%
  mlxrun score eval.out.jsonl --scorer my_scorers.py:score    by a Python function
  mlxrun score eval.out.jsonl --judge judge.yaml -c big.yaml  by a model, whose config is big.yaml
  mlxrun score suite.out --match choice                         every cell of a suite

\b
RUN is a job file, its output, its run folder, or a folder that contains runs. Records, journal, scores.json
and the manifest are brought up to date; answers are not computed, and no model is loaded but that of a judge.
The requests of the job file must be those of the run. A later `mlxrun batch` scores by the job file again.

\b
A scorer is a function of any of these parameters, and returns a number from 0 to 1, or a dict with `score`.
With a `unit` in the dict, it may be any number (docs/evals.md):
  def score(answer, expected, line, response): return answer.strip() == expected

\b
A judge is a YAML file:
  prompt: |
    Question: {{ question }}
    Answer: {{ answer }}
    Does it say the same as "{{ expected }}"? Reply with A (yes), B (partly) or C (no).
  generation: {max_tokens: 200, temperature: 0}
  verdict: {choices: {A: 1, B: 0.5, C: 0}}
Its answers are in judge/ in the run folder; what is judged already is not judged again.

\b
Exit codes: 0 done; 1 some answers could not be scored; 2 run, scorer, judge or config; 3 engine; 130
interrupted, resumable.
"""


@click.command(epilog=EPILOG)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--match", type=click.Choice(MATCHES), help="Compare by this match, in place of the lines' own."
)
@click.option(
    "--eval",
    "fields",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Key of the `eval` of all lines, with a YAML value: tolerance=0.1. May be given several times.",
)
@click.option("--scorer", metavar="MODULE:FUNCTION", help="Score by a Python function.")
@click.option("--judge", type=click.Path(path_type=Path), metavar="FILE", help="Score by a model.")
@add_config_options
def command(
    run: Path,
    match: str | None,
    fields: tuple[str, ...],
    scorer: str | None,
    judge: Path | None,
    config_path: Path | None,
    sets: tuple[str, ...],
) -> int:
    """Score the answers of RUN again without generating them."""
    from mlxrun.cli.signal_loop import run_async
    from mlxrun.evals.rescoring import check_journal
    from mlxrun.evals.run_folders.run_folder import open_runs

    changes = dict(parse_field(each, "--eval") for each in fields) | (
        {} if match is None else {"match": match}
    )
    if judge is not None and (changes or scorer):
        raise click.UsageError("--judge cannot be given with --match, --eval or --scorer")
    if scorer is not None and changes:
        raise click.UsageError("--scorer cannot be given with --match or --eval")
    if judge is None and (config_path or sets):
        raise click.UsageError("-c and --set are the config of a judge's model: give --judge")
    if match == "judge":
        raise click.UsageError("--match judge needs a judge: give --judge FILE")
    runs = open_runs(run)
    if judge or scorer or match:
        runs = _leave_likelihoods(runs)
    for each in runs:  # before a scorer is imported, and before anything is written
        check_journal(each)
    if judge is not None:
        from mlxrun.evals.judge import read_judge

        content = read_judge(judge)
        return run_async(_judge_runs(runs, content, load_command_config(config_path, sets)))
    return _score_runs(runs, scorer, changes)


def _leave_likelihoods(runs: list[RunFolder]) -> list[RunFolder]:
    """The runs that have answers to be scored. Lines that compare likelihoods have none, and are named."""
    from mlxrun.jobs.lines.job_check import report_likelihood_lines
    from mlxrun.jobs.lines.job_file import check_job_file

    for each in runs:
        check_job_file(each.paths.job)
    found = [each for each in runs if report_likelihood_lines(each.paths.job, each.name, say)]
    if not found:
        raise JobError(f"{runs[0].name}: no line has an answer text that could be scored in another way")
    return found


def _score_runs(runs: list[RunFolder], scorer: str | None, changes: dict[str, Any]) -> int:
    from mlxrun.evals.rescoring import rescore
    from mlxrun.jobs.lines.job_check import make_eval_reader
    from mlxrun.jobs.lines.job_file import check_job_file

    readers = []
    for each in runs:  # all scorers are loaded before anything is written
        check_job_file(each.paths.job)
        readers.append(make_eval_reader(each.paths.job, scorer, changes))
    found = [_report(each, rescore(each, reader)) for each, reader in zip(runs, readers, strict=True)]
    return max(found)


async def _judge_runs(runs: list[RunFolder], judge: Judge, loaded: LoadedConfig) -> int:
    from mlxrun.cli.run_setup import make_command_setup
    from mlxrun.evals.judge_run import JUDGE, run_judge
    from mlxrun.jobs.run.stop_signals import StopSignals

    found = []
    for each in runs:
        folder = each.paths.folder / JUDGE
        setup = make_command_setup(loaded, folder, folder / "job.out.jsonl.run" / "cache")
        found.append(_report(each, await run_judge(each.paths, judge, setup, StopSignals(say), say)))
    return max(found)


def _report(run: RunFolder, scores: Scores) -> int:
    """Print the scores of a run; the exit code."""
    from mlxrun.evals.suites.suite_manifest import update_cell_scores
    from mlxrun.jobs.run.progress import pluralize
    from mlxrun.jobs.scoring.score_groups import print_scores

    print_line(f"{run.name}:")
    if not scores.groups:
        raise JobError(f"{run.paths.job}: no line has an `eval`; give --scorer or --judge")
    counts = json.loads(run.paths.manifest.read_bytes())["counts"]
    finished = counts["done"] + counts["failed"]
    if finished < counts["total"]:
        print_line(f"unfinished: the scores are of {finished} of {pluralize(counts['total'], 'line')}")
    update_cell_scores(run.paths.out, scores.describe())
    print_scores(scores, sys.stdout)
    unscored = scores.compute_total().unscored
    if unscored:
        print_line(f"{pluralize(unscored, 'answer')} could not be scored; `note` in {run.paths.out} says why")
    return 1 if unscored else 0
