"""`mlxrun export`: writes a run in the format of another evaluation program."""

from __future__ import annotations

from pathlib import Path

import click

from mlxrun.core.terminal import print_line

FORMATS = ("inspect", "lm-eval", "every-eval-ever", "model-card")

EPILOG = """\b
Examples:
  mlxrun export jobs/eval.jsonl --format inspect                  then: inspect view --log-dir jobs
  mlxrun export jobs/eval.jsonl --format inspect -o eval.json
  mlxrun export suite.out --format lm-eval -o results             results_*.json and samples_*.jsonl
  mlxrun export jobs/eval.jsonl --format every-eval-ever --model-id org/name -o .
  mlxrun export jobs/eval.jsonl --format model-card -o README.md
  mlxrun export gpqa.jsonl --format model-card -o .eval_results/gpqa.yaml \\
      --dataset Idavidrein/gpqa --task gpqa_diamond

\b
RUN is a job file, its output, its run folder, or the folder of a suite, of which every run is exported.
  inspect           Inspect's log: a .eval or .json file; a folder of them for a suite
  lm-eval           the files of lm-evaluation-harness with --log_samples, in a folder
  every-eval-ever   the records of Every Eval Ever, schema 0.3.0, below data/ in a folder
  model-card        a README's model-index (.md), or the hub's .eval_results/NAME.yaml
Without -o the files are in the run folder, or in that of the suite. Existing files are replaced; of
a README (.md), only the model-index. Prompts and answers are in all of them but a model card: share them with
those who may read these.

\b
Exit codes: 0 written; 2 the run is unfinished, edited, or has no scores.
"""


@click.command(epilog=EPILOG)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(FORMATS), required=True, help="Format to write.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="PATH", help="File or folder to write to."
)
@click.option(
    "--model-id", "model", metavar="ID", help="Name of the model, as on the hub. Default: that of the config."
)
@click.option(
    "--task", metavar="NAME", help="Name of the task. Default: that of the suite, or of the job file."
)
@click.option(
    "--dataset", metavar="ID[@REVISION]", help="Hub data set that the lines are from. Default: the job file."
)
@click.option("--organization", metavar="NAME", help="Who ran it, for Every Eval Ever. Default: unknown.")
@click.option("--partial", is_flag=True, help="Export an unfinished run too; its file says that it is one.")
def command(run: Path, form: str, output: Path | None, partial: bool, **names: str | None) -> None:
    """Write RUN in the format of another evaluation program."""
    from mlxrun.evals.exports.export_files import export_runs
    from mlxrun.evals.exports.exported_run import ExportNames

    for path in export_runs(run, form, output, ExportNames(**names), partial=partial):
        print_line(str(path))
