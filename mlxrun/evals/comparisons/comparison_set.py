"""Compares two runs, or two suites cell by cell, and gives the comparisons of all cells."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlxrun.evals.comparisons.compared_group import ComparedGroup
from mlxrun.evals.comparisons.comparison import ANY_SAME_LINE, Comparison, compare_cell
from mlxrun.evals.comparisons.pairing import PairingRules, match_cells
from mlxrun.evals.power import describe_power
from mlxrun.evals.run_folders.run_folder import open_runs
from mlxrun.evals.statistics import adjust_p_values

FORMAT = 1


@dataclass(frozen=True, slots=True)
class ComparisonSet:
    """The comparisons of two sides, one for each cell. `left_out`: runs that only one side has."""

    comparisons: list[Comparison]
    left_out: list[str] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """Describe the comparisons as JSON."""
        cells = [comparison.describe() for comparison in self.comparisons]
        return {"format": FORMAT, "comparisons": cells, "left_out": self.left_out}


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
    found = [compare_cell(cell, rules, margin, seed) for cell in cells]
    adjusted = adjust_p_values([each.total.adjusted_p for each in found])
    return ComparisonSet(
        [
            replace(each, total=replace(each.total, adjusted_p=p))
            for each, p in zip(found, adjusted, strict=True)
        ],
        left_out,
    )


def add_power(comparison: Comparison, difference: float) -> Comparison:
    """Return a comparison with its power for a difference, in points or in the unit of the scores."""

    def add(group: ComparedGroup) -> ComparedGroup:
        wanted = difference / (100 if group.measure.is_share else 1)
        return replace(group, power=describe_power(group.result, wanted))

    groups = [add(group) for group in comparison.groups]
    return replace(comparison, total=add(comparison.total), groups=groups)
