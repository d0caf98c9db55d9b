"""The report of `python -m benchmarks prefix-cache` as tables: rich on a terminal, Markdown when piped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from benchmarks.prefix_cache.workloads import NO_REUSE, TURNS
from mlxrun.cli.bench.report import describe_machine, format_bytes, make_console, make_table

COLUMNS = (
    "family",
    "scenario",
    "side",
    "prompt",
    "TTFT cold",
    "TTFT warm",
    "cold/warm",
    "reused",
    "of shared",
    "prefilled",
    "hits",
    "cache",
    "growth",
    "same",
)
LEFT = 3  # columns of words


def print_cache_report(report: Mapping[str, Any], console: Console | None = None) -> None:
    """One table of what was played, one of what was not reused, one of the search; then the notes."""
    console = make_console(console)
    tables = (
        (COLUMNS, LEFT, list(build_scenario_rows(report))),
        (("family", "cache on", "cache off", "on/off"), 1, list(build_no_reuse_rows(report))),
        (("entries", "full match", "partial match"), 0, list(build_lookup_rows(report))),
    )
    for columns, left, rows in tables:
        if rows:
            console.print(make_table(columns, left, rows, console.is_terminal))
    for line in build_notes(report):
        console.print(line, highlight=False, soft_wrap=True)


def build_scenario_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each scenario and side."""
    for family, part in report["families"].items():
        for name, scenario in part["scenarios"].items():
            for side, result in scenario.get("sides", {}).items():
                yield (family, name, side, *_format_cells(result))


def _format_cells(result: Mapping[str, Any]) -> tuple[str, ...]:
    m = result["median"]
    hits = " ".join(f"{kind} {count}" for kind, count in result["hits"].items())
    return (
        f"{m['prompt_tokens']:,.0f}",
        f"{m['ttft_cold_s'] * 1000:,.1f} ms",
        f"{m['ttft_warm_s'] * 1000:,.1f} ms",
        f"{m['times']:.1f}",
        f"{m['reused_tokens']:,.0f}",
        f"{m['reused_share']:.1%}",
        f"{m['prefilled_tokens']:,.0f}",
        hits or "-",
        format_bytes(m["cache_bytes"]),
        "-" if m["growth"] is None else f"{m['growth']:.2f}",
        f"{result['same_tokens']:.0%}",
    )


def build_no_reuse_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each family."""
    for family, part in report["families"].items():
        result = part["scenarios"].get(NO_REUSE)
        if result is not None:
            rates = (f"{rate:,.0f} tok/s" for rate in result["median"].values())
            yield (family, *rates, f"{result['ratio']:.3f}")


def build_lookup_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each size of the store."""
    for row in (report["lookup"] or {}).get("rows", ()):
        yield (f"{row['records']:,}", f"{row['found_s'] * 1e6:,.0f} us", f"{row['parted_s'] * 1e6:,.0f} us")


def build_notes(report: Mapping[str, Any]) -> list[str]:
    """What was measured and where; what the columns do not say."""
    settings = report["settings"]
    models = (
        f"{family}: {part['model']} ({part['dtype'] or 'quantized'})"
        for family, part in report["families"].items()
    )
    lines = [
        ", ".join(
            [
                *models,
                f"scale {settings['scale']:g}, median of {settings['repeat']}; {describe_machine(report)}",
            ]
        )
    ]
    scenarios = {name for part in report["families"].values() for name in part["scenarios"]}
    if scenarios - {NO_REUSE}:
        lines.append(
            "of shared: reused tokens, as a share of the prompt's tokens that an earlier request had too; "
            "same: share of warm answers with the same tokens as without a cache"
        )
    if "conversation" in scenarios:
        lines.append(
            f"growth: cache size after {TURNS} turns, divided by the size that the last turn needs alone"
        )
    lines += [
        f"{family} {name}: {scenario['sides'][side]['median']['tower_calls']:g} vision tower calls when warm"
        for family, part in report["families"].items()
        for name, scenario in part["scenarios"].items()
        for side in scenario.get("sides", {})
        if scenario["sides"][side]["median"]["tower_calls"] is not None
    ]
    if report["lookup"]:
        lines.append(
            f"lookup: time to search the cache for a prompt of {report['lookup']['tokens']} tokens, with the "
            "time to compute its keys; full match: all of the prompt is in the cache; "
            "partial match: only its beginning is"
        )
    return lines
