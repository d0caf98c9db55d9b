"""The pages of a folder of runs, as `mlxrun view` and servers send them: an index, and reports of its runs.

Nothing is written. Files are read when a page is asked for, and a page is made again once one of the files
that it shows has changed. So pages follow runs that other processes make.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from cachetools import LRUCache

from mlxrun.core.errors import JobError, NotFound
from mlxrun.core.text_files import stamp_file
from mlxrun.evals.reports.shown_text import pluralize_count
from mlxrun.evals.run_folders.run_folder import DONE, RUNNING, UNFINISHED, RunFolder
from mlxrun.evals.run_folders.run_folder_paths import RUN_SUFFIX, SUITE_NAME, find_cell, find_outputs
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.jobs.scoring.score_groups import format_described

MOST_KEPT = 4  # reports, of which each may have some megabytes
DAMAGED = "damaged"  # the state of a run whose manifest cannot be read
FAILED = "failed"  # of a suite with cells that could not run
# What files with values of other kinds raise where they are shown.
DAMAGE = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, OSError, RecursionError)


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run of the index, or a suite with its `cells` below it. `key`: its path below the folder, by which
    its report is asked for; `done`, `total`: lines of a run, or cells of a suite; `failed`: lines; `time`:
    when it ended, or began if it has not."""

    key: str
    name: str
    path: Path
    state: str
    model: str = ""
    done: int = 0
    failed: int = 0
    total: int = 0
    score: str = ""
    time: str = ""
    note: str = ""
    cells: tuple[ListedRun, ...] = ()
    is_suite: bool = False

    @property
    def has_report(self) -> bool:
        """Whether anything has begun."""
        return self.state != DAMAGED and not (self.is_suite and not self.cells)

    @property
    def outputs(self) -> list[Path]:
        """The outputs of all its runs."""
        return [cell.path for cell in self.cells] if self.is_suite else [self.path]

    @property
    def unit(self) -> str:
        return "cells" if self.is_suite else "lines"


