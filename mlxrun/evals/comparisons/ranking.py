"""Compares more than two runs, or the models of a suite: each with each, and a ranking.

Every pair is compared as two runs are. Its p value is adjusted by Holm for all pairs of all cells. The ranks
that a run may have follow from the pairs that differ. It is behind all that are significantly better, and
before all that are significantly worse. Besides, the runs have Bradley-Terry strengths by the lines on which
one of two scores better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from mlxrun.core.errors import JobError
from mlxrun.evals.bradley_terry import JudgedPair, Strength, fit_strengths
from mlxrun.evals.comparisons.comparison import ANY_SAME_LINE, Comparison, compare_cell, keep_scored
from mlxrun.evals.comparisons.pairing import CellPair, LineFacts, PairingRules, match_cells, read_facts
from mlxrun.evals.run_folders.run_folder import DONE, RunFolder, open_runs
from mlxrun.evals.run_folders.run_folder_paths import find_cell, find_suite, list_cell_outputs
from mlxrun.evals.statistics import adjust_by_holm
from mlxrun.jobs.scoring.intervals import ALPHA, ConfidenceInterval
from mlxrun.jobs.scoring.measure import HIGHER, ScoreMeasure, describe_measure


@dataclass(frozen=True, slots=True)
class ComparedSide:
    """One of the compared runs or models, with its runs."""

    name: str
    runs: Sequence[RunFolder]


@dataclass(frozen=True, slots=True)
class ComparedPair:
    """Two sides by their names. `p`: adjusted by Holm."""

    first: str
    second: str
    comparison: Comparison
    p: float

    @property
    def is_significant(self) -> bool:
        return self.p < ALPHA

    def find_winner(self) -> str | None:
        """Find the side that is significantly better."""
        if not self.is_significant:
            return None
        return self.second if self.comparison.total.gain > 0 else self.first


@dataclass(frozen=True, slots=True)
class RankedSide:
    """A side in a ranking. `best`, `worst`: the ranks that it may have, from 1; `strength`: None if the lines
    give none."""

    name: str
    score: float
    interval: ConfidenceInterval | None
    best: int
    worst: int
    strength: Strength | None


@dataclass(frozen=True, slots=True)
class CellRanking:
    """The ranking of one cell, the best side first, and all pairs. `cell`: empty for single runs; `why`: why
    there are no strengths."""

    cell: str
    measure: ScoreMeasure
    sides: list[RankedSide]
    pairs: list[ComparedPair]
    why: str | None

    def list_runs(self) -> dict[str, tuple[RunFolder, ...]]:
        """List the runs of each side, by its name."""
        found: dict[str, tuple[RunFolder, ...]] = {}
        for pair in self.pairs:
            first, second = zip(*pair.comparison.cell.runs, strict=True)
            found |= {pair.first: first, pair.second: second}
        return found

    def describe(self) -> dict[str, Any]:
        """Describe the ranking as JSON."""
        runs = [run for side in self.list_runs().values() for run in side]
        pairs = [{"p_holm": pair.p, **pair.comparison.total.describe()} for pair in self.pairs]
        for pair, described in zip(self.pairs, pairs, strict=True):
            described["first"]["name"], described["second"]["name"] = pair.first, pair.second
        measure = None if self.measure.is_share else describe_measure(self.measure)
        sides = [asdict(side) for side in self.sides]
        return {
            "cell": self.cell,
            "measure": measure,
            "ranking": sides,
            "pairs": pairs,
            "no_strengths": self.why,
            "unfinished": [str(run.paths.out) for run in runs if run.state != DONE],
        }


def open_sides(paths: Sequence[Path]) -> list[ComparedSide]:
    """Open the sides that paths name: one for each path, or for one path the models of a suite. JobError if
    there are fewer than two."""
    if len(paths) > 1:
        names = [path.name.removesuffix(".jsonl").removesuffix(".out") for path in paths]
        names = names if len(set(names)) == len(paths) else [str(path) for path in paths]
        if len(set(names)) < len(paths):
            raise JobError(f"{', '.join(names)}: one of these is given twice")
        return [ComparedSide(name, open_runs(path)) for name, path in zip(names, paths, strict=True)]
    models: dict[str, list[RunFolder]] = {}
    for run in open_runs(paths[0]):
        cell = find_cell(run.paths.out)
        models.setdefault("" if cell is None else cell[1], []).append(run)
    if len(models) < 2:
        of_one = (
            f"has runs of one model only, {next(iter(models))}"
            if any(models)
            else "is no suite of several models"
        )
        raise JobError(f"{paths[0]}: {of_one}; give another run to compare it with")
    return [ComparedSide(name, runs) for name, runs in models.items()]


def list_models_without_runs(path: Path, sides: Sequence[ComparedSide]) -> list[str]:
    """List the models of the suite that `path` names which are none of `sides`, as no cell of them has
    begun. Empty if it names no suite."""
    folder = find_suite(path)
    if folder is None:
        return []
    models = [find_cell(out) for out in list_cell_outputs(folder)]
    names = dict.fromkeys(found[1] for found in models if found is not None)
    return [name for name in names if name not in {side.name for side in sides}]


def _match_sides(
    sides: Sequence[ComparedSide], common: bool
) -> tuple[dict[tuple[str, str], dict[str, CellPair]], list[str]]:
    """The cells of each pair of sides, by the names of both and of the cell; and the names of runs that a
    side of a pair lacks. JobError for such runs without `common`."""
    matched: dict[tuple[str, str], dict[str, CellPair]] = {}
    left_out: list[str] = []
    by_name = any(len(side.runs) > 1 for side in sides)
    for first, second in combinations(sides, 2):
        cells, unpaired = match_cells(first.runs, second.runs, common=common, by_name=by_name)
        matched[first.name, second.name] = {cell.name: cell for cell in cells}
        left_out += unpaired
    return matched, list(dict.fromkeys(left_out))


def rank_sides(
    sides: Sequence[ComparedSide], rules: PairingRules = ANY_SAME_LINE, seed: int = 0
) -> tuple[list[CellRanking], list[str]]:
    """Compare each side with each, in every cell that all of them have. The second result names the runs that
    a side lacks. JobError as for two runs."""
    known: dict[Path, list[tuple[str, LineFacts]]] = {}

    def read(run: RunFolder, rules: PairingRules) -> list[tuple[str, LineFacts]]:
        if run.paths.out not in known:
            known[run.paths.out] = list(read_facts(run, rules))
        return known[run.paths.out]

    matched, left_out = _match_sides(sides, rules.common)
    shared = [name for name in next(iter(matched.values())) if all(name in each for each in matched.values())]
    if not shared:
        raise JobError("the sides have no cell that all of them have")
    found = []
    for name in shared:
        for (before, after), by_name in matched.items():
            comparison = compare_cell(by_name[name], rules, None, seed, read)
            found.append((name, ComparedPair(before, after, comparison, comparison.total.result.p)))
    keep_scored([pair.comparison for _, pair in found])
    adjusted = adjust_by_holm([pair.p for _, pair in found])
    pairs = [(name, replace(pair, p=p)) for (name, pair), p in zip(found, adjusted, strict=True)]
    return [_rank_cell(cell, [pair for name, pair in pairs if name == cell]) for cell in shared], left_out


def _rank_cell(cell: str, pairs: list[ComparedPair]) -> CellRanking:
    total = pairs[0].comparison.total
    scores: dict[str, tuple[float, ConfidenceInterval | None]] = {}
    for pair in pairs:
        group = pair.comparison.total
        if group.measure != total.measure:
            units = {each.measure.points for each in (group, total)}
            raise JobError(f"{cell or 'the runs'}: scores have several units ({', '.join(sorted(units))})")
        scores.setdefault(pair.first, (group.result.first, group.first))
        scores.setdefault(pair.second, (group.result.second, group.second))
    strengths, why = {}, None
    try:
        strengths = {each.name: each for each in fit_strengths(list(_list_judged(pairs)))}
    except ValueError as error:
        why = str(error)
    winners = [(pair, pair.find_winner()) for pair in pairs]
    sides = []
    for name, (score, interval) in scores.items():
        own = [winner for pair, winner in winners if name in (pair.first, pair.second) and winner is not None]
        lost, won = sum(winner != name for winner in own), own.count(name)
        best, worst = 1 + lost, len(scores) - won
        sides.append(RankedSide(name, score, interval, best, worst, strengths.get(name)))
    sides.sort(key=lambda side: side.score, reverse=total.measure.better == HIGHER)
    return CellRanking(cell, total.measure, sides, pairs, why)


def _list_judged(pairs: Sequence[ComparedPair]) -> Iterator[JudgedPair]:
    """The lines of each pair, of which the side with the better score wins."""
    for pair in pairs:
        better = {flip.id for flip in pair.comparison.better}
        worse = {flip.id for flip in pair.comparison.worse}
        for custom_id, unit in pair.comparison.units.items():
            outcome = 0.0 if custom_id in better else 1.0 if custom_id in worse else 0.5
            yield JudgedPair(pair.first, pair.second, outcome, unit)
