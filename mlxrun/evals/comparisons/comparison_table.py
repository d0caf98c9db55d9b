"""Prints a comparison: a table of scores by group, then tests, flips and other differences."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mlxrun.evals.comparisons.compared_group import ComparedGroup
from mlxrun.evals.comparisons.comparison import Comparison, Flip
from mlxrun.evals.power import ComparisonPower
from mlxrun.evals.prompt_messages import dump_text, list_messages
from mlxrun.evals.run_folders.run_folder import DONE, RunFolder
from mlxrun.evals.run_folders.run_line import RunLine
from mlxrun.jobs.run.progress import pluralize
from mlxrun.jobs.scoring.intervals import ConfidenceInterval

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


PIPED_WIDTH = 150  # where the output is no terminal
_LISTED = 20  # ids of flips
_SHOWN_TEXT = 500  # characters of a prompt or an answer
# Texts of one line: `prompt` is its last message, None if the job file no longer has the line; `first` and
# `second` are the answers (of the first pair of runs, where there are several), or why the line failed.
FlipTexts = Mapping[str, str | None]


def print_comparison(comparison: Comparison, answers: Mapping[str, FlipTexts], console: Console) -> None:
    """Print one comparison. `answers`: the texts of the flips that are shown with texts, by id."""
    for line in _describe_sides(comparison):
        console.print(line, soft_wrap=True)
    groups = [*comparison.groups, comparison.total]
    console.print(_build_table("group", [(group.name, group) for group in groups]))
    if comparison.groups:
        console.print("p of a group is adjusted for the number of groups; intervals are not", soft_wrap=True)
    for line in _describe_tests(comparison.total):
        console.print(line, soft_wrap=True)
    for which, flips in (("better", comparison.better), ("worse", comparison.worse)):
        _print_flips(console, which, flips, answers)
    for line in _describe_rest(comparison):
        console.print(line, soft_wrap=True)
    console.print(f"Result: {_describe_result(comparison.total)}", soft_wrap=True)


def _describe_sides(comparison: Comparison) -> Iterator[str]:
    if comparison.cell.name:
        yield f"== {comparison.cell.name}"
    for which, side in zip(("first ", "second"), zip(*comparison.cell.runs, strict=True), strict=True):
        yield f"{which}: {describe_runs(side)}"
    if comparison.epochs > 1:
        yield f"{comparison.epochs} runs of each side; the score of a line is the mean of its runs"


def describe_runs(runs: Sequence[RunFolder]) -> str:
    """List the outputs of runs, with the state of those that are not done."""
    return ", ".join(f"{run.paths.out}{'' if run.state == DONE else f' ({run.state})'}" for run in runs)


def print_summary(comparisons: Sequence[Comparison], console: Console) -> None:
    """Print the totals of several cells as one table."""
    console.print(_build_table("cell", [(each.cell.name, each.total) for each in comparisons]))


def make_table(heads: Sequence[str], left: int = 0) -> Table:
    """Make a table of numbers with words in the column `left`."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for at, head in enumerate(heads):
        table.add_column(head, justify="left" if at == left else "right", no_wrap=at != left)
    return table


def _build_table(what: str, rows: Sequence[tuple[str, ComparedGroup]]) -> Table:
    names = [what, "lines", "first [95 %]", "second [95 %]", "difference [95 %]", "better", "worse", "p"]
    if rows[0][1].equivalence is not None:
        names.append("equivalent")
    table = make_table(names)
    for name, group in rows:
        result = group.result
        mark = " *" if group.is_significant else ""
        cells = [
            f"{result.lines:,}",
            _format_side(group, result.first, group.first),
            _format_side(group, result.second, group.second),
            format_difference(group),
            str(group.better),
            str(group.worse),
            f"{format_p(group.adjusted_p)}{mark}",
        ]
        if group.equivalence is not None:
            cells.append("yes" if group.equivalence.is_shown else "not shown")
        style = "bold" if name == "total" and len(rows) > 1 else ""
        table.add_row(name, *cells, style=style)
    return table


