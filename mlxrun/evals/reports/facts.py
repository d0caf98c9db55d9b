"""What a report says of runs as wholes: when and on what they ran, and what of it differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from mlxrun.evals.reports.report_runs import ReportRun
from mlxrun.evals.reports.shown_text import format_count
from mlxrun.evals.run_folders.run_folder import list_working_runs

# The sections of a config that decide how a run computes; `server` may have keys.
_SECTIONS = ("model", "engine", "scheduler", "cache", "sampling", "parsers", "structured", "media", "batch")


def describe_machine(manifest: Mapping[str, Any]) -> str:
    """Device, backend and version of mlxrun."""
    device, versions = manifest.get("device") or {}, manifest.get("versions") or {}
    where = ", ".join(str(device[key]) for key in ("name", "backend") if device.get(key))
    return " · ".join(filter(None, (where, f"mlxrun {versions.get('mlxrun', '?')}")))


def describe_times(manifest: Mapping[str, Any], *, is_running: bool = False) -> str:
    """When the first run of a job began and the last ended, and how many there were; without those that had
    nothing to do. `is_running`: whether the last one still runs."""
    runs = list_working_runs(manifest)
    if not runs:
        return ""
    start, end = _parse_time(runs[0].get("started")), _parse_time(runs[-1].get("ended"))
    text = start.strftime("%d %b %Y %H:%M").lstrip("0") if start else "?"
    if end is not None and start is not None:
        text += end.strftime(" to %H:%M" if end.date() == start.date() else " to %d %b %Y %H:%M")
    text += " UTC"
    if len(runs) > 1:
        broken = sum(run.get("ended") is None for run in (runs[:-1] if is_running else runs))
        text += f", in {len(runs)} runs" + (f", {broken} of them killed" if broken else "")
    return text


def describe_span(manifests: Sequence[Mapping[str, Any]]) -> str:
    """When the first of several jobs began and the last ended."""
    runs = [run for manifest in manifests for run in list_working_runs(manifest)]
    starts = [run["started"] for run in runs if run.get("started")]
    ends = [run["ended"] for run in runs if run.get("ended")]
    return describe_times(
        {"runs": [{"started": min(starts, default=None), "ended": max(ends, default=None)}]}
    )


def _parse_time(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None


def collect_settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that somebody needs to repeat it; nothing of the server's section."""
    config = manifest.get("config") or {}
    return {
        "model": manifest.get("model"),
        "config": {name: config[name] for name in _SECTIONS if name in config},
        "settings": manifest.get("settings"),
        "versions": manifest.get("versions"),
        "device": manifest.get("device"),
        "seeds": manifest.get("seeds"),
    }


def list_differences(runs: Sequence[ReportRun]) -> list[tuple[str, list[str]]]:
    """The settings in which runs differ, with the value of each run; at most a line for each."""
    flat = [_flatten_settings(run.manifest) for run in runs]
    names = sorted({name for found in flat for name in found})
    rows = [(name, [found.get(name, "") for found in flat]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _flatten_settings(manifest: Mapping[str, Any]) -> dict[str, str]:
    """All settings by dotted name; what `config` and `settings` both have is there once."""
    found = collect_settings(manifest)
    rest = {key: value for key, value in found.items() if key not in ("config", "settings")}
    return dict(_flatten(found["config"])) | dict(_flatten(found["settings"] or {})) | dict(_flatten(rest))


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flatten(each, f"{name}.{key}" if name else str(key))
    elif value is not None:
        yield name, str(value)


def describe_hits(manifest: Mapping[str, Any]) -> str:
    """How many requests found what in the prefix cache."""
    hits = (manifest.get("cache") or {}).get("hits") or {}
    names = {
        "exact": "whole prompt",
        "prefix": "prefix",
        "supersequence": "beginning of a longer one",
        "lcp": "shared beginning",
        "miss": "nothing",
    }
    return ", ".join(f"{name} {format_count(hits[key])}" for key, name in names.items() if hits.get(key))
