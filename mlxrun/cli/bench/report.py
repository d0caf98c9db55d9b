"""Benchmark reports: tables (rich on a terminal, Markdown when piped, so that they can be pasted), and JSON.

The JSON says where a report comes from: the command, the date, the machine and the versions. It names no
host, user or serial number. This module imports no mlx, so it also works beside servers that run elsewhere.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxrun import __version__
from mlxrun.cli.bench.engine.measurement import MEASURES, Measure, Values
from mlxrun.core.errors import JobError
from mlxrun.core.processes import read_output
from mlxrun.core.terminal import open_console, print_text
from mlxrun.model.machine.versions import list_library_versions

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPED_WIDTH = 1000  # wider than any table, so that no cell is cut


def print_report(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print one table of all workloads of `mlxrun bench engine`, then the settings and the machine."""
    sides = list(next(iter(report["workloads"].values()))["sides"])
    columns = ["workload", "measure", *sides, *(["times better"] if len(sides) > 1 else [])]
    cells = [(name, *row) for name, part in report["workloads"].items() for row in build_rows(part)]
    console = make_console(console)
    console.print(make_table(columns, 2, cells, console.is_terminal))
    print_notes(build_notes(report), console)


def make_console(console: Console | None) -> Console:
    """Return the console; if it is no terminal, one that is wide enough for every table."""
    console = console or open_console()
    if console.is_terminal:
        return console
    return open_console(console.file, width=PIPED_WIDTH, color_system=None)


def make_table(columns: Sequence[str], left: int, cells: Sequence[Sequence[str]], terminal: bool) -> Table:
    """Make a table of these rows. `left`: the number of first columns, which are words; a word that repeats
    is shown once."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if terminal else box.MARKDOWN)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=True)
    before: Sequence[str] = ()
    for row in cells:
        same = [row[: i + 1] == before[: i + 1] for i in range(left)]
        table.add_row(*("" if i < left and same[i] else cell for i, cell in enumerate(row)))
        before = row
    return table


def print_notes(lines: Iterable[str], console: Console) -> None:
    """Print lines under a table."""
    for line in lines:
        console.print(line, soft_wrap=True)


def build_rows(part: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Build the rows of one workload: measure, one value a side, and the ratio if there is a peer. If a side
    failed, the first row has each side's number of runs."""
    sides = part["sides"].values()
    ratios = [part["ratio"]] if "ratio" in part else []
    rows = build_measure_rows(MEASURES, [side["median"] for side in sides], ratios)
    if any("error" in side for side in sides):
        rows.insert(0, ("runs", *map(_describe_runs, sides), *("-" for _ in ratios)))
    return rows


def build_measure_rows(
    measures: Mapping[str, Measure], medians: Sequence[Values], ratios: Sequence[Values]
) -> list[tuple[str, ...]]:
    """Build a row for each measure that a side has: its title, the value of each side, and each ratio."""
    rows = []
    for key, measure in measures.items():
        values = [side.get(key) for side in medians]
        if any(value is not None for value in values):
            shown = [format_value(ratio.get(key), "x").removesuffix(" x") for ratio in ratios]
            rows.append((measure.title, *(format_value(value, measure.unit) for value in values), *shown))
    return rows


def _describe_runs(side: Mapping[str, Any]) -> str:
    runs = len(side["runs"])
    if "error" not in side:
        return str(runs)
    return f"{runs}, then FAILED" if runs else "FAILED"


def format_value(value: float | None, unit: str) -> str:
    """Format a number with its unit. Times are in seconds; "%" is a share, "x" a ratio, "" a count."""
    if value is None:
        return "-"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "ms":
        return f"{value * 1000:,.1f} ms"
    if unit == "%":
        return f"{value:.0%}"
    digits = {"x": ".2f", "s": ",.3f", "1/s": ",.1f"}.get(unit, ",.0f")
    return f"{value:{digits}} {unit}".rstrip()


def format_bytes(value: float) -> str:
    """Format bytes in the unit that fits."""
    return f"{value / 1e9:.3f} GB" if value >= 1e8 else f"{value / 1e6:.1f} MB"


def describe_machine(report: Mapping[str, Any]) -> str:
    """Describe the machine and the versions."""
    device = report["device"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return ", ".join(str(device[k]) for k in ("backend", "name", "blas") if device.get(k)) + f"; {versions}"


def build_notes(report: Mapping[str, Any]) -> list[str]:
    """Build the lines under the table: the settings, the machine, and what the columns do not say."""
    model, settings = report["model"], report["settings"]
    lines = [
        f"{model['name']} ({model['dtype'] or 'quantized'}), scale {settings['scale']:g}, "
        f"median of {settings['repeat']}; {describe_machine(report)}"
    ]
    if report.get("incomplete"):
        lines.insert(0, "INCOMPLETE: interrupted before all runs of all workloads were measured")
    for name, part in report["workloads"].items():
        for side, found in part["sides"].items():
            if "error" in found:
                lines.append(f"{name}: {side} FAILED in run {len(found['runs']) + 1}: {found['error']}")
        if "same_tokens" in part:
            same = f"{part['same_tokens']:.0%} of the answers have the same tokens on both sides"
            lines.append(f"{name}: {same}")
        if "chunk" in part:
            lines.append(_build_chunk_note(name, part["chunk"]))
    return lines


def _build_chunk_note(name: str, chunk: Mapping[str, Any]) -> str:
    over = ", ".join(f"{side} {v:.2f}" for side, v in chunk["p99_in_chunks"].items() if v is not None)
    return (
        f"{name}: with nothing else running, the last {chunk['tokens']} tokens of the long prompt take "
        f"{chunk['seconds'] * 1000:.1f} ms to prefill. Inter-token p99 while the long prompt prefills, as a "
        f"multiple of that time: {over}"
    )


def add_provenance(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report with `date` (UTC), `command`, `machine` and `versions`. The report's own values stay:
    its versions are completed, not replaced, as a benchmark may know more than this module."""
    versions = {"mlxrun": __version__} | list_library_versions() | dict(report.get("versions", {}))
    origin = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"{_find_program()} {shlex.join(sys.argv[1:])}",
        "machine": read_machine_facts(),
    }
    return origin | dict(report) | {"versions": versions}


def _find_program() -> str:
    """The program that runs: `mlxrun`, or that of the repository, whose commands use this module too."""
    context = click.get_current_context(silent=True)
    return (context and context.find_root().info_name) or "mlxrun"


def read_machine_facts() -> dict[str, Any]:
    """Read the processor, its cores (those that this process may use), the memory in bytes and the system."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "cpu": _find_cpu_name(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": platform.platform(),
        "arch": platform.machine(),
    }


def _find_cpu_name() -> str:
    """The name that the system gives the processor, else its architecture."""
    if sys.platform == "darwin":
        return read_output("sysctl", "-n", "machdep.cpu.brand_string").strip() or platform.processor()
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    names = (line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name"))
    return next(names, platform.machine())


def write_report(report: Any, json_path: Path | None, show: Callable[[Any], None]) -> int:
    """Show the report as a table, write it as JSON, or both. The JSON says where and how it was measured.
    JobError if it cannot be written."""
    if str(json_path) == "-":
        print_text(_render_json(report))
        return 0
    show(report)
    if json_path is not None:
        write_json_file(report, json_path)
    return 0


def _render_json(report: Any) -> str:
    return json.dumps(add_provenance(report), indent=2) + "\n"


def write_json_file(report: Any, path: Path) -> None:
    """Write the report as JSON. JobError if it cannot be written."""
    text = _render_json(report)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise JobError(f"--json {path}: cannot be written: {error.strerror}") from error
