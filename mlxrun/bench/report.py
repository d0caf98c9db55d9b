"""The benchmark's report as a table: rich on a terminal, Markdown when piped, so that it can be pasted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mlxrun.bench.engine.measurement import MEASURES, EngineMeasure

PIPED_WIDTH = 160


def print_report(report: Mapping[str, Any], console: Console | None = None) -> None:
    """One table of all workloads, then what was measured and where."""
    console = fitting(console)
    console.print(_table(report, console.is_terminal))
    for line in notes(report):
        console.print(line, highlight=False, soft_wrap=True)


def fitting(console: Console | None) -> Console:
    """The console, wide enough for a table if nobody watches."""
    console = console or Console()
    if console.is_terminal:
        return console
    return Console(file=console.file, width=PIPED_WIDTH, color_system=None)


def make_table(columns: Sequence[str], left: int, cells: Sequence[Sequence[str]], terminal: bool) -> Table:
    """A table of these rows, the first `left` columns being words; a word that repeats is shown once."""
    table = Table(box=box.SIMPLE_HEAD if terminal else box.MARKDOWN)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=True)
    before: Sequence[str] = ()
    for row in cells:
        same = [row[: i + 1] == before[: i + 1] for i in range(left)]
        table.add_row(*("" if i < left and same[i] else cell for i, cell in enumerate(row)))
        before = row
    return table


def _table(report: Mapping[str, Any], terminal: bool) -> Table:
    sides = list(next(iter(report["workloads"].values()))["sides"])
    table = Table(box=box.SIMPLE_HEAD if terminal else box.MARKDOWN)
    table.add_column("workload")
    table.add_column("measure")
    for side in sides:
        table.add_column(side, justify="right")
    if len(sides) > 1:
        table.add_column("times better", justify="right")
    for name, part in report["workloads"].items():
        title = name
        for cells in rows(part):
            table.add_row(title, *cells)
            title = ""
        if terminal:
            table.add_section()
    return table


def rows(part: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Cells of one workload: measure, one value a side, the ratio if there is a peer."""
    out = []
    for measure in MEASURES:
        values = [side["median"].get(measure.key) for side in part["sides"].values()]
        if all(v is None for v in values):
            continue
        cells = [measure.title, *(show(measure, v) for v in values)]
        if "ratio" in part:
            ratio = part["ratio"][measure.key]
            cells.append("-" if ratio is None else f"{ratio:.2f}")
        out.append(tuple(cells))
    return out


def show(measure: EngineMeasure, value: float | None) -> str:
    """A number with its unit."""
    if value is None:
        return "-"
    if measure.unit == "bytes":
        return show_bytes(value)
    if measure.unit == "ms":
        return f"{value * 1000:.1f} ms"
    return f"{value:,.3f} s" if measure.unit == "s" else f"{value:,.0f} tok/s"


def show_bytes(value: float) -> str:
    """Bytes in the unit that fits."""
    return f"{value / 1e9:.3f} GB" if value >= 1e8 else f"{value / 1e6:.1f} MB"


def where(report: Mapping[str, Any]) -> str:
    """The machine and the versions."""
    device = report["device"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return ", ".join(str(device[k]) for k in ("backend", "name", "blas") if device.get(k)) + f"; {versions}"


def notes(report: Mapping[str, Any]) -> list[str]:
    """Lines under the table: the setting, then what needs words."""
    model, settings = report["model"], report["settings"]
    lines = [
        f"{model['name']} ({model['dtype'] or 'quantised'}), scale {settings['scale']:g}, "
        f"median of {settings['repeat']}; {where(report)}"
    ]
    for name, part in report["workloads"].items():
        if "same_tokens" in part:
            lines.append(
                f"{name}: {part['same_tokens']:.0%} of the answers have the same tokens on both sides"
            )
        if "chunk" in part:
            lines.append(_chunk_note(name, part["chunk"]))
    return lines


def _chunk_note(name: str, chunk: Mapping[str, Any]) -> str:
    over = ", ".join(f"{side} {v:.2f}" for side, v in chunk["p99_in_chunks"].items() if v is not None)
    return (
        f"{name}: one prefill chunk of {chunk['tokens']} tokens at the end of the long prompt takes "
        f"{chunk['seconds'] * 1000:.1f} ms alone; inter-token p99 beside its prefill, in such chunks: {over}"
    )
