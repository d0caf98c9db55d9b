"""A run in the terms that all formats share: model, task, times, scores and lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mlxrun.core.errors import JobError
from mlxrun.evals.run_folders.run_folder import DONE, RUNNING, RunFolder, list_working_runs
from mlxrun.evals.run_folders.run_folder_paths import find_cell
from mlxrun.evals.run_folders.run_line import RunLine
from mlxrun.jobs.scoring.intervals import CONFIDENCE, ConfidenceInterval
from mlxrun.jobs.scoring.score_groups import ScoreGroup

Json = dict[str, Any]
_MISSING = object()
# The metric of a match in the words of other harnesses, where they have one.
METRICS = {"exact": "exact_match", "choice": "acc", "likeliest": "acc"}


@dataclass(frozen=True, slots=True)
class ExportNames:
    """Names that a run does not know, in other people's words. `dataset`: a hub id, with or without
    `@REVISION`."""

    model: str | None = None
    task: str | None = None
    dataset: str | None = None
    organization: str | None = None

    def split_dataset(self) -> tuple[str, Json]:
        """Return the hub id, empty without one, and the `revision`, if it names one."""
        dataset, _, revision = (self.dataset or "").partition("@")
        return dataset, {"revision": revision} if revision else {}


@dataclass(slots=True)
class RunSummary:
    """The counts of one pass over the lines. `generation`: the settings that all lines share."""

    groups: dict[str, ScoreGroup] = field(default_factory=dict)
    total: ScoreGroup = field(default_factory=ScoreGroup)
    ids: list[str] = field(default_factory=list)
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    generation: Json | None = None

    @property
    def lines(self) -> int:
        return len(self.ids)

    def add(self, line: RunLine) -> None:
        """Count a line."""
        self.ids.append(line.id)
        self.failed += line.error is not None
        self.input_tokens += line.tokens[0]
        self.output_tokens += line.tokens[1]
        if line.body:
            known = line.generation if self.generation is None else self.generation
            mine = line.generation
            self.generation = {key: value for key, value in known.items() if mine.get(key, _MISSING) == value}
        if line.score is not None:
            for group in (self.groups.setdefault(str(line.group), ScoreGroup()), self.total):
                group.add(line.eval, failed=line.error is not None, is_cut_answer=False)


class ExportedRun:
    """A run that may be exported."""

    def __init__(self, run: RunFolder, names: ExportNames) -> None:
        self.run = run
        self.names = names
        self.manifest: Mapping[str, Any] = run.manifest
        path = str(self.manifest["model"]["path"])
        self.model = names.model or (Path(path).name if path.startswith(("/", ".", "~")) else path)
        job = run.paths.job.name.removesuffix(".jsonl").removesuffix(".job")
        cell = find_cell(run.paths.out)
        self.cell = None if cell is None else "/".join(cell[1:])  # of a suite: model, task and variant
        self.task = names.task or (job if cell is None else cell[2])
        self.is_complete = run.state == DONE

    @classmethod
    def check(cls, run: RunFolder, names: ExportNames, *, partial: bool = False) -> ExportedRun:
        """Return the run for export. JobError if it is running, if it is unfinished without `partial`, or if
        it has no scores."""
        if run.state == RUNNING:
            raise JobError(f"{run.paths.out}: its job is running; export it when it has finished")
        made = cls(run, names)
        if not made.is_complete and not partial:
            raise JobError(
                f"{run.paths.out}: the run is unfinished, with {run.count_lines()} of {run.total} lines "
                "done; finish it, or give --partial"
            )
        total = made.summary.total
        if total.is_mixed or (total.measured and total.value is None):
            raise JobError(f"{run.paths.out}: its lines have no score in one unit, which the formats need")
        if not total.sample.count:
            raise JobError(f"{run.paths.out}: none of its lines is scored: no `eval` in {run.paths.job}")
        if total.unscored and total.is_unscored:
            raise JobError(
                f"{run.paths.out}: none of its answers could be scored (`note` in the output says why)"
            )
        return made

    def read_lines(self) -> Iterator[RunLine]:
        """Yield the lines in the order of the job. JobError if a record was edited, or if its line changed in
        the job file, so that its prompt is unknown."""
        for found in self.run.read_lines():
            if found.line is None:
                raise JobError(
                    f"{self.run.paths.job}: the line {found.id!r} has changed since the run, or is gone, so "
                    "that its prompt is not known"
                )
            yield found

    def has_score(self, line: RunLine) -> bool:
        """Whether a line has a score. One that failed has none where scores have a unit, in which 0 would be
        one as any other."""
        return line.score is not None and (not self.summary.total.measured or "measure" in line.eval)

    @cached_property
    def summary(self) -> RunSummary:
        found = RunSummary()
        for line in self.read_lines():
            found.add(line)
        return found

    @property
    def model_id(self) -> str:
        """The model with the name of its engine, as harnesses write it."""
        return f"mlxrun/{self.model}"

    @property
    def started(self) -> str:
        """When the first run began, in ISO 8601 and UTC."""
        return str(list_working_runs(self.manifest)[0]["started"])

    @property
    def ended(self) -> str:
        """When the last run with work ended, or began if it was killed, in ISO 8601 and UTC."""
        return self.run.ended

    @property
    def versions(self) -> dict[str, str]:
        return {str(name): str(version) for name, version in self.manifest["versions"].items()}

    @property
    def facts(self) -> Json:
        """What is needed to repeat the run: settings, seeds, and digests of the job and its output."""
        names = ("config_hash", "settings", "seeds", "device")
        found = {name: self.manifest[name] for name in names if self.manifest.get(name) is not None}
        found["fingerprint"] = self.manifest["model"].get("fingerprint")
        found["job_sha256"] = self.manifest["input"]["sha256"]
        found["output_sha256"] = self.manifest["output"]["sha256"]
        found["complete"] = self.is_complete
        return found if self.cell is None else found | {"cell": self.cell}

    @property
    def digest(self) -> str:
        """The run's id (SHA-256, hex) for formats that want one: the same for every export of the same
        answers."""
        digests = self.manifest["input"]["sha256"], self.manifest["output"]["sha256"]
        parts = (*digests, self.started, self.ended, self.model, self.task)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def name_metric(group: ScoreGroup) -> str:
    """Name a group's score: the match of its lines if they share one, else `score`."""
    (match,) = group.matches if len(group.matches) == 1 else ("score",)
    return METRICS.get(match, match)


def describe_interval(interval: ConfidenceInterval, level: str = "level") -> Json:
    """Describe an interval. `level`: what the format calls its confidence level."""
    bounds = {"lower": interval.low, "upper": interval.high}
    return bounds | {level: CONFIDENCE, "method": interval.method}


def dump_json(value: Any, indent: int | None = None) -> str:
    """Dump a value as JSON, without `indent` on one line. Lone surrogates are escaped, such as those of names
    that are not UTF-8."""
    return json.dumps(value, indent=indent, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def build_usage(prompt: int, output: int) -> Json:
    """Build counts of tokens, in the fields that Inspect and Every Eval Ever share."""
    return {"input_tokens": prompt, "output_tokens": output, "total_tokens": prompt + output}
