"""Prints rankings: the sides of a cell in order, and the matrix of their differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from mlxrun.evals.bradley_terry import Strength
from mlxrun.evals.comparisons.comparison_table import describe_lines, describe_runs, format_p, make_table
from mlxrun.evals.comparisons.ranking import CellRanking, RankedSide
from mlxrun.evals.run_folders.run_folder import DONE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_ranking(ranking: CellRanking, console: Console) -> None:
    """Print the ranking of a cell, then the difference of each pair: the side of the row less the other."""
    if ranking.cell:
        console.print(f"== {ranking.cell}")
    lines = {pair.comparison.total.result.lines for pair in ranking.pairs}
    heads = ["rank", "run", "score [95 %]", "ranks", "lines won", "strength [95 %]"]
    table = make_table(heads, left=1)
    for at, side in enumerate(ranking.sides, 1):
        table.add_row(*_make_row(at, side, ranking))
    console.print(table)
    console.print(_build_matrix(ranking))
    points = ranking.measure.points or "their unit"
    count = " to ".join(f"{each:,}" for each in sorted({min(lines), max(lines)}))
    text = f"difference of the row less the column, in {points}, over {count} lines; * p < 0.05, by Holm"
    console.print(text, soft_wrap=True)
    for line in _describe_rest(ranking):
        console.print(line, soft_wrap=True)


def _describe_rest(ranking: CellRanking) -> Iterator[str]:
    if ranking.why is not None:
        yield f"strengths: {ranking.why}"
    for name, runs in ranking.list_runs().items():
        if any(run.state != DONE for run in runs):
            yield f"{name}: {describe_runs(runs)}"
    pairs = [(each.first, each.second, each.comparison) for each in ranking.pairs]
    lines = (describe_lines(found, a, b, f"{a} or {b}") for a, b, found in pairs)
    yield from dict.fromkeys(chain.from_iterable(lines))  # a side is in several pairs


def print_strengths(strengths: Sequence[Strength], console: Console) -> None:
    """Print the strengths of judged pairs."""
    table = make_table(["rank", "model", "strength [95 %]", "won", "pairs"], left=1)
    for at, each in enumerate(strengths, 1):
        table.add_row(
            str(at), each.name, format_strength(each), f"{100 * each.wins:.1f} %", f"{each.pairs:,}"
        )
    console.print(table)


def format_strength(strength: Strength) -> str:
    """Format an Elo rating with its interval: `+35 [+10, +60]`."""
    return f"{strength.rating:+.0f} [{strength.low:+.0f}, {strength.high:+.0f}]"


def _make_row(rank: int, side: RankedSide, ranking: CellRanking) -> list[str]:
    interval = None if side.interval is None else side.interval.bounds
    ranks = str(side.best) if side.best == side.worst else f"{side.best} to {side.worst}"
    strength = side.strength
    return [
        str(rank),
        side.name,
        ranking.measure.format(side.score, interval),
        ranks,
        "" if strength is None else f"{100 * strength.wins:.1f} %",
        "" if strength is None else format_strength(strength),
    ]


def _build_matrix(ranking: CellRanking) -> Table:
    names = [side.name for side in ranking.sides]
    table = make_table(["", *names])
    known = {(pair.first, pair.second): pair for pair in ranking.pairs}
    for name in names:
        cells = []
        for other in names:
            pair = known.get((other, name)) or known.get((name, other))
            if pair is None:
                cells.append("")
                continue
            result = pair.comparison.total.result
            difference = result.difference if pair.second == name else 0.0 - result.difference
            number = ranking.measure.format_number(difference, result.first, "+")
            cells.append(f"{number} (p {format_p(pair.p)}){' *' if pair.is_significant else ''}")
        table.add_row(name, *cells)
    return table
