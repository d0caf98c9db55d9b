"""`mlxrun tasks`: the standard tasks that come with mlxrun."""

from __future__ import annotations

import click

from mlxrun.core.errors import JobError
from mlxrun.core.terminal import print_line, print_text


@click.command(
    epilog="""\b
Examples:
  mlxrun tasks                                            a line for each task
  mlxrun tasks gsm8k                                      its file: prompt, examples, scorer, published scores
  mlxrun eval --tasks gsm8k,mmlu --model qwen3-8b-4bit    run some

\b
A suite takes a task by `use: NAME`, and its own keys replace those of the file: docs/tasks.md.
"""
)
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """List the standard tasks, or show the file of the task NAME."""
    from mlxrun.evals.tasks.task_box import describe_unknown_task, list_task_names, read_task

    if name is None:
        _print_table()
    elif name not in list_task_names():
        raise JobError(describe_unknown_task(name))
    else:
        print_text(read_task(name).path.read_text(encoding="utf-8"))


def _print_table() -> None:
    """Print the tasks without wrapping, so that names can be copied and found."""
    from mlxrun.evals.tasks.task_box import list_task_names, read_task

    rows = [("task", "rows", "revision", "licence", "lm-eval", "metrics")]
    for name in list_task_names():
        task = read_task(name)
        hub = task.node.strip_origins().get("hub") or {}
        source = "/".join(filter(None, (hub.get("name"), hub.get("subset"), hub.get("split"))))
        about = task.about
        lm_eval, metrics = about.get("lm_eval") or "", ", ".join(about["metrics"])
        rows.append((name, source, hub.get("revision", "")[:8], about["licence"], lm_eval, metrics))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print_line("  ".join(map(str.ljust, row, widths)).rstrip())
