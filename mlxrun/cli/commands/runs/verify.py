"""`mlxrun verify`: checks the digests of a run, and runs lines of it again."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxrun.cli.options import list_first, say
from mlxrun.cli.run_setup import (
    MODEL_HELP,
    USER_MODEL_HELP,
    end_runs,
    make_run_setup,
    report_machine,
    report_problems,
    report_progress,
    run_by_engine,
)
from mlxrun.core.terminal import print_line

if TYPE_CHECKING:
    from mlxrun.evals.replay import RunComparison
    from mlxrun.evals.run_folders.run_folder import RunFolder
    from mlxrun.evals.suites.suite_run import SharedEngine

EPILOG = """\b
Examples:
  mlxrun verify jobs/eval.jsonl                    digests, and 20 lines again
  mlxrun verify jobs/eval.jsonl --sample 200 --seed 7
  mlxrun verify eval.out.jsonl --all               every line again
  mlxrun verify suite.out                          every cell of a suite
  mlxrun verify eval.tar.gz                        a bundle (mlxrun bundle), which is unpacked for it
  mlxrun verify run/ --model /models/qwen3         the model's files have moved

\b
RUN is a job file, its output, its run folder, a folder that contains runs, or a bundle. First, what differs
on this machine is printed: versions, device, BLAS. Then every record is compared with its digest in the
journal, the output with that in the manifest, and the job file and the model's files with theirs. If all are
as the run wrote them, lines are run again, each alone and without a prefix cache, with the config in the
manifest, and compared byte for byte. The scores of lines are not computed again (mlxrun score does that), and
lines that failed are not run again. Nothing in the run folder changes.

\b
Without engine.reproducible, answers may differ in other batches: lines that do are printed and do not count
as wrong, unless --strict is given. With it, all must be equal on a machine like that of the run.

\b
Exit codes: 0 verified; 1 something was changed, or a line came out differently; 2 it cannot be verified here
(no run, another model, usage), or runs of a bundle were left out (they have tools or code of their model);
3 engine; 130 interrupted.
"""


@click.command(epilog=EPILOG)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--sample", type=click.IntRange(1), metavar="N", help="Run N lines again. Default: 20.")
@click.option("--all", "is_all", is_flag=True, help="Run every line again.")
@click.option("--seed", default=0, show_default=True, help="Which lines the sample has.")
@click.option("--model", metavar="PATH", help=MODEL_HELP)
@click.option("--user-model", metavar="PATH", help=USER_MODEL_HELP)
@click.option("--strict", is_flag=True, help="Count lines that differ as wrong in any case.")
def command(run: Path, sample: int | None, is_all: bool, seed: int, **options: Any) -> int:
    """Check that RUN is as it was written, and that its lines come out the same again."""
    from mlxrun.cli.signal_loop import run_async
    from mlxrun.evals.bundles.bundle import is_bundle, open_bundle
    from mlxrun.evals.replay import DEFAULT_SAMPLE, describe_plan
    from mlxrun.evals.run_folders.run_folder import open_runs

    if sample is not None and is_all:
        raise click.UsageError("give one of --sample and --all")
    count = None if is_all else sample or DEFAULT_SAMPLE
    verify = partial(_verify, sample=count, seed=seed, **options)
    left_out: list[str] = []
    opened = open_bundle(run, None, left_out) if is_bundle(run) else nullcontext(open_runs(run))
    with opened as runs:
        say(f"{run}: {describe_plan(runs, count)}")
        return end_runs(run_async(run_by_engine(runs, verify)), left_out)


async def _verify(
    run: RunFolder,
    engine: SharedEngine,
    sample: int | None,
    seed: int,
    model: str | None,
    user_model: str | None,
    strict: bool,
) -> bool:
    """Verify one run and print what is found; whether it is as it should be."""
    from mlxrun.evals.replay import choose_lines, make_serial_config, run_lines_again
    from mlxrun.evals.run_folders.run_folder import DONE
    from mlxrun.jobs.run.progress import pluralize

    differs = report_machine(run)
    if report_problems(run):
        print_line(f"{run.name}: it is not as it was written, so no line was run again")
        return False
    finished = report_progress(run)
    if run.state == DONE and run.manifest["output"]["sha256"]:
        print_line(f"{run.name}: the digests of all records, of the output and of the job file are right")
    else:
        records = f"of {pluralize(finished, 'record')} and of the job file"
        rest = "the output is not finished and has none"
        if run.state == DONE:
            rest = "no line was answered, so that there is no output"
        print_line(f"{run.name}: the digests {records} are right; {rest}")
    numbers = choose_lines(run, sample, seed)
    if not numbers:
        print_line(f"{run.name}: no line was answered, so none was run again")
        return True
    say(f"{run.name}: reading the model's files, for {pluralize(len(numbers), 'answer')}")
    setup = engine.share(make_run_setup(run, model, make_serial_config, user_model))
    print_line(f"{run.name}: the model's files and its settings are those of the run")
    found = await run_lines_again(run, numbers, setup, say)
    print_line(
        f"{run.name}: {pluralize(found.compared, 'line')} of {run.total} run again, alone and without a "
        f"cache: {found.compared - len(found.differing)} equal, {len(found.differing)} different"
    )
    return _report_lines(run, found, bool(differs), strict)


def _report_lines(run: RunFolder, found: RunComparison, is_elsewhere: bool, strict: bool) -> bool:
    """Print the lines that came out differently; whether that is all right."""
    for line in list_first([f"{run.name}: line {line}" for line in found.differing]):
        print_line(line)
    if not found.differing:
        return True
    if not run.manifest["config"]["engine"]["reproducible"]:
        print_line(
            f"{run.name}: it was run without engine.reproducible, so answers may depend on what else was in "
            "the batch, from some token on" + ("" if strict else "; this does not count as wrong (--strict)")
        )
        return not strict
    if is_elsewhere:
        print_line(f"{run.name}: this machine differs from that of the run (above), which may be the reason")
    return False