def _format_side(group: ComparedGroup, score: float, interval: ConfidenceInterval | None) -> str:
    return group.measure.format(score, None if interval is None else interval.bounds)


def format_difference(group: ComparedGroup) -> str:
    """Format the difference with its interval, in points or in the scores' unit: `+5.9 [+0.4, +11.3]`."""
    result = group.result
    number = group.measure.format_number(result.difference, result.first, "+")
    return f"{number} {_format_bounds(group, result.interval)}"


def _format_bounds(group: ComparedGroup, bounds: tuple[float, float]) -> str:
    return group.measure.format_bounds(bounds, group.result.first, "+")


def format_p(p: float) -> str:
    """Format a p value with two digits: `.036`, `<.001`; empty for NaN."""
    if math.isnan(p):
        return ""
    return "<.001" if p < 0.001 else f"{p:.2g}".removeprefix("0")


def describe_p(p: float) -> str:
    """Format a p value as `p = .036` or `p < .001`."""
    text = format_p(p)
    return f"p < {text[1:]}" if text.startswith("<") else f"p = {text}"


def _describe_tests(group: ComparedGroup) -> Iterator[str]:
    result, found = group.result, group.result.mcnemar
    if found is not None:
        p = f"{describe_p(found.mid)} (mid-p; exact {format_p(found.exact)})"
        yield f"McNemar's test: {found.better} better, {found.worse} worse, {p}"
    units = "clusters" if result.units < result.lines else "lines"
    points = group.measure.points
    interval = f"95 % interval {_format_bounds(group, result.t_interval)} {points}".rstrip()
    test = "paired t test" if group.measure.quantile is None else "paired bootstrap"
    yield f"{test} over {result.units:,} {units}: {describe_p(result.t_p)}, {interval}"
    if group.adjusted_p != result.p:
        yield f"p of the total is adjusted for the number of cells; alone it is {format_p(result.p)}"
    if group.equivalence is not None:
        interval = f"90 % interval {_format_bounds(group, group.equivalence.interval)} {points}".rstrip()
        yield f"equivalence {_describe_margin(group)}: {describe_p(group.equivalence.p)}, {interval}"
    if group.power is not None:
        yield _describe_power(group, group.power)


def _print_flips(
    console: Console, which: str, flips: Sequence[Flip], answers: Mapping[str, FlipTexts]
) -> None:
    if not flips:
        return
    names = ", ".join(flip.id for flip in flips[:_LISTED])
    more = f", ... ({len(flips) - _LISTED} more in --json)" if len(flips) > _LISTED else ""
    console.print(f"{pluralize(len(flips), 'line')} {which}: {names}{more}", soft_wrap=True)
    for flip in flips:
        if flip.id in answers:
            console.print(f"  {flip.id}: {flip.first:.4g} -> {flip.second:.4g}", soft_wrap=True)
            _print_texts(console, answers[flip.id])


def _print_texts(console: Console, found: FlipTexts) -> None:
    for name, text in found.items():
        if text is not None:
            short = text if len(text) <= _SHOWN_TEXT else text[:_SHOWN_TEXT] + " ..."
            lines = textwrap.indent(short, " " * 15).replace(" " * 15, f"    {name + ':':<11}", 1)
            for line in lines.split("\n"):
                console.print(line, soft_wrap=True)