class RunPages:
    """The pages of the runs in `folder` and in the folders below it. Several threads may use them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._lock = Lock()
        self._kept: LRUCache[tuple[str, ...], tuple[str, str]] = LRUCache(MOST_KEPT)
        self._known: dict[Path, tuple[object, ListedRun]] = {}

    @property
    def policy(self) -> str:
        """The Content-Security-Policy of the pages."""
        from mlxrun.evals.reports.page import build_served_policy

        return build_served_policy()

    def list_runs(self) -> list[ListedRun]:
        """List all suites and the runs that are in none, the newest first. A folder that is not there has
        none."""
        found, suites = [], {suite: list[ListedRun]() for suite in self._find_suites()}
        try:
            outputs = find_outputs(self._folder)
        except JobError:
            outputs = []
        for out in outputs:
            cell = find_cell(out)
            if cell is None or cell[0] not in suites:
                run = self._describe(out, "")
                found.append(replace(run, name=run.key))
            else:
                suites[cell[0]].append(self._describe(out, "/".join(cell[1:])))
        found += [self._describe_suite(folder, cells) for folder, cells in suites.items()]
        return sorted(found, key=lambda run: (run.time, run.key), reverse=True)

    def render(self, keys: Sequence[str], known: Container[str] = ()) -> tuple[str, str]:
        """Render the report of the runs with these keys; without keys, the index. Returns the digest of what
        the page shows, and the page, which is empty if the digest is one of `known`. NotFound for a run that
        is not there, JobError for one that cannot be read."""
        from mlxrun.evals.reports.page import render_index

        listed = self.list_runs()
        chosen = _find(listed, keys)
        digest = _hash([self._list_facts(run) for run in chosen] if keys else listed)
        if digest in known:
            return digest, ""
        if not keys:
            return digest, render_index(listed, self._folder.name, digest)
        with self._lock:  # a second request for a page waits for the first
            kept = self._kept.get(tuple(keys))
            if kept is None or kept[0] != digest:
                kept = self._kept[tuple(keys)] = digest, _render_report(chosen, digest)
            return kept

    def _find_suites(self) -> Iterator[Path]:
        for folder, names, files in os.walk(self._folder):
            if SUITE_NAME in files:
                yield Path(folder)
            names[:] = [name for name in names if not name.endswith(RUN_SUFFIX)]

    def _describe(self, out: Path, name: str) -> ListedRun:
        """Describe a run: anew if its files have changed, if it runs, or if it could not be read."""
        folder = out.with_name(out.name + RUN_SUFFIX)
        stamps = [stamp_file(folder / each) for each in ("manifest.json", "status.json")]
        known = self._known.get(out)
        if known is None or known[0] != stamps or known[1].state in (RUNNING, DAMAGED):
            known = self._known[out] = stamps, self._read(out)
        return replace(known[1], name=name)

    def _read(self, out: Path) -> ListedRun:
        key = _make_key(out.relative_to(self._folder))
        try:
            run = RunFolder.open(out)
            state, (done, failed, total) = run.shown_state, run.progress
            model: Mapping[str, Any] = run.manifest["model"]
            return ListedRun(
                key,
                "",
                out,
                state,
                str(model.get("name") or model.get("path")),
                done,
                failed,
                total,
                format_described(run.total_score) if run.total_score else "",
                run.ended,
            )
        except (JobError, *DAMAGE) as error:
            return ListedRun(key, "", out, DAMAGED, note=f"the manifest is damaged: {error}")

    def _describe_suite(self, folder: Path, cells: Sequence[ListedRun]) -> ListedRun:
        path = folder.relative_to(self._folder)
        records, damage = _read_records(folder)
        errors = [str(each.get("error")) for each in records if each.get("state") == FAILED]
        done, total = sum(cell.state == DONE for cell in cells), max(len(records), len(cells))
        state = FAILED if errors else DONE if done == total else UNFINISHED
        state = RUNNING if any(map(_is_running, cells)) else state
        failures = f"{pluralize_count(len(errors), 'cell')} failed: {errors[0]}" if errors else ""
        return ListedRun(
            _make_key(path),
            str(path) if path.parts else folder.name,
            folder,
            DAMAGED if damage else state,
            ", ".join(dict.fromkeys(cell.model for cell in cells if cell.model)),
            done,
            sum(cell.failed for cell in cells),
            total,
            time=max((cell.time for cell in cells), default=""),
            note=damage or failures,
            cells=tuple(cells),
            is_suite=True,
        )

    def _list_facts(self, run: ListedRun) -> list[Any]:
        """What changes when a run's report does."""
        all_paths = [JobPaths(self._folder, out) for out in run.outputs]
        files = [file for each in all_paths for file in (each.out, each.errors, each.manifest, each.timings)]
        return [run, *map(stamp_file, [*files, run.path / SUITE_NAME])]


def _render_report(chosen: Sequence[ListedRun], digest: str) -> str:
    from mlxrun.evals.reports.page import render_page
    from mlxrun.evals.reports.report_runs import read_runs

    try:
        runs = read_runs([run.path for run in chosen])
        return render_page(runs, digest=digest, is_live=any(map(_is_running, chosen)))
    except DAMAGE as error:
        names = ", ".join(run.key for run in chosen)
        raise JobError(f"{names}: a manifest or a record is damaged: {error!r}") from error


def _read_records(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """The records of a suite's cells, and what is wrong with its manifest, if anything is."""
    from mlxrun.evals.suites.suite_manifest import load_suite_manifest

    try:
        found = load_suite_manifest(folder / SUITE_NAME)
    except JobError as error:
        return [], f"the manifest is damaged: {error}"
    return (found or {"cells": []})["cells"], ""


def _make_key(path: Path) -> str:
    """The path as text that can stand in an address, whatever bytes a name has."""
    return os.fsencode(path).decode("utf-8", "replace")


def _find(listed: Sequence[ListedRun], keys: Sequence[str]) -> list[ListedRun]:
    known = {each.key: each for run in listed for each in (run, *run.cells)}
    missing = [key for key in keys if key not in known]
    if missing:
        raise NotFound(f"there is no run {missing[0][:200]!r} in this folder")
    return [known[key] for key in dict.fromkeys(keys)]


def _is_running(run: ListedRun) -> bool:
    return run.state == RUNNING


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()[:32]
