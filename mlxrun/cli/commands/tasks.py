"""`mlxrun tasks`: the standard tasks that come with mlxrun."""

from __future__ import annotations

import click

from mlxrun.core.errors import JobError
from mlxrun.core.terminal import open_console, print_text


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
    from rich.table import Table

    from mlxrun.evals.tasks.task_box import list_task_names, read_task

    table = Table(box=None, pad_edge=False)
    for column in ("task", "rows", "revision", "licence", "lm-eval", "metrics"):
        table.add_column(column, overflow="fold")
    for name in list_task_names():
        task = read_task(name)
        hub = task.node.strip_origins().get("hub") or {}
        source = "/".join(filter(None, (hub.get("name"), hub.get("subset"), hub.get("split"))))
        about = task.about
        table.add_row(
            *(name, source, hub.get("revision", "")[:8], about["licence"]),
            *(about.get("lm_eval") or "", ", ".join(about["metrics"])),
        )
    open_console().print(table)
