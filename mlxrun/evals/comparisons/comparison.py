"""Compares two runs, or two suites cell by cell: scores, tests, and the lines that changed.

The first side is the reference, such as the full model. A difference is the second side's score minus the
first's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mlxrun.core.errors import JobError
from mlxrun.evals.comparisons.compared_group import ComparedGroup, compare_group
from mlxrun.evals.comparisons.pairing import (
    CellPair,
    Mismatches,
    PairedLine,
    PairedLines,
    PairingRules,
    ReadFacts,
    match_cells,
    read_facts,
)
from mlxrun.evals.power import describe_power
from mlxrun.evals.run_folders.run_folder import RunFolder, open_runs
from mlxrun.evals.statistics import adjust_p_values
from mlxrun.jobs.records.manifest_checks import (
    SETTING_NAMES,
    RunEnvironment,
    describe_change,
    describe_changes,
    flatten_settings,
)
from mlxrun.jobs.run.progress import pluralize
from mlxrun.jobs.scoring.measure import SHARE

ANY_SAME_LINE = PairingRules()
# What a model brings along. `describe_changes` leaves it out where the model is another one.
_OF_MODEL = ("model.template", "model.tokenizer", "processor")
# Digests in the `scoring` of a manifest. What else begins with `judge.`, but for its template, depends on the
# judged answers or on the machine, or follows from these.
_SCORING_DIGESTS = {
    "judge.settings_sha256": "the settings of the judge have changed",
    "judge.model.fingerprint": "the model of the judge has changed",
}


@dataclass(frozen=True, slots=True)
class Flip:
    """A line whose score differs between the two sides."""

    id: str
    group: str
    first: float
    second: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs, or the runs of one cell. `better`, `worse`: lines that score more or less on the second side,
    in the order of the job. `unscored`: lines without a score; `unknown`: lines whose prompts could not be
    compared, as a job file has changed; `left_out`: lines that are not the same; `lost`: lines without a
    score on a side, where scores have a unit; `unclustered`: lines that `--cluster` gives no cluster;
    `units`: the cluster of each compared line, or its own id; `is_scored`: whether any line has a score."""

    cell: CellPair
    total: ComparedGroup
    groups: list[ComparedGroup]
    better: list[Flip]
    worse: list[Flip]
    unscored: int
    unknown: int
    left_out: Mismatches
    differences: list[str]
    lost: int = 0
    unclustered: int = 0
    units: Mapping[str, str] = field(default_factory=dict)
    is_scored: bool = True

    @property
    def epochs(self) -> int:
        """The number of runs of each side; a line's score is their mean."""
        return len(self.cell.runs)

    def describe(self) -> dict[str, Any]:
        """Describe the comparison as JSON."""
        sides = zip(*self.cell.runs, strict=True)
        names = [
            [{"name": run.name, "output": str(run.paths.out), "state": run.state} for run in side]
            for side in sides
        ]
        return {
            "cell": self.cell.name,
            "first": names[0],
            "second": names[1],
            "epochs": self.epochs,
            "total": self.total.describe(),
            "groups": {group.name: group.describe() for group in self.groups},
            "better": [asdict(flip) for flip in self.better],
            "worse": [asdict(flip) for flip in self.worse],
            "unscored": self.unscored,
            "lost": self.lost,
            "prompts_not_compared": self.unknown,
            "unclustered": self.unclustered,
            "left_out": asdict(self.left_out),
            "differences": self.differences,
        }


