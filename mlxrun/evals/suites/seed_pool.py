"""Seeds and repeats as one experiment: cells that differ only in their seeds are pooled.

A question is a line, by its id, with the answers of all seeds. Questions are what is sampled, so they are the
clusters of the interval (lines that share an `eval.cluster` are one). How much the score depends on the seed
is the standard deviation of the seeds' means.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import stdev
from typing import Any

from mlxrun.core.errors import JobError
from mlxrun.evals.run_folders.run_folder import RunFolder
from mlxrun.evals.run_folders.run_folder_paths import read_manifest
from mlxrun.evals.run_folders.run_line import RunLine
from mlxrun.jobs.lines.line_keys import dump_canonical
from mlxrun.jobs.records.manifest import hash_file
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.jobs.scoring.matching import normalize_extracted, votes_by_score
from mlxrun.jobs.scoring.measure import ScoreMeasure
from mlxrun.jobs.scoring.score_groups import ScoreGroup
from mlxrun.jobs.scoring.verdict import MAJORITY, Verdict, compute_metric

log = logging.getLogger(__name__)
Record = dict[str, Any]


@dataclass(slots=True)
class SeedPool:
    """The answers of several runs of the same lines. `means`: the score of each run; `measures`: that of each
    run, by its name; `answers`: the verdicts on the answers to each question that has one answer in a run,
    and whether its majority votes on right or wrong; `waiting`: runs of which no answer could be scored."""

    group: ScoreGroup = field(default_factory=ScoreGroup)
    means: list[float] = field(default_factory=list)
    measures: dict[str, ScoreMeasure] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    answers: dict[str, list[Verdict]] = field(default_factory=lambda: defaultdict(list))
    by_score: dict[str, bool] = field(default_factory=dict)

    def add_run(self, run: RunFolder) -> None:
        """Add the scored lines of a run."""
        own = ScoreGroup()
        for line in run.read_lines():
            if line.score is not None:
                own.add(line.eval, failed=line.error is not None, is_cut_answer=False)
                self._add_line(line)
        if own.value is None:
            raise JobError(f"{run.name}: its lines have no score in one unit")
        if own.unscored and own.is_unscored:
            self.waiting.append(run.name)
        self.means.append(own.value)
        self.measures[run.name] = own.measure

    def _add_line(self, line: RunLine) -> None:
        score, cluster = float(line.score or 0), line.eval.get("cluster")
        key = ("line", line.id) if cluster is None else ("cluster", str(cluster))
        self.group.add({**line.eval, "cluster": key}, failed=line.error is not None, is_cut_answer=False)
        spec = None if line.line is None else line.line.eval
        if spec is not None and not line.eval.keys() & {"choices", "measure"} and not spec.metrics:
            vote = normalize_extracted(spec, line.eval.get("extracted"))
            self.answers[line.id].append(Verdict(score, vote))
            self.by_score[line.id] = votes_by_score(spec)

    def describe(self) -> Record:
        """Describe the pool as suite.json has it. `scores`: pass@n, pass^n and the majority of n seeds, if
        every question has one answer of each. JobError if a run has no score, or none in the unit of the
        others."""
        for name, measure in self.measures.items():
            # The share of a run without scores is 0, which in a unit would be a score as any other.
            if measure != self.group.measure:
                raise JobError(f"{name}: its lines have no score in the unit of the other seeds")
        if self.waiting and not self.group.is_unscored:
            raise JobError(f"{self.waiting[0]}: none of its answers could be scored")
        count, interval = len(self.means), self.group.interval
        if self.group.measure.is_share:
            interval = self.group.scores.compute_pooled_interval()
        found: Record = {
            "answers": self.group.sample.count,
            "lines": self.group.lines,
            "failed": self.group.failed,
            "unscored": self.group.unscored,
            **self.group.describe_value(interval),
            "seed_shares": [round(mean, 10) for mean in self.means],
            "seed_deviation": round(stdev(self.means), 10),
        }
        whole = bool(self.answers) and sum(map(len, self.answers.values())) == self.group.scores.count
        if whole and all(len(each) == count for each in self.answers.values()):
            found["scores"] = {
                name: round(self._compute_metric(name), 10)
                for name in (f"pass@{count}", f"pass^{count}", MAJORITY)
            }
        return found

    def _compute_metric(self, name: str) -> float:
        values = (compute_metric(name, each, self.by_score[key]) for key, each in self.answers.items())
        return sum(values) / len(self.answers)


def pool_seeds(folder: Path, records: Sequence[Mapping[str, Any]], known: Sequence[Record]) -> list[Record]:
    """Pool the finished cells of a suite that differ only in their seeds. `records`: of its cells; `known`:
    earlier pools, which are kept as long as their records stay the same, also those of failed lines. A pool
    with a record that was edited is left out."""
    groups: dict[bytes, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        varied = {key: value for key, value in record["settings"].items() if key != "seed"}
        groups[dump_canonical([record["model"], record["task"], varied])].append(record)
    earlier = {_compute_key(pool): pool for pool in known}
    found = []
    for cells in groups.values():
        if len(cells) > 1 and all(each["state"] == "done" and each["scores"] for each in cells):
            try:
                found.append(_pool_cells(folder, cells, earlier))
            except JobError as error:
                log.warning("%s: its seeds are not pooled: %s", cells[0]["name"], error)
    return found


def _pool_cells(folder: Path, cells: Sequence[Mapping[str, Any]], earlier: Mapping[bytes, Record]) -> Record:
    paths = [JobPaths(folder / each["job"]) for each in cells]
    head = {
        "cells": [each["name"] for each in cells],
        "outputs": [read_manifest(each.out)["output"]["sha256"] for each in paths],
        "errors": [hash_file(each.errors) for each in paths],
    }
    known = earlier.get(_compute_key(head))
    if known is not None and "lines" in known:  # which pools of earlier versions do not have
        return {**known, **head}
    pool = SeedPool()
    for each in paths:
        pool.add_run(RunFolder.open(each.out))
    return {**pool.describe(), **head}


def _compute_key(pool: Mapping[str, Any]) -> bytes:
    """A key that is equal for pools of the same cells and records. `errors` is missing in pools of versions
    that did not note them, which are computed again."""
    return dump_canonical([pool["cells"], pool["outputs"], pool.get("errors")])
