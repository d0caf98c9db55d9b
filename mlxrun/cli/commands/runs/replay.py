"""`mlxrun replay`: runs a job again as its manifest says, and compares the bytes."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

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
from mlxrun.core.errors import JobError
from mlxrun.core.terminal import print_line

if TYPE_CHECKING:
    from mlxrun.config.settings import Config
    from mlxrun.evals.run_folders.run_folder import RunFolder
    from mlxrun.evals.suites.suite_run import SharedEngine
    from mlxrun.jobs.records.run_paths import JobPaths
    from mlxrun.jobs.run.job_run import JobOptions

EPILOG = """\b
Examples:
  mlxrun replay jobs/eval.jsonl                    answers in jobs/eval.replay.out.jsonl
  mlxrun replay run/job.out.jsonl -o /tmp/again.out.jsonl
  mlxrun replay run/ --model /models/qwen3         the model's files have moved
  mlxrun replay eval.tar.gz                        a bundle (mlxrun bundle), unpacked into the folder eval

\b
RUN is a job file, its output, its run folder, a suite, or a bundle. The config is the one in the manifest;
config files and variables are not read. Before the model is loaded, all records are compared with their
digests in the journal. The job file has to have the recorded digest: it is looked for where it was and beside
the output. The model's files have to have theirs, under any name. What else the config names by path is found
where it moved to with the job. Images that lines name are read where the job file is. Interrupt it and run it
again to continue. The new output is a run like any other: mlxrun compare RUN NEW compares their scores.

\b
Exit codes: 0 all records are equal, byte for byte; 1 some differ, and the first difference of each is printed
(without engine.reproducible that may be); 2 it cannot be run here, the replay is complete already, records
are missing or were edited, or runs of a bundle were left out (they have tools or code of their model);
3 engine; 130 interrupted.
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
@click.option("--user-model", metavar="PATH", help=USER_MODEL_HELP)
def command(
    run: Path, output: Path | None, fresh: bool, mixed: bool, model: str | None, user_model: str | None
) -> int:
    """Run the job of RUN again as its manifest says, and say whether the records are equal."""
    from mlxrun.cli.signal_loop import run_async
    from mlxrun.evals.bundles.bundle import is_bundle, open_bundle
    from mlxrun.evals.replay import check_replays
    from mlxrun.evals.run_folders.run_folder import open_runs
    from mlxrun.evals.run_folders.run_folder_paths import BUNDLE_SUFFIX
    from mlxrun.jobs.run.job_run import JobOptions

    with ExitStack() as stack:
        bundled, left_out = is_bundle(run), list[str]()
        runs = (
            stack.enter_context(
                open_bundle(run, run.with_name(run.name.removesuffix(BUNDLE_SUFFIX)), left_out)
            )
            if bundled
            else open_runs(run)
        )
        if len(runs) > 1 and output is not None:
            raise click.UsageError(f"{run}: contains {len(runs)} runs, and -o names the output of one")
        # The cache of a single replay is beside its output, so that it is there if it is continued.
        cache = Path(stack.enter_context(TemporaryDirectory())) if len(runs) > 1 else None
        replay = _Replay(output, model, user_model, JobOptions(fresh=fresh, mixed=mixed), bundled, cache)
        replays = [replay.choose_paths(each) for each in runs]
        if not fresh:
            check_replays(str(run), replays)
        return end_runs(run_async(run_by_engine(runs, replay.run)), left_out)


@dataclass(frozen=True, slots=True)
class _Replay:
    """What is the same for all runs. `bundled`: they are somebody else's, whose Python functions are not
    called; `cache`: the folder of the prefix cache of several runs."""

    output: Path | None
    model: str | None
    user_model: str | None
    options: JobOptions
    bundled: bool
    cache: Path | None

    def choose_paths(self, run: RunFolder) -> JobPaths:
        """Choose the files of the replay of a run. JobError if its output is that of the run itself."""
        from mlxrun.jobs.records.run_paths import JobPaths

        name = run.paths.out.name.removesuffix(".jsonl").removesuffix(".out")
        out = self.output or run.paths.out.with_name(f"{name}.replay.out.jsonl")
        if os.path.realpath(out) == os.path.realpath(run.paths.out):
            raise JobError(f"{out}: is the output of the run itself; give another -o")
        return JobPaths(run.paths.job, out)

    async def run(self, run: RunFolder, engine: SharedEngine) -> bool:
        """Replay one run, and print what is found; whether all records are equal."""
        from mlxrun.evals.replay import find_job, replay_job
        from mlxrun.jobs.lines.job_check import make_eval_reader
        from mlxrun.jobs.run.job_cache import choose_engine_config
        from mlxrun.jobs.run.progress import pluralize
        from mlxrun.jobs.scoring.eval_spec import EvalReader

        earlier = find_job(run)
        paths = self.choose_paths(earlier)
        if report_problems(earlier):
            raise JobError(f"{run.name}: it is not as it was written, so no line was run again")
        if not report_progress(earlier):
            raise JobError(f"{run.name}: no line is finished, so there is no record to compare")
        evals = EvalReader(scorers=None) if self.bundled else make_eval_reader(paths.job)
        differs = report_machine(earlier)
        place = self.cache or paths.cache

        def choose(config: Config) -> Config:
            own = replace(config, cache=replace(config.cache, disk_path=None))
            return choose_engine_config(own, place)

        setup = replace(make_run_setup(earlier, self.model, choose, self.user_model), evals=evals)
        if self.cache is not None:
            setup = engine.share(setup)
        found = await replay_job(earlier, paths, setup, self.options, say)
        prefix = "" if self.cache is None else f"{run.name}: "
        for line in list_first([f"{prefix}line {line}" for line in found.differing]):
            print_line(line)
        equal = found.compared - len(found.differing)
        print_line(f"{equal} of {pluralize(found.compared, 'record')} equal, byte for byte: {paths.out}")
        if found.differing and not setup.config.engine.reproducible:
            print_line("the run was made without engine.reproducible, so answers may depend on the batch")
        elif found.differing and differs:
            print_line("this machine differs from that of the run (above), which may be the reason")
        return not found.differing
