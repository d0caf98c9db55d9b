"""`mlxrun bundle`: writes a run or a suite as one file that travels."""

from __future__ import annotations

from pathlib import Path

import click

from mlxrun.cli.run_setup import report_stale
from mlxrun.core.terminal import print_line

EPILOG = """\b
Examples:
  mlxrun bundle jobs/eval.jsonl                    writes jobs/eval.tar.gz
  mlxrun bundle suite.yaml -o suite.tar.gz         all cells of a suite
  mlxrun verify eval.tar.gz                        on any machine: digests, and 20 lines again
  mlxrun replay eval.tar.gz --model /models/qwen3  the whole job again; unpacks into the folder eval

\b
RUN is a job file, its output, its run folder, or the folder or file of a suite. The bundle has the job, its
outputs, manifest, scores and journal, the images that lines name, the chat template of the config, the suite,
the versions of all packages (environment.txt), digests (SHA256SUMS) and a README. It does not have the model,
which its digest identifies, and no Python functions that score answers. Equal runs make equal bundles on
machines with equal packages. Prompts and answers are in it: share it with those who may read these.

\b
Exit codes: 0 written; 2 the run is unfinished or was edited, or names a file that cannot travel.
"""


@click.command(epilog=EPILOG)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The file to write, NAME.tar.gz. Default: beside the job or the folder of the suite.",
)
def command(run: Path, output: Path | None) -> None:
    """Write RUN as one file that others can verify and replay."""
    from mlxrun.evals.bundles.bundle import write_bundle
    from mlxrun.evals.run_folders.run_folder import open_runs

    report_stale(open_runs(run), run)
    print_line(str(write_bundle(run, output)))