def compare_cell(
    cell: CellPair,
    rules: PairingRules = ANY_SAME_LINE,
    margin: float | None = None,
    seed: int = 0,
    read: ReadFacts = read_facts,
) -> Comparison:
    """Compare the runs of one cell. `read`: reads the lines of a run."""
    paired = PairedLines(read=read)
    for first, second in cell.runs:
        paired.add_runs(first, second, rules)
    lines = list(paired.lines.values())
    if not lines:
        first, second = cell.runs[0]
        if not paired.shared:
            found = "; ".join(paired.mismatches.describe("the first", "the second"))
            raise JobError(f"{first.paths.out} and {second.paths.out} have no line in common: {found}")
        raise JobError(
            f"{first.paths.out} and {second.paths.out} have no scores to compare: no line of both has an "
            "`eval`; add one to the lines of the job and run it again, which computes no answer anew"
        )
    _check_clusters(lines, rules)
    is_scored = any(line.is_scored for line in lines)
    if is_scored:
        _check_rated(paired, cell)
    lines, lost = _leave_out_lost(lines, cell)
    names = sorted({line.group for line in lines})
    groups = [
        compare_group(name, [line for line in lines if line.group == name], margin, seed)
        for name in names
        if len(names) > 1
    ]
    adjusted = adjust_p_values([group.adjusted_p for group in groups])
    flips = [Flip(line.id, line.group, *line.scores) for line in lines if line.scores[0] != line.scores[1]]
    total = compare_group("total", lines, margin, seed)
    changed: tuple[list[Flip], list[Flip]] = [], []
    for flip in flips:
        changed[not total.measure.is_better(flip.second - flip.first)].append(flip)
    return Comparison(
        cell=cell,
        total=total,
        groups=[replace(group, adjusted_p=p) for group, p in zip(groups, adjusted, strict=True)],
        better=changed[0],
        worse=changed[1],
        unscored=paired.unscored,
        unknown=paired.unknown,
        left_out=paired.mismatches,
        differences=list_differences(cell.runs, paired),
        lost=lost,
        units={line.id: line.cluster or line.id for line in lines},
        unclustered=sum(line.cluster is None for line in lines) if rules.cluster is not None else 0,
        is_scored=is_scored,
    )


def _check_clusters(lines: Sequence[PairedLine], rules: PairingRules) -> None:
    """JobError if the pattern of the clusters matches not a single id: it would change nothing."""
    if isinstance(rules.cluster, re.Pattern) and all(line.cluster is None for line in lines):
        raise JobError(
            f"--cluster {rules.cluster.pattern!r}: matches none of the {pluralize(len(lines), 'id')}, "
            f"such as {lines[0].id!r}"
        )


def _check_rated(paired: PairedLines, cell: CellPair) -> None:
    """JobError if one side has no answer that could be scored, as a judge has yet to do it: the 0 of each
    would make the other side significantly better."""
    for rated, run in zip(paired.rated, cell.runs[0], strict=True):
        if not rated:
            raise JobError(
                f"{run.paths.out}: nothing to compare: none of its answers could be scored (`note` in its "
                "output says why)"
            )


def _leave_out_lost(lines: Sequence[PairedLine], cell: CellPair) -> tuple[list[PairedLine], int]:
    """The lines to compare, and the number of those left out: where scores have a unit, a line that failed or
    could not be scored has none. JobError if the scores have several units, or if all lines are left out."""
    # The unit of a line is known if any of its runs has a score; so a run without scores does not hide it.
    measures = {line.measure for line in lines if line.measure is not None or not line.lost} or {None}
    if len(measures) > 1:
        units = ", ".join(sorted((each or SHARE).points or "a number" for each in measures))
        raise JobError(f"{cell.runs[0][0].paths.out}: its scores have several units ({units})")
    kept = list(lines) if measures == {None} else [line for line in lines if not line.lost]
    if not kept:
        outputs = " and ".join(str(run.paths.out) for run in cell.runs[0])
        raise JobError(f"{cell.name or outputs}: no line has a score in every run")
    return kept, len(lines) - len(kept)


def list_differences(runs: Sequence[tuple[RunFolder, RunFolder]], lines: PairedLines) -> list[str]:
    """List phrases such as `model.path is B, was A`, each once; `was` is the first side. `lines`: the paired
    lines of the runs."""
    found: dict[str, None] = {}
    for first, second in runs:
        found |= dict.fromkeys(_compare_manifests(first.manifest, second.manifest))
    for key, count in sorted(lines.settings.items()):
        name = f"`{key}` of {pluralize(count, 'line')}"
        found[describe_change(name, *lines.examples[key])] = None
    return list(found)


