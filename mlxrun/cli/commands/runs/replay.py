"""`mlxrun replay`: runs a job again as its manifest says, and compares the bytes."""

from __future__ import annotations

from pathlib import Path

import click

from mlxrun.cli.options import list_first, say
from mlxrun.cli.run_setup import (
    MODEL_HELP,
    make_run_setup,
    report_machine,
    report_problems,
    report_progress,
)
from mlxrun.core.terminal import print_line

EPILOG = """\b
Examples:
  mlxrun replay jobs/eval.jsonl                    answers in jobs/eval.replay.out.jsonl
  mlxrun replay run/job.out.jsonl -o /tmp/again.out.jsonl
  mlxrun replay run/ --model /models/qwen3         the model's files have moved

\b
RUN is a job file, its output or its run folder. The config is the one in the manifest; config files and
variables are not read. Before the model is loaded, all records are compared with their digests in the
journal. The job file has to have the recorded digest: it is looked for where it was and beside
the output. The model's files have to have theirs. Images that lines name are read where the job file is.
Interrupt it and run it again to continue. The new output is a run like any other: mlxrun compare RUN NEW
compares their scores.

\b
Exit codes: 0 all records are equal, byte for byte; 1 some differ, and the first difference of each is printed
(without engine.reproducible that may be); 2 it cannot be run here, or its records are
missing or were edited; 3 engine; 130 interrupted.
"""


@click.command(epilog=EPILOG)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="OUT",
    help="Where the answers go. Default: RUN's output with the ending .replay.out.jsonl.",
)
@click.option("--fresh", is_flag=True, help="Start the replay over if OUT exists.")
@click.option(
    "--mixed", is_flag=True, help="Continue OUT although it was begun on another version or device."
)
@click.option("--model", metavar="PATH", help=MODEL_HELP)
def command(run: Path, output: Path | None, fresh: bool, mixed: bool, model: str | None) -> int:
    """Run the job of RUN again as its manifest says, and say whether the records are equal."""
    from dataclasses import replace

    from mlxrun.cli.signal_loop import run_async
    from mlxrun.core.errors import JobError
    from mlxrun.evals.replay import find_job, replay_job
    from mlxrun.evals.run_folders.run_folder import RunFolder
    from mlxrun.jobs.lines.job_check import make_eval_reader
    from mlxrun.jobs.records.run_paths import JobPaths
    from mlxrun.jobs.run.job_cache import choose_engine_config
    from mlxrun.jobs.run.job_run import JobOptions
    from mlxrun.jobs.run.progress import pluralize

    earlier = find_job(RunFolder.open(run))
    name = earlier.paths.out.name.removesuffix(".jsonl").removesuffix(".out")
    paths = JobPaths(earlier.paths.job, output or earlier.paths.out.with_name(f"{name}.replay.out.jsonl"))
    if paths.out.resolve() == earlier.paths.out.resolve():
        raise JobError(f"{paths.out}: is the output of the run itself; give another -o")
    if report_problems(earlier):
        raise JobError(f"{run}: it is not as it was written, so no line was run again")
    if not report_progress(earlier):
        raise JobError(f"{run}: no line is finished, so there is no record to compare")
    evals = make_eval_reader(paths.job)
    differs = report_machine(earlier)
    setup = make_run_setup(earlier, model, lambda config: choose_engine_config(config, paths.cache))
    options = JobOptions(fresh=fresh, mixed=mixed)
    found = run_async(replay_job(earlier, paths, replace(setup, evals=evals), options, say))
    for line in list_first([f"line {line}" for line in found.differing]):
        print_line(line)
    equal = found.compared - len(found.differing)
    print_line(f"{equal} of {pluralize(found.compared, 'record')} equal, byte for byte: {paths.out}")
    if found.differing and not setup.config.engine.reproducible:
        print_line("the run was made without engine.reproducible, so answers may depend on the batch")
    elif found.differing and differs:
        print_line("this machine differs from that of the run (above), which may be the reason")
    return 1 if found.differing else 0
