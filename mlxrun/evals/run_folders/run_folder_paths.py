"""Finds the files of runs: from a job file, its output, its run folder, or a folder that contains runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from mlxrun.core.errors import JobError
from mlxrun.core.text_files import read_json
from mlxrun.jobs.records.manifest import FORMAT
from mlxrun.jobs.records.manifest_checks import UNREADABLE
from mlxrun.jobs.records.run_paths import JobPaths, name_output

RUN_SUFFIX = ".run"
BUNDLE_SUFFIX = ".tar.gz"
SUITE_NAME = "suite.json"
_NEEDED = ("settings", "model", "versions", "input", "output", "counts", "runs")
# The keys whose values are objects; those in _NULLABLE may be null or missing.
_OBJECTS = ("settings", "model", "versions", "input", "output", "counts", "seeds")
_NULLABLE = ("config", "device", "scores", "tokens", "cache", "user_model")


class UnknownFormat(JobError):
    """A manifest is not damaged, but that of another version of mlxrun."""


def find_output(path: Path) -> Path:
    """Find the output whose run folder `path` names: by itself, by its output or job file, or as the only one
    in a folder. JobError if there is none, or if there are several."""
    found = _find_outputs(path)
    if len(found) > 1:
        names = ", ".join(str(each.relative_to(path)) for each in found[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise JobError(f"{path}: contains {len(found)} runs: {names}{more}; give one of them")
    return found[0]


def find_outputs(path: Path) -> list[Path]:
    """Find the outputs of all runs that `path` names. Those of a suite's folder or file (.yaml) are in the
    order of its cells, others by path. JobError if there are none."""
    if path.suffix in (".yaml", ".yml"):
        folder = path.with_suffix(".out")
        if not folder.is_dir():
            raise JobError(f"{path}: this suite has not been run: there is no folder {folder}")
        path = folder
    if (path / SUITE_NAME).is_file():
        return _find_cells(path)
    return _find_outputs(path)


def find_suite(path: Path) -> Path | None:
    """Find the folder of the suite that `path` names, by itself or by its file. None if it names no suite."""
    folder = path.with_suffix(".out") if path.suffix in (".yaml", ".yml") else path
    return folder if (folder / SUITE_NAME).is_file() else None


def find_cell(out: Path) -> tuple[Path, str, str, str] | None:
    """Find the suite's folder, and model, task and variant, of a cell's output. None for other outputs."""
    parents = out.parents if len(out.parents) > 3 else out.absolute().parents
    if out.name != "job.out.jsonl" or len(parents) < 4 or not (parents[3] / SUITE_NAME).is_file():
        return None
    return parents[3], parents[2].name, parents[1].name, parents[0].name


def list_cell_outputs(folder: Path) -> list[Path]:
    """List the outputs of all cells of a suite, begun or not. JobError if its manifest cannot be read."""
    suite = folder / SUITE_NAME
    try:
        jobs = [folder / cell["job"] for cell in read_json(suite)["cells"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise JobError(f"{suite}: cannot be read, or is not the manifest of a suite: {error!r}") from error
    return [job.with_name(name_output(job.name)) for job in jobs]


def _find_cells(folder: Path) -> list[Path]:
    """The outputs of the cells that a suite has begun."""
    outputs = [out for out in list_cell_outputs(folder) if out.parent.is_dir()]
    begun = [out for out in outputs if (_get_run_folder(out) / "manifest.json").exists()]
    if not begun:
        raise JobError(f"{folder}: no cell of this suite has begun")
    return begun


def _find_outputs(path: Path) -> list[Path]:
    if not path.exists() and not _get_run_folder(path).is_dir():
        raise JobError(f"{path}: no such file or folder")
    if not path.is_dir():
        candidates = (path, path.with_name(path.name.removesuffix(".jsonl") + ".out.jsonl"))
        for out in candidates:
            if _get_run_folder(out).is_dir():
                return [out]
        if path.name.endswith(BUNDLE_SUFFIX):
            raise JobError(
                f"{path}: is a bundle, which only `mlxrun verify` and `mlxrun replay` read; unpack it with "
                "`tar -xzf`, and give the folder that it contains"
            )
        tried = " nor ".join(str(_get_run_folder(out)) for out in candidates)
        raise JobError(f"{path}: is not the job or the output of a run: there is neither {tried}")
    if _is_run_folder(path):
        return [path.with_name(path.name.removesuffix(RUN_SUFFIX))]
    found = []
    for folder, names, _ in os.walk(path):
        runs = [name for name in names if _is_run_folder(Path(folder, name))]
        outputs = [Path(folder, name.removesuffix(RUN_SUFFIX)) for name in runs]
        # What lies beside a cell, such as a replay of it, is no cell.
        cells = [out for out in outputs if find_cell(out) is not None]
        found += cells or outputs
        names[:] = sorted(set(names) - set(runs))
    if not found:
        raise JobError(f"{path}: contains no run (a folder whose name ends in .jsonl{RUN_SUFFIX})")
    return sorted(found)


def _get_run_folder(out: Path) -> Path:
    return out.with_name(out.name + RUN_SUFFIX)


def _is_run_folder(path: Path) -> bool:
    if not path.name.endswith(RUN_SUFFIX) or not path.is_dir():
        return False
    return path.name.endswith(".jsonl" + RUN_SUFFIX) or (path / "manifest.json").is_file()


def read_manifest(out: Path) -> dict[str, Any]:
    """Read the manifest of a run by the path of its output. JobError if it is missing, damaged or of an
    unknown format."""
    path = _get_run_folder(out) / "manifest.json"
    try:
        found = read_json(path)
    except FileNotFoundError as error:
        raise JobError(
            f"{path}: is missing: the run folder is incomplete, or its job was stopped before it began"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise JobError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict) or "format" not in found:
        raise JobError(f"{path}: is not the manifest of a run")
    if found["format"] not in range(1, FORMAT + 1):
        raise UnknownFormat(
            f"{path}: has format {found['format']!r}, this mlxrun reads formats up to {FORMAT}; "
            "use the version that wrote it"
        )
    missing = [name for name in _NEEDED if name not in found]
    if missing:
        raise JobError(f"{path}: is damaged: {missing[0]} is missing")
    if (wrong := _find_misshapen(found)) is not None:
        raise JobError(f"{path}: is damaged: {wrong} has a value of another kind")
    return found


def _find_misshapen(manifest: Mapping[str, Any]) -> str | None:
    """Find the first key of a manifest that has a value of another kind than mlxrun writes."""
    for name in (*_OBJECTS, *_NULLABLE):
        value = manifest.get(name)
        if not isinstance(value, dict) and (name in _OBJECTS or value is not None):
            return name
    for name, fits in _VALUES.items():
        first, key = name.split(".")
        if not fits(manifest[first].get(key)):
            return name
    total = (manifest.get("scores") or {}).get("total") or {}
    if not isinstance(total, dict) or not all(fits(total.get(name, 0)) for name, fits in _FIGURES.items()):
        return "scores.total"
    runs = manifest["runs"]
    return None if isinstance(runs, list) and all(map(_is_run, runs)) else "runs"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value <= _MOST


def _is_number(value: Any) -> bool:
    """Whether a value is a number that is no integer beyond the range of floats, or null."""
    return value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) <= _MOST)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_run(run: Any) -> bool:
    """Whether a value is a run with the time of its begin, and that of its end or null."""
    try:
        for time in (run["started"], run["ended"] or run["started"]):
            datetime.fromisoformat(time)
    except UNREADABLE:
        return False
    return True


_MOST = 2**63
# What the values of a manifest are, and those of the figure of all its lines.
_VALUES: dict[str, Callable[[Any], bool]] = {
    "model.path": _is_text,
    "input.path": _is_text,
    "input.sha256": _is_text,
    "input.lines": _is_count,
    "output.path": _is_text,
    "output.sha256": lambda value: value is None or _is_text(value),
    **{f"counts.{name}": _is_count for name in ("total", "done", "failed")},
    "seeds.base": lambda value: isinstance(value, int),
}
_FIGURES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("lines", "failed", "unscored"), _is_count),
    **dict.fromkeys(("share", "value"), _is_number),
}


def find_paths(out: Path, manifest: Mapping[str, Any]) -> JobPaths:
    """Find all paths of a run. The job file is at its old place relative to the output, as their folder may
    have moved, or else at the recorded path."""
    recorded, recorded_out = Path(manifest["input"]["path"]), Path(manifest["output"]["path"])
    moved = Path(os.path.normpath(out.parent / os.path.relpath(recorded, recorded_out.parent)))
    return JobPaths(moved if moved.is_file() or not recorded.is_file() else recorded, out)