def describe_lines(
    comparison: Comparison,
    first: str = "the first run",
    second: str = "the second run",
    either: str = "a run",
) -> Iterator[str]:
    """Yield a sentence for each kind of line that failed, has no score or is left out. `first`, `second`,
    `either`: names of the sides."""
    for failed, side in ((comparison.total.failed_first, first), (comparison.total.failed, second)):
        if failed:
            yield f"{pluralize(failed, 'line')} failed in {side}, and scored 0"
    if comparison.total.unscored:
        count = pluralize(comparison.total.unscored, "line")
        yield f"{count} could not be scored in {either}, and scored 0 there (`note` in its output says why)"
    if comparison.lost:
        count = pluralize(comparison.lost, "line")
        yield f"{count} failed or could not be scored in {either}, and not compared, as scores have a unit"
    if comparison.unscored:
        yield f"{pluralize(comparison.unscored, 'line')} without a score, not compared"
    if comparison.unclustered:
        count = pluralize(comparison.unclustered, "line")
        yield f"warning: --cluster gives {count} no cluster; each is one of its own"
    left_out = [*comparison.left_out.describe(first, second)]
    if left_out:
        yield f"left out: {'; '.join(left_out)}"
    if comparison.unknown:
        count = pluralize(comparison.unknown, "line")
        yield f"warning: the prompts of {count} were not compared, as a job file has changed since its run"


def _describe_rest(comparison: Comparison) -> Iterator[str]:
    yield from describe_lines(comparison)
    if comparison.differences:
        yield "What else differs:"
        yield from (f"  {each}" for each in comparison.differences)
    else:
        yield "Nothing else differs: model, settings, versions and device are the same."


def _describe_result(group: ComparedGroup) -> str:
    result = group.result
    text = "the scores are the same"
    if result.difference:
        way = "higher" if result.difference > 0 else "lower"
        size = group.measure.format_number(abs(result.difference), result.first)
        text = f"the second run scores {size} {group.measure.points}".rstrip() + f" {way}"
        text += "" if group.measure.is_share else f" ({'better' if group.gain > 0 else 'worse'})"
        text += "; significant" if group.is_significant else "; not significant"
    if group.equivalence is None:
        return f"{text} ({describe_p(group.adjusted_p)})."
    margin = _describe_margin(group)
    if group.equivalence.is_shown:
        return f"{text}, and equivalent {margin}."
    return f"{text}; equivalence {margin} is not shown."


def _describe_power(group: ComparedGroup, power: ComparisonPower) -> str:
    measure, result, points = group.measure, group.result, f" {group.measure.points}".rstrip()
    smallest = measure.format_number(power.smallest, power.smallest if points.strip() else result.first)
    wanted = f"{power.difference * (100 if measure.is_share else 1):g}{points}"
    needed = "no number of lines shows" if power.lines is None else f"{power.lines:,} lines show"
    return (
        f"power of 80 %: {result.lines:,} lines show a difference of {smallest}{points} or more; "
        f"{needed} one of {wanted}"
    )


def _describe_margin(group: ComparedGroup) -> str:
    assert group.equivalence is not None
    size = group.equivalence.margin * (100 if group.measure.is_share else 1)
    return f"within {size:g} {group.measure.points}".rstrip()


def read_flip_texts(comparison: Comparison, most: int) -> dict[str, FlipTexts]:
    """Read the texts of the first `most` better lines and the first `most` worse lines, by id. The runs are
    read once more, so that a comparison keeps no texts."""
    ids = {flip.id for flips in (comparison.better, comparison.worse) for flip in flips[:most]}
    if not ids:
        return {}
    first, second = (
        {line.id: line for line in run.read_lines() if line.id in ids} for run in comparison.cell.runs[0]
    )
    return {each: _collect_texts(first[each], second[each]) for each in first if each in second}


def _collect_texts(first: RunLine, second: RunLine) -> FlipTexts:
    messages = list_messages(second.body)
    return {
        "prompt": messages[-1].text if messages else None,
        "expected": dump_text(second.eval.get("expected")),
        "first": _describe_answer(first),
        "second": _describe_answer(second),
    }


def _describe_answer(line: RunLine) -> str:
    if line.error is not None:
        return f"(failed: {line.error})"
    return line.answer or f"(empty; finish: {line.finish})"
