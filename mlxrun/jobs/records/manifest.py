"""manifest.json records how a job was computed, completely enough to repeat it; scores.json has its scores.

The manifest is replaced at the start and the end of each run. Each element of `runs` has one run's versions,
device, config and number of lines whose records it wrote. The journal names the run of each line. A killed
run wrote no totals. The next start adds them: lines from the journal, tokens from the last status.json.
scores.json exists once a run has ended, if a line has an `eval`.

Format 1 is read too: it has the versions and the device of the last run alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxrun.config.setting_fields import to_plain
from mlxrun.config.settings import Config
from mlxrun.core.durable_writes import write_atomically
from mlxrun.core.errors import JobError
from mlxrun.core.text_files import open_regular, read_json
from mlxrun.jobs.lines.line_index import DONE, FAILED, LineIndex
from mlxrun.jobs.records.manifest_checks import UNREADABLE, RunEnvironment, flatten_settings, list_versions
from mlxrun.jobs.records.reconciliation import RunTotals
from mlxrun.jobs.records.run_paths import JobPaths, wrap_write_errors
from mlxrun.jobs.run import job_cache
from mlxrun.jobs.run.progress import ProgressMeter, format_now, pluralize
from mlxrun.jobs.scoring.score_groups import Scores

log = logging.getLogger(__name__)
FORMAT = 2
_SCORES_FORMAT = 1


class Manifest:
    """The manifest of one job during one run. `end` writes `scores`."""

    def __init__(
        self, paths: JobPaths, facts: Mapping[str, Any], base_seed: int, device: Mapping[str, Any]
    ) -> None:
        """`facts`: what the manifest records of the config and the model; `device`: the device of this
        machine."""
        self.scores = Scores()
        self._base_seed = base_seed
        self._paths = paths
        self._facts = facts
        self._here = RunEnvironment(list_versions(), device)
        self._runs = _read_earlier_runs(paths.manifest)

    @property
    def run(self) -> int:
        """The number of the newest run, from 1."""
        return len(self._runs)

    @property
    def has_moved(self) -> bool:
        """Whether the run before had another environment. Its partial answers are not continued then."""
        return self.run > 1 and bool(RunEnvironment.parse(self._runs[-2]).list_obstacles(self._here))

    def check_environment(self, left: int) -> None:
        """Raise JobError if this run would mix `left` lines with those of other versions or another device.
        Call `count_lines` before."""
        used = [run for run in self._runs if run["lines"]]
        changes = [RunEnvironment.parse(run).list_obstacles(self._here) for run in used]
        if not left or not changes or not all(changes):
            return  # nothing is computed, nothing is there, or an earlier run was like this one
        count, rest = pluralize(used[-1]["lines"], "line"), pluralize(left, "line")
        raise JobError(
            f"{self._paths.out}: its answers ({count}) are those of other versions or of another device "
            f"({'; '.join(changes[-1])}), and {rest} left may come out differently here. Give another -o; or "
            f"--fresh, which starts over and moves the answers to {self._paths.earlier}; or --mixed, which "
            "goes on and records in the manifest which lines were computed with what"
        )

    def begin(self, index: LineIndex, totals: Mapping[int, RunTotals], end: int | None = None) -> None:
        """Begin this run, of the first `end` lines. The totals of a killed run are completed first, while its
        journal is still there."""
        if self._runs and self._runs[-1].get("ended") is None:
            last = self._runs[-1]
            if self.run in totals:
                last |= asdict(totals[self.run])
            last |= _read_last_status(self._paths.status, last, self.run)
        new = {"started": format_now(), "ended": None, "exit": None, **asdict(RunTotals()), "lines": 0}
        new |= {"cache": job_cache.summarize_counters({}), **asdict(self._here)}
        if end is not None and end < len(index):
            new["limit"] = end
        changes = _list_changes(self._facts["config"])
        self._runs.append(new | {"config_hash": self._facts["config_hash"], "config": changes})
        with wrap_write_errors(self._paths.scores):
            self._paths.scores.unlink(missing_ok=True)
        self._write(index, None, None)

    def end(
        self,
        index: LineIndex,
        meter: ProgressMeter,
        exit_code: int,
        *,
        complete: bool,
    ) -> None:
        """End this run. If the job is complete, the output is read once more for its digest."""
        here = RunTotals(meter.computed, meter.reused, meter.run_done, meter.run_failed)
        used = job_cache.summarize_counters(meter.counters())
        self._runs[-1].update(ended=format_now(), exit=exit_code, **asdict(here), cache=used)
        self._runs[-1]["lines"] = here.done + here.failed
        if drafts := meter.drafts():
            self._runs[-1]["speculation"] = dict(drafts)
        if workers := meter.workers():
            self._runs[-1]["workers"] = workers
        self._write(index, meter, hash_file(self._paths.out) if complete else None)
        write_scores(self._paths, count_states(index, self.scores), self.scores)

    def count_lines(self, lines: Mapping[int, int]) -> None:
        """Set the number of lines that have records of each run. Run 0 stands for an unknown run, from a
        journal that an earlier version of mlxrun rewrote. It counts as the first run with versions, which is
        the last run of that version."""
        for number, run in enumerate(self._runs, 1):
            run["lines"] = lines.get(number, 0)
        known = next((run for run in self._runs if run["versions"] is not None), None)
        if known is not None:
            known["lines"] += lines.get(0, 0)

    def _write(self, index: LineIndex, meter: ProgressMeter | None, output: str | None) -> None:
        used = [RunEnvironment.parse(run) for run in self._runs if run["lines"]]
        content = {
            "format": FORMAT,
            **self._facts,
            **asdict(self._here),
            "mixed": any(used[0].list_obstacles(other) for other in used[1:]),
            "seeds": {"base": self._base_seed, "line": "sha256('base:custom_id')[:4] >> 1, unless given"},
            "input": {"path": os.path.abspath(self._paths.job), "sha256": index.sha256, "lines": len(index)},
            "output": {"path": os.path.abspath(self._paths.out), "sha256": output},
            "counts": count_states(index, self.scores),
            "scores": self.scores.describe(),
            "tokens": {
                "prompt": meter.total_prompt if meter else 0,
                "computed": sum(run["computed"] for run in self._runs),
                "reused": sum(run["reused"] for run in self._runs),
                "output": meter.total_output if meter else 0,
            },
            "cache": job_cache.add_summaries([run["cache"] for run in self._runs]),
            "runs": self._runs,
        }
        write_json(self._paths.manifest, content)


def count_states(index: LineIndex, scores: Scores) -> dict[str, int]:
    """Count the lines as the `counts` of manifest.json and scores.json have them."""
    return {
        "total": len(index),
        "done": index.state.count(DONE),
        "failed": index.state.count(FAILED),
        "cut_by_length": scores.cut_by_length,
    }


def _list_changes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config that are not the defaults, by `section.key`."""
    values, defaults = flatten_settings(config), flatten_settings(to_plain(Config()))
    different = (key for key in values | defaults if values.get(key) != defaults.get(key))
    return {key: values.get(key) for key in different}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file of a run folder, or of a suite, by JSON. JobError if it cannot be written."""
    with wrap_write_errors(path):
        write_atomically(
            path, json.dumps(content, indent=1, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        )


def write_scores(paths: JobPaths, counts: Mapping[str, int], scores: Scores) -> None:
    """Replace scores.json, or delete it if no line is scored."""
    if scores.groups:
        write_json(paths.scores, {"format": _SCORES_FORMAT, "counts": counts, **scores.describe()})
        return
    with wrap_write_errors(paths.scores):
        paths.scores.unlink(missing_ok=True)


def _read_earlier_runs(path: Path) -> list[dict[str, Any]]:
    """Runs of an existing manifest. An unreadable one only loses the history."""
    try:
        found = read_json(path)
        runs = [_parse_run(run) for run in found["runs"]]
    except FileNotFoundError:
        return []
    except UNREADABLE as error:
        log.warning("%s: cannot be read (%s); the history of earlier runs is lost", path, error)
        return []
    if runs and runs[-1]["versions"] is None:  # format 1
        runs[-1] |= asdict(RunEnvironment.parse(found))
    return runs


def _parse_run(found: dict[str, Any]) -> dict[str, Any]:
    """A run of an existing manifest; old ones have no `cache`, `lines` and environment."""
    totals = {key: int(found[key]) for key in asdict(RunTotals())}
    return {
        **found,
        **totals,
        **asdict(RunEnvironment.parse(found)),
        "lines": int(found.get("lines", 0)),
        "cache": job_cache.summarize_counters(job_cache.flatten_summary(found.get("cache"))),
    }


def _read_last_status(status: Path, run: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The last status of a killed run: its cache counters and workers, and its prompt tokens including those
    of unfinished lines, which no journal entry counts."""
    try:
        found = read_json(status)
        if found["run"] != number:
            return {}
        tokens = {name: max(run[name], int(found["tokens"][name])) for name in ("computed", "reused")}
        workers = {"workers": found["workers"]} if found.get("workers") else {}
        cache = job_cache.summarize_counters(job_cache.flatten_summary(found["cache"]))
        return {"cache": cache, **tokens, **workers}
    except UNREADABLE:
        return {}


def hash_file(path: Path) -> str | None:
    """Return the SHA-256 of a file, in hex; None if it does not exist."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None
