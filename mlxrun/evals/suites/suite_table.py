"""Prints the scores of a suite: a row for each task and variant, a column for each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.markup import escape
from rich.table import Table

from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.terminal import open_console, print_line
from mlxrun.evals.suites.suite_cost import CellCost
from mlxrun.jobs.run.progress import format_duration, pluralize

Record = Mapping[str, Any]
_PIPE_WIDTH = 200  # columns, where the output is no terminal


def print_matrix(records: Sequence[Record], stream: TextIO) -> None:
    """Print the matrix of scores; a cell without one has its state."""
    models = list(dict.fromkeys(each["model"] for each in records))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for each in records:
        rows.setdefault((each["task"], each["variant"]), {})[each["model"]] = _format_score(each)
    table = _make_table(("task", "variant", *models))
    for (task, variant), scores in rows.items():
        table.add_row(*map(escape, (task, variant, *(scores.get(model, "") for model in models))))
    _print(table, stream)


def _format_score(record: Record) -> str:
    """A score with its interval if there is one, and what is missing."""
    scores, state = record["scores"], str(record["state"])
    if scores is None:
        return f"{record['done']} lines" if state == "done" else state
    total = scores["total"]
    text = f"{100 * total['share']:.1f} %"
    if total["interval"] is not None:
        low, high = total["interval"]
        text += f" [{100 * low:.1f}, {100 * high:.1f}]"
    notes = [f"{record['failed']} failed"] if record["failed"] else []
    notes += [f"{total['unscored']} unscored"] if total.get("unscored") else []
    notes += [f"{record['cut_by_length']} cut"] if record["cut_by_length"] else []
    notes += [] if state == "done" else [state]
    return f"{text} ({', '.join(notes)})" if notes else text


def print_costs(costs: Sequence[CellCost], weights: Mapping[str, int], stream: TextIO) -> None:
    """Print a row for each cell, and the totals. `weights`: bytes of each model's weights."""
    columns = ("cell", "lines", "done", "refused", "prompt tokens", "output tokens", "time")
    table = _make_table(columns, text=1)
    for cost in costs:
        if cost.found is None:
            table.add_row(escape(cost.cell.name), *"------")
            continue
        found = cost.found
        numbers = (found.lines, cost.done, found.refused, found.prompt_tokens, found.max_tokens)
        table.add_row(escape(cost.cell.name), *(f"{each:,}" for each in numbers), _format_time(cost.seconds))
    _print(table, stream)
    errors = {str(cost.error): cost.cell.model for cost in costs if cost.error is not None}
    for error, model in errors.items():
        print_line(f"{model}: cannot be loaded: {error}", stream)
    known = [cost.found for cost in costs if cost.found is not None]
    times = [cost.seconds for cost in costs if cost.found is not None]
    prompt, output = sum(each.prompt_tokens for each in known), sum(each.max_tokens for each in known)
    done = sum(cost.done for cost in costs)
    print_line(
        f"{pluralize(len(costs), 'cell')}, {pluralize(sum(each.lines for each in known), 'line')}"
        f"{f' ({done:,} done already)' if done else ''}, "
        f"{prompt:,} prompt tokens, at most {output:,} output tokens",
        stream,
    )
    total = sum(each for each in times if each is not None)
    if None in times:
        print_line("time: unknown for models that have not run yet in this folder", stream)
    if total:
        print_line(f"time: at most {format_duration(total)}, by the speed of earlier cells", stream)
    for name, size in weights.items():
        print_line(f"memory: {name} has {format_rounded(size)} of weights", stream)


def _format_time(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"<= {format_duration(seconds)}"


def _make_table(heads: Sequence[str], text: int = 2) -> Table:
    """A table whose first `text` columns are texts, and the others numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, head in enumerate(heads):
        table.add_column(escape(head), justify="left" if at < text else "right", overflow="fold")
    return table


def _print(table: Table, stream: TextIO) -> None:
    open_console(stream, _PIPE_WIDTH, highlight=False).print(table)
