"""Pairs what two sides have in common: runs by the names of their cells, and lines of two runs by id.

Runs that differ only in their seed are epochs of the same lines, and are compared together. Some 400 bytes
are kept for each line: scores, group, cluster and digests, but no text.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mlxrun.core.errors import JobError
from mlxrun.evals.run_folders.run_folder import DONE, RunFolder
from mlxrun.evals.run_folders.run_line import PROMPT_FIELDS, RunLine
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.lines.line_keys import digest_short, dump_canonical, make_run_keys
from mlxrun.jobs.run.progress import pluralize
from mlxrun.jobs.scoring.measure import ScoreMeasure, read_measure

_NAMED = 5  # cells or ids in an error; --json has no more, as nothing was compared


@dataclass(frozen=True, slots=True)
class CellPair:
    """The runs of both sides that are compared as one: they differ only in their seeds. `name`: the cell's
    name without its seed, empty for two single runs."""

    name: str
    runs: tuple[tuple[RunFolder, RunFolder], ...]


def match_cells(
    first: Sequence[RunFolder], second: Sequence[RunFolder], *, common: bool, by_name: bool = False
) -> tuple[list[CellPair], list[str]]:
    """Return the pairs, and the names of runs that only one side has. JobError for such runs without
    `common`. If each side has one model, the models may differ: names are then compared without the model.
    `by_name`: also the names of two single runs, which are a pair otherwise."""
    if len(first) == len(second) == 1 and not by_name:
        return [CellPair("", ((first[0], second[0]),))], []
    sides = [{run.name: run for run in side} for side in (first, second)]
    # The first part of a name is its model; a name with one part has none.
    models = [{name.partition("/")[0] if "/" in name else f"{name}/" for name in side} for side in sides]
    if not sides[0].keys() & sides[1].keys() and all(len(names) == 1 for names in models):
        sides = [{name.partition("/")[2]: run for name, run in side.items()} for side in sides]
    shared = [name for name in sides[0] if name in sides[1]]
    alone = [[name for name in side if name not in shared] for side in sides]
    if not shared:
        raise JobError(f"the two sides have no run of the same name: {_describe_unpaired(alone)}")
    if any(alone) and not common:
        found = _describe_unpaired(alone)
        raise JobError(f"the two sides do not have the same runs: {found}; --common compares the others")
    cells: dict[str, list[tuple[RunFolder, RunFolder]]] = {}
    for name in shared:
        cells.setdefault(remove_seed(name), []).append((sides[0][name], sides[1][name]))
    return [CellPair(name, tuple(runs)) for name, runs in cells.items()], alone[0] + alone[1]


def _describe_unpaired(alone: Sequence[Sequence[str]]) -> str:
    return " and ".join(
        f"only the {which} side has {', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''}"
        for which, names in zip(("first", "second"), alone, strict=True)
        if names
    )


def remove_seed(name: str) -> str:
    """Remove the seed from a cell's name: `m/t/seed-1,temperature-0.5` becomes `m/t/temperature-0.5`. A
    second one is a value of `vary`, such as of `few_shot.seed`, and stays."""
    folder, slash, variant = name.rpartition("/")
    rest = re.sub(r"(^|,)seed-[^,]*", "", variant, count=1).removeprefix(",")
    return f"{folder}{slash}{rest}" if rest else folder


@dataclass(frozen=True, slots=True)
class PairingRules:
    """Which lines are paired, and which scores are compared. `common`: pair the lines that are the same on
    both sides, and raise no error for others; `any_prompt`: prompts may differ; `metric`: the name of a score
    in the records' `scores`, None for their `score`. `cluster`: what lines of one cluster share: `group`, or
    the (first group of the) match of a pattern in their ids; None for their `eval.cluster`."""

    common: bool = False
    any_prompt: bool = False
    cluster: str | re.Pattern[str] | None = None
    metric: str | None = None

    def read_score(self, line: RunLine) -> float | None:
        """Read the score to compare; None for a line without one. JobError if only this metric is missing, or
        if it is not from 0 to 1."""
        if self.metric is None or line.score is None:
            return line.score
        found = line.eval.get("scores") or {}
        value = found.get(self.metric)
        if isinstance(value, int | float):
            if not 0 <= value <= 1:
                raise JobError(f"line {line.id!r}: {self.metric} is {value:g}, and no score from 0 to 1")
            return value
        if line.error is not None or "note" in line.eval:
            return 0.0
        known = ", ".join(found) or "none"
        raise JobError(f"line {line.id!r}: has no score {self.metric!r} (its `scores`: {known})")

    def find_cluster(self, line: RunLine) -> str | None:
        """Find the cluster of a line. None if the line is a cluster of its own, also where a pattern matches
        only the empty text, which it would in every id."""
        if self.cluster is None:
            found = line.eval.get("cluster")
            return None if found is None else str(found)
        if isinstance(self.cluster, str):
            return line.group
        match = self.cluster.search(line.id)
        return (match and match[min(1, self.cluster.groups)]) or None


class LineFacts(NamedTuple):
    """What is compared of one line of one run. `prompt`, and the `options` of its scoring, are None if the
    job file no longer has the line; `settings`: the fields of its body that are no prompt."""

    score: float | None
    group: str
    cluster: str | None
    prompt: bytes | None
    expected: bytes
    options: bytes | None
    settings: str
    failed: bool
    unscored: bool
    measure: ScoreMeasure | None
    sums: Mapping[str, float]

    def is_scored_unlike(self, other: LineFacts) -> bool:
        """Whether another run expects something else of the line, or scores it otherwise."""
        if self.expected != other.expected or _are_different(self.options, other.options):
            return True
        return self.measure != other.measure and not self.is_lost and not other.is_lost

    @property
    def is_lost(self) -> bool:
        """Whether the line has no score, so that its measure is not known."""
        return self.measure is None and (self.failed or self.unscored)


ReadFacts = Callable[[RunFolder, PairingRules], Iterable[tuple[str, LineFacts]]]


@dataclass(slots=True)
class PairedLine:
    """A line of both sides, with the sums of its scores over `epochs` runs of each side. `measure`: None for
    scores from 0 to 1; `sums`: of each side, what is added up over lines; `lost`: runs that have no score of
    the line."""

    id: str
    group: str
    cluster: str | None
    first: float = 0.0
    second: float = 0.0
    epochs: int = 0
    failed: int = 0  # of the second side
    failed_first: int = 0
    unscored: int = 0  # of either side
    measure: ScoreMeasure | None = None
    sums: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))
    lost: int = 0

    @property
    def scores(self) -> tuple[float, float]:
        """The mean score of each side."""
        return self.first / self.epochs, self.second / self.epochs

    @property
    def is_scored(self) -> bool:
        """Whether a run has a score of the line, and not only the 0 of what failed."""
        return self.lost < 2 * self.epochs or self.first > 0 or self.second > 0


@dataclass(slots=True)
class Mismatches:
    """Ids of lines that only one run has, or that differ between two runs."""

    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)

    def describe(self, first: str, second: str) -> Iterator[str]:
        """Yield a phrase for each kind of mismatch."""
        for ids, what in (
            (self.only_first, f"only in {first}"),
            (self.only_second, f"only in {second}"),
            (self.prompts, "with another prompt"),
            (self.expected, "with another expected answer or scorer"),
        ):
            if ids:
                more = ", ..." if len(ids) > _NAMED else ""
                yield f"{pluralize(len(ids), 'line')} {what} ({', '.join(map(repr, ids[:_NAMED]))}{more})"


@dataclass(slots=True)
class PairedLines:
    """The lines that two sides share, by id, and what was left out. `settings`: fields of bodies that differ,
    with the number of lines; `examples`: the values of one line for each. `unknown`: lines whose prompts
    could not be compared; `shared`: lines that are the same, with or without scores; `rated`: of each side,
    answers that a scorer or a judge could score, and failed lines; `read`: reads a run."""

    lines: dict[str, PairedLine] = field(default_factory=dict)
    mismatches: Mismatches = field(default_factory=Mismatches)
    unscored: int = 0
    unknown: int = 0
    shared: int = 0
    rated: tuple[int, int] = (0, 0)
    read: ReadFacts = field(default_factory=lambda: read_facts)
    settings: Counter[str] = field(default_factory=Counter)
    examples: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def add_runs(self, first: RunFolder, second: RunFolder, rules: PairingRules) -> None:
        """Add the lines of a pair of runs. JobError if they are not the same and `rules` do not allow it."""
        known = dict(self.read(first, rules))
        mismatches, same = Mismatches(), 0
        for custom_id, after in self.read(second, rules):
            before = known.pop(custom_id, None)
            if before is None:
                mismatches.only_second.append(custom_id)
            elif not rules.any_prompt and _are_different(before.prompt, after.prompt):
                mismatches.prompts.append(custom_id)
            elif before.is_scored_unlike(after):
                mismatches.expected.append(custom_id)
            else:
                same += 1
                self.shared += 1
                self._add(custom_id, before, after)
        mismatches.only_first.extend(known)
        found = list(mismatches.describe(str(first.paths.out), str(second.paths.out)))
        if found and not rules.common:
            raise JobError(_explain(found, first, second, same))
        for name in ("only_first", "only_second", "prompts", "expected"):
            getattr(self.mismatches, name).extend(getattr(mismatches, name))

    def _add(self, custom_id: str, before: LineFacts, after: LineFacts) -> None:
        if before.settings != after.settings:
            self._count_settings(before.settings, after.settings)
        self.unknown += before.prompt is None or after.prompt is None
        if before.score is None or after.score is None:
            self.unscored += 1
            return
        line = self.lines.setdefault(custom_id, PairedLine(custom_id, after.group, after.cluster))
        line.first += before.score
        line.second += after.score
        line.epochs += 1
        for own, each in zip(line.sums, (before.sums, after.sums), strict=True):
            own.update(each)
        line.measure = line.measure or before.measure or after.measure
        line.lost += before.is_lost + after.is_lost
        self.rated = self.rated[0] + (not before.unscored), self.rated[1] + (not after.unscored)
        line.failed += after.failed
        line.failed_first += before.failed
        line.unscored += before.unscored or after.unscored

    def _count_settings(self, before: str, after: str) -> None:
        old, new = json.loads(before), json.loads(after)
        for key in old | new:
            if old.get(key) != new.get(key):
                self.settings[key] += 1
                self.examples.setdefault(key, (old.get(key), new.get(key)))


def _are_different(before: bytes | None, after: bytes | None) -> bool:
    """Whether both are known, and differ."""
    return None not in (before, after) and before != after


def _explain(found: Sequence[str], first: RunFolder, second: RunFolder, same: int) -> str:
    unfinished = [f"{run.paths.out} is {run.state}" for run in (first, second) if run.state != DONE]
    hint = f" ({'; '.join(unfinished)})" if unfinished else ""
    same_lines = f"--common compares the {pluralize(same, 'line')} that are the same"
    runs = f"{first.paths.out} and {second.paths.out}"
    text = f"{runs} are not runs of the same lines: {'; '.join(found)}{hint}"
    return f"{text}; {same_lines if same else 'no line is the same'}"


def _read_score(run: RunFolder, rules: PairingRules, line: RunLine) -> float | None:
    try:
        return rules.read_score(line)
    except JobError as error:
        raise JobError(f"{run.paths.out}: {error}") from error


def read_facts(run: RunFolder, rules: PairingRules) -> Iterator[tuple[str, LineFacts]]:
    """Yield the id of each finished line, and what is compared of it."""
    keys = make_run_keys(run.manifest, "", run.paths.job.parent)
    for line in run.read_lines():
        prompt, options, settings = None, None, "{}"
        if isinstance(line.line, JobLine):
            body = line.line.body
            prompt_fields = {key: value for key, value in body.items() if key in PROMPT_FIELDS}
            # The key has the contents of the images that the prompt names.
            prompt = keys.compute_key(replace(line.line, body=prompt_fields))
            others = {key: value for key, value in body.items() if key not in PROMPT_FIELDS}
            settings = sys.intern(dump_canonical(others).decode())  # most lines have the same
        elif line.line is not None:
            prompt = b"a line that cannot be run"
        spec = line.line.eval if line.line is not None else None
        if spec is not None:
            options = digest_short(dump_canonical([spec.options, spec.after]))
        result = line.eval
        yield (
            line.id,
            LineFacts(
                score=_read_score(run, rules, line),
                group=line.group or "all",
                cluster=rules.find_cluster(line),
                prompt=prompt,
                expected=digest_short(dump_canonical([result.get("match"), result.get("expected")])),
                options=options,
                settings=settings,
                failed=line.error is not None,
                unscored="note" in result,
                measure=read_measure(result) if rules.metric is None else None,
                sums=result.get("sums") or {},
            ),
        )
