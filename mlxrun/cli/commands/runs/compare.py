"""`mlxrun compare`: compares the scores of two runs of the same lines, or of more."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxrun.cli.options import FiniteRange
from mlxrun.core.errors import JobError
from mlxrun.core.terminal import open_console, print_error, print_json, print_line

if TYPE_CHECKING:
    from mlxrun.evals.comparisons.comparison import ComparisonSet
    from mlxrun.evals.comparisons.comparison_conditions import FailCondition
    from mlxrun.evals.comparisons.pairing import PairingRules

EPILOG = """\b
Examples:
  mlxrun compare bf16.out.jsonl 4bit.out.jsonl              scores, difference, interval, flips
  mlxrun compare bf16.out.jsonl 4bit.out.jsonl --equivalent-within 2
  mlxrun compare bf16.out.jsonl 4bit.out.jsonl --show 5     with the answers of 5 flips each way
  mlxrun compare main.out pr.out --fail-if regression       two suites, cell by cell; for CI
  mlxrun compare suite.out/bf16 suite.out/4bit              two models of one suite
  mlxrun compare a.out.jsonl b.out.jsonl --fail-if "score < 80 %" --fail-if "worse > 10 in sums"
  mlxrun compare a.out.jsonl b.out.jsonl --power 1          how many lines show a difference of 1 point
  mlxrun compare a.out.jsonl b.out.jsonl c.out.jsonl        each with each, and a ranking
  mlxrun compare suite.out                                  the same of all models of a suite
  mlxrun compare --judged pairs.jsonl                       a ranking by pairs that were judged elsewhere

\b
Of two RUNS, FIRST is what SECOND is compared with. A difference is SECOND less FIRST, in points (percentage
points). With more, or with a suite of several models, p is adjusted by Holm's method for all pairs, and
--fail-if, --show, --equivalent-within and --power are not for them.
Lines are paired by id. Runs whose lines are not the same are refused with what differs; --common compares
those that are. Runs of a suite that differ in their seeds only are epochs: scores are averaged for each line.

\b
A condition of --fail-if is a value (score, difference, flips, better, worse, failed, unscored, p), one of
< <= > >= == != and a number (0.8, 80 % or -2 points), or one of
  regression   SECOND scores lower, and the difference is significant (p < 0.05)
  different    the difference is significant
  equivalent   the difference is shown to be within the margin of --equivalent-within
with or without `not` before it. It is about all lines, or about one group: "score < 0.8 in sums". Of
suites, it is about each cell, or about some: "score < 0.8 in greedy/sums", "regression in */sums:add".

