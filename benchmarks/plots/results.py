"""Reads the JSON files of `benchmarks/results` and says in words where they were measured."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]

SAME = ("format", "machine", "versions", "peer_versions", "model")
FOLDER = Path(__file__).resolve().parent.parent / "results"


def load(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """The report of this name, as its benchmark wrote it."""
    return dict(json.loads((folder / f"{name}.json").read_text(encoding="utf-8")))


def read(*names: str, folder: Path = FOLDER) -> dict[str, Any]:
    """The reports of these names as one. A workload that is in several of them has the rounds of all.

    They must be of one machine, one set of versions and one model: ValueError.
    """
    reports = [load(name, folder) for name in names]
    for name, report in zip(names, reports, strict=True):
        different = [key for key in SAME if report.get(key) != reports[0].get(key)]
        if different:
            raise ValueError(f"{name} and {names[0]} differ in {', '.join(different)}")
    merged = dict(reports[0])
    merged["reports"] = len(reports)
    merged["workloads"] = {}
    for workload in dict.fromkeys(name for report in reports for name in report["workloads"]):
        parts = [report["workloads"][workload] for report in reports if workload in report["workloads"]]
        merged["workloads"][workload] = parts[0] if len(parts) == 1 else _pooled(parts)
    return merged


def hash_result(name: str) -> str:
    """What a picture of the result has as its source, so that a stale picture is found without drawing it."""
    digest = hashlib.sha256((FOLDER / f"{name}.json").read_bytes()).hexdigest()
    return f"{name}.json, sha256:{digest[:16]}"


def _pooled(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A workload of `bench serve` that was measured several times: all rounds, and medians over them."""
    pooled = {}
    for side in parts[0]:
        runs = [run for part in parts for run in part[side]["runs"]]
        values = {key: [run[key] for run in runs if run[key] is not None] for key in runs[0]}
        middle = {key: statistics.median(found) if found else None for key, found in values.items()}
        pooled[side] = {"runs": runs, "median": middle}
    return pooled


def machine_text(report: Report) -> str:
    """The machine in a few words: its GPU, or its processor and cores."""
    device, machine = report.get("device", {}), report["machine"]
    if device.get("backend", "cpu") != "cpu":
        return str(device["name"])
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['os'].split(' (')[0]}"


def note_text(report: Report) -> str:
    """What else is to be known of the machine, behind a comma; `note` is added to a result by hand."""
    return f", {report['note']}" if "note" in report else ""


def versions_text(versions: Mapping[str, str], names: Sequence[str]) -> str:
    """`mlx 0.32.4, mlx-lm 0.32.2` for the names that are known."""
    return ", ".join(f"{name} {versions[name.lower()]}" for name in names if name.lower() in versions)


def day(report: Report) -> str:
    """The day of the measurement, as YYYY-MM-DD."""
    return str(report["date"])[:10]