def _compare_manifests(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    settings = old["settings"], new["settings"]
    yield from describe_changes(*settings, str(old["model"]["path"]), str(new["model"]["path"]))
    if settings[0]["model"]["model"] != settings[1]["model"]["model"]:
        was, now = (flatten_settings(each) for each in settings)
        for key in _OF_MODEL:
            if was.get(key) != now.get(key):
                yield f"{SETTING_NAMES[key]} is another one"
        for key in ("model.dtype", "model.kind", "context"):
            if was.get(key) != now.get(key):
                yield f"{key} is {now.get(key)}, was {was.get(key)}"
    seeds = [each.get("seeds", {}).get("base") for each in (old, new)]
    if seeds[0] != seeds[1]:
        yield f"the base of the seeds is {seeds[1]}, was {seeds[0]}"
    yield from RunEnvironment.parse(old).list_differences(RunEnvironment.parse(new))
    yield from _compare_scoring(old.get("scoring", {}), new.get("scoring", {}))
    for which, manifest in (("first", old), ("second", new)):
        if manifest.get("mixed"):
            yield f"the {which} run has answers of several versions or devices"


def _compare_scoring(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    was, now = flatten_settings(old), flatten_settings(new)
    for key in sorted(was.keys() | now.keys()):
        if was.get(key) == now.get(key) or key == "scorers.judge":  # whose digest covers all verdicts
            continue
        if key in _SCORING_DIGESTS:
            yield _SCORING_DIGESTS[key]
        elif key.startswith("scorers."):
            yield f"the scorer {key.removeprefix('scorers.')} has changed"
        elif not key.startswith("judge.") or key.startswith("judge.template."):
            yield describe_change(f"scoring.{key}", was.get(key), now.get(key))


FORMAT = 1


@dataclass(frozen=True, slots=True)
class ComparisonSet:
    """The comparisons of two sides, one for each cell. `left_out`: runs that only one side has; `unscored`:
    cells of which no line has a score on either side."""

    comparisons: list[Comparison]
    left_out: list[str] = field(default_factory=list)
    unscored: list[str] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """Describe the comparisons as JSON."""
        cells = [comparison.describe() for comparison in self.comparisons]
        rest = {"left_out": self.left_out, "unscored": self.unscored}
        return {"format": FORMAT, "comparisons": cells, **rest}


def compare_paths(
    first: Path,
    second: Path,
    *,
    rules: PairingRules = ANY_SAME_LINE,
    margin: float | None = None,
    seed: int = 0,
) -> ComparisonSet:
    """Compare the runs that two paths name. `margin`: of the test of equivalence, in points or in the unit of
    the scores, None for no test; `seed`: of the bootstrap. JobError if they are not of the same lines, or
    have no scores."""
    cells, left_out = match_cells(open_runs(first), open_runs(second), common=rules.common)
    every = [compare_cell(cell, rules, margin, seed) for cell in cells]
    found = keep_scored(every)
    adjusted = adjust_p_values([each.total.adjusted_p for each in found])
    return ComparisonSet(
        [
            replace(each, total=replace(each.total, adjusted_p=p))
            for each, p in zip(found, adjusted, strict=True)
        ],
        left_out,
        [each.cell.name for each in every if not each.is_scored],
    )


def keep_scored(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons in which a line has a score. JobError if there is none: each line of each run
    would count as 0, whatever its scores are in."""
    found = [each for each in comparisons if each.is_scored]
    if not found:
        outputs = " and ".join(str(run.paths.out) for run in comparisons[0].cell.runs[0])
        raise JobError(f"{outputs}: nothing to compare: all lines of every run failed or could not be scored")
    return found


def add_power(comparison: Comparison, difference: float) -> Comparison:
    """Return a comparison with its power for a difference, in points or in the unit of the scores."""

    def add(group: ComparedGroup) -> ComparedGroup:
        wanted = difference / (100 if group.measure.is_share else 1)
        return replace(group, power=describe_power(group.result, wanted))

    groups = [add(group) for group in comparison.groups]
    return replace(comparison, total=add(comparison.total), groups=groups)