\b
Exit codes: 0 compared; 1 a --fail-if holds; 2 runs that cannot be compared, or usage.
"""


@click.command(epilog=EPILOG)
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--equivalent-within",
    "margin",
    type=FiniteRange(0, min_open=True),
    metavar="POINTS",
    help="Test whether the scores differ by less than so many points, or so much in their unit.",
)
@click.option(
    "--fail-if",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="Exit with 1 if it holds; see below. May be given several times.",
)
@click.option(
    "--show",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Show N lines that are better, and N that are worse, with prompt and answers.",
)
@click.option(
    "--power",
    type=FiniteRange(0, min_open=True),
    metavar="POINTS",
    help="Say how many lines show a difference of so many points (or so much in their unit), and what "
    "difference these lines show.",
)
@click.option(
    "--judged",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Rank models by a JSONL file of judged pairs (first, second, winner, id), without RUNS.",
)
@click.option("--common", is_flag=True, help="Compare the lines and runs that both sides have, unchanged.")
@click.option("--any-prompt", is_flag=True, help="Prompts may differ, as for two prompt templates.")
@click.option(
    "--cluster",
    metavar="WHAT",
    help="Lines that depend on each other: `group`, or a pattern whose (first group of the) match in the ids "
    "they share, such as '(.+)-epoch'. Default: `eval.cluster` of the lines.",
)
@click.option(
    "--metric", metavar="NAME", help="Compare this one of the `scores` of the lines, such as pass@4."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the bootstrap.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, allow_dash=True, dir_okay=False),
    metavar="FILE",
    help="Write every number and all flips as JSON; - prints it instead of the table.",
)
def command(
    runs: tuple[Path, ...],
    conditions: tuple[str, ...],
    margin: float | None,
    seed: int,
    judged: Path | None,
    **options: Any,
) -> int:
    """Compare the scores of RUNS of the same lines: FIRST and SECOND, or more.

    Each of RUNS is a job file, its output, its run folder, a suite's folder or a part of it.
    """
    given = {"--fail-if": conditions, "--equivalent-within": margin, "--show": options["show"]}
    given |= {"--power": options["power"]}
    if judged is not None:
        _refuse({"RUNS": runs, **given}, "--judged")
        return _rank_judged(judged, options["json_path"])
    if not runs:
        raise click.UsageError("Missing argument 'RUNS...'.")
    parsed = _parse_conditions(conditions, margin)
    rules = _make_rules(options)
    if len(runs) != 2:
        _refuse(given, "a comparison of each run with each")
        return _rank_runs(runs, rules, seed, options["json_path"])
    from mlxrun.evals.comparisons.comparison import add_power, compare_paths

    found = compare_paths(*runs, rules=rules, margin=margin, seed=seed)
    if options["power"] is not None:
        comparisons = [add_power(each, options["power"]) for each in found.comparisons]
        found = replace(found, comparisons=comparisons)
    reasons = [reason for each in parsed for reason in each.find_reasons(found.comparisons)]
    _print_result(found, options["show"], options["json_path"], reasons)
    if options["power"] is not None and any(each.total.power is None for each in found.comparisons):
        print_error(
            "mlxrun: --power is not known: differences of quantiles, of a single line, and of numbers that "
            "differ alike on every line have no standard error"
        )
    for reason in reasons:
        print_error(f"mlxrun: --fail-if {reason}")
    return 1 if reasons else 0


def _refuse(given: Mapping[str, object], what: str) -> None:
    """UsageError for an argument that would have no effect."""
    for name, value in given.items():
        if value:
            raise click.UsageError(f"{name} has no effect with {what}")


def _rank_runs(runs: Sequence[Path], rules: PairingRules, seed: int, json_path: Path | None) -> int:
    from mlxrun.evals.comparisons.comparison_table import PIPED_WIDTH
    from mlxrun.evals.comparisons.ranking import list_models_without_runs, open_sides, rank_sides
    from mlxrun.evals.comparisons.ranking_table import print_ranking

    sides = open_sides(runs)
    rankings, left_out = rank_sides(sides, rules, seed)
    absent = list_models_without_runs(runs[0], sides) if len(runs) == 1 else []
    content = {"rankings": [each.describe() for each in rankings], "left_out": left_out, "absent": absent}
    if _write_json({"format": 1, **content}, json_path):
        return 0
    console = open_console(width=PIPED_WIDTH)
    for ranking in rankings:
        print_ranking(ranking, console)
    if left_out:
        print_line(f"left out, as not all sides have them: {', '.join(left_out)}")
    if absent:
        print_line(f"left out, as no cell of them has begun: {', '.join(absent)}")
    return 0


def _rank_judged(path: Path, json_path: Path | None) -> int:
    from mlxrun.evals.bradley_terry import fit_strengths, read_judged_pairs
    from mlxrun.evals.comparisons.comparison_table import PIPED_WIDTH
    from mlxrun.evals.comparisons.ranking_table import print_strengths

    try:
        strengths = fit_strengths(read_judged_pairs(path))
    except ValueError as error:
        raise JobError(f"{path}: {error}") from error
    if not _write_json({"format": 1, "strengths": [asdict(each) for each in strengths]}, json_path):
        print_strengths(strengths, open_console(width=PIPED_WIDTH))
    return 0


def _parse_conditions(texts: Sequence[str], margin: float | None) -> list[FailCondition]:
    from mlxrun.evals.comparisons.comparison_conditions import parse_condition

    try:
        parsed = [parse_condition(text) for text in texts]
    except ValueError as error:
        raise click.UsageError(f"--fail-if {error}") from error
    for condition in parsed:
        if condition.needs_margin and margin is None:
            raise click.UsageError(f"--fail-if {condition.text!r} needs --equivalent-within")
    return parsed


def _make_rules(options: dict[str, Any]) -> PairingRules:
    from mlxrun.evals.comparisons.pairing import PairingRules

    cluster: str | re.Pattern[str] | None = options["cluster"]
    if isinstance(cluster, str) and cluster != "group":
        try:
            cluster = re.compile(cluster)
        except re.error as error:
            raise click.UsageError(f"--cluster {cluster!r} is not a regular expression: {error}") from error
    return PairingRules(options["common"], options["any_prompt"], cluster, options["metric"])


def _print_result(found: ComparisonSet, show: int, json_path: Path | None, reasons: Sequence[str]) -> None:
    from mlxrun.evals.comparisons.comparison_table import (
        PIPED_WIDTH,
        print_comparison,
        print_summary,
        read_flip_texts,
    )

    answers = [read_flip_texts(each, show) for each in found.comparisons]
    if _write_json(found.describe() | {"failed_conditions": list(reasons)}, json_path):
        return
    console = open_console(width=PIPED_WIDTH)
    for at, (comparison, texts) in enumerate(zip(found.comparisons, answers, strict=True)):
        if at:
            console.print()
        print_comparison(comparison, texts, console)
    if len(found.comparisons) > 1:
        console.print()
        print_summary(found.comparisons, console)
    if found.left_out:
        print_line(f"left out, as only one side has them: {', '.join(found.left_out)}")
    if found.unscored:
        print_line(f"left out, as no line has a score on either side: {', '.join(found.unscored)}")


def _write_json(content: Mapping[str, Any], path: Path | None) -> bool:
    """Write a comparison as JSON, if that is wanted. Return whether it is printed in place of the table."""
    if path is None:
        return False
    if str(path) == "-":
        print_json(content, indent=1)
        return True
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise JobError(f"{path}: cannot be written: {error.strerror or error}") from error
    return False
