"""Finds which runs of two sides belong together: two single runs, or the cells of two suites by name.

Runs that differ in their seed only are epochs of the same lines, and are compared together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxrun.core.errors import JobError
from mlxrun.evals.run_folders.run_folder import RunFolder

_NAMED = 5  # cells in an error


@dataclass(frozen=True, slots=True)
class CellPair:
    """What is compared as one: the runs of both sides that differ in nothing but their seeds. `name`: of the
    cell without its seed, empty for two single runs."""

    name: str
    runs: tuple[tuple[RunFolder, RunFolder], ...]


def match_cells(
    first: Sequence[RunFolder], second: Sequence[RunFolder], *, common: bool
) -> tuple[list[CellPair], list[str]]:
    """The pairs, and the names of runs that only one side has. These are a JobError without `common`.

    Sides with one model each may have different models: their names are then compared without it.
    """
    if len(first) == len(second) == 1:
        return [CellPair("", ((first[0], second[0]),))], []
    sides = [{run.name: run for run in side} for side in (first, second)]
    if not sides[0].keys() & sides[1].keys() and all(len(_list_models(side)) == 1 for side in sides):
        sides = [{name.partition("/")[2]: run for name, run in side.items()} for side in sides]
    shared = [name for name in sides[0] if name in sides[1]]
    alone = [[name for name in side if name not in shared] for side in sides]
    if not shared:
        names = " and ".join(str(list(side)[:_NAMED]) for side in sides)
        raise JobError(f"the two sides have no run of the same name: {names}")
    if any(alone) and not common:
        found = " and ".join(
            f"only the {which} side has {', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''}"
            for which, names in zip(("first", "second"), alone, strict=True)
            if names
        )
        raise JobError(f"the two sides do not have the same runs: {found}; --common compares the others")
    cells: dict[str, list[tuple[RunFolder, RunFolder]]] = {}
    for name in shared:
        cells.setdefault(remove_seed(name), []).append((sides[0][name], sides[1][name]))
    return [CellPair(name, tuple(runs)) for name, runs in cells.items()], alone[0] + alone[1]


def remove_seed(name: str) -> str:
    """The name of a cell without its seed: `m/t/seed-1,temperature-0.5` is `m/t/temperature-0.5`."""
    folder, slash, variant = name.rpartition("/")
    rest = ",".join(part for part in variant.split(",") if not part.startswith("seed-"))
    return f"{folder}{slash}{rest}" if rest else folder


def _list_models(runs: dict[str, RunFolder]) -> set[str]:
    """The first parts of names; those of names with one part are no models."""
    return {name.partition("/")[0] if "/" in name else f"{name}/" for name in runs}
