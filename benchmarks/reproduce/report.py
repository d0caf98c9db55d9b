"""Prints what was found as the table of README.md and docs/evals.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.reproduce.benchmark import is_reproducible, list_hidden_twins


def print_reproduce_report(report: dict[str, Any]) -> None:
    """Print the table in Markdown, what was compared, and what the impure twins gave."""
    print("\n".join(format_report(report)))


def format_report(report: dict[str, Any]) -> Iterator[str]:
    """The lines of the report."""
    models = report["models"]
    head = [f"bytes that differ in {report['lines']:,} lines", *(model["title"] for model in models)]
    yield _format_row(head)
    yield _format_row(["---", *["---:"] * len(models)])
    for name in models[0]["conditions"]:
        found = [model["conditions"].get(name) for model in models]
        yield _format_row([_format_name(name, found), *(_format_cell(each) for each in found)])
    for name in models[0]["twins"]:
        found = [model["twins"][name] for model in models]
        cells = (f"{each['differing']} of {each['lines']} lines" for each in found)
        yield _format_row([f"*twin: {name}*", *cells])
    total = sum(model["bytes"] for model in models)
    device, versions = report["device"], report["versions"]
    computed = f"{device['name']} ({device['backend']}{_name_kernel(device)}), mlx {versions['mlx']}"
    yield ""
    yield (
        f"Each line is compared with the same line alone and cold ({total / 1e3:,.0f} kB of records). "
        f"{computed}, {report['seconds']} s."
    )
    yield _format_verdict(report)


def _name_kernel(device: dict[str, Any]) -> str:
    return f", {device['blas']} for {device['blas_kernel']}" if device.get("blas_kernel") else ""


def _format_verdict(report: dict[str, Any]) -> str:
    if not is_reproducible(report):
        return "NOT REPRODUCIBLE."
    hidden = list_hidden_twins(report)
    if not hidden:
        return "No byte differs, and every twin is found out."
    return (
        f"No byte differs, but nor does one with this fault: {', '.join(hidden)}. Its absence is not proven."
    )


def _format_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _format_name(name: str, found: list[dict[str, Any] | None]) -> str:
    """The name of a condition with its least note, such as the fewest kills."""
    notes = {each["note"] for each in found if each and each["note"]}
    if not notes:
        return name
    least = min(notes, key=lambda note: int(note.split()[0].rstrip("%")))
    return f"{name} ({'at least ' if len(notes) > 1 else ''}{least})"


def _format_cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    return "0" if not found["differing"] else f"**{found['bytes']:,}** in {found['differing']:,} lines"
