"""Runs whose scores have a unit and a direction, compared in that unit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import JobError
from mlxrun.core.terminal import open_console
from mlxrun.evals.comparisons.comparison import Comparison, compare_paths
from mlxrun.evals.comparisons.comparison_conditions import parse_condition
from mlxrun.evals.comparisons.comparison_table import print_comparison
from mlxrun.evals.comparisons.pairing import PairingRules
from mlxrun.evals.comparisons.ranking import open_sides, rank_sides
from mlxrun.evals.reports.difference import describe_difference
from mlxrun.jobs.scoring import line_scores
from mlxrun.jobs.scoring.perplexity import BITS_PER_BYTE
from mlxrun.jobs.scoring.verdict import Verdict
from tests.helpers.eval_runs import run_lines

FIELDS = {"prompt_windows": {}, "echo": True, "logprobs": 0, "max_tokens": 0}
LINES = [
    {"id": f"t{at}", "prompt": f"Text {at}. " * (at + 1), **FIELDS, "eval": {"match": "perplexity"}}
    for at in range(12)
]
Bits = Callable[[int], float]


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs texts in a folder; `bits`: the bits of each byte of a text, by the number of its bytes."""

    async def run(name: str, bits: Bits, lines: list[Any] = LINES) -> Path:
        def score(response: Any, text: str) -> Verdict:
            size = len(text.encode())
            sums = {"bits": bits(size) * size, "tokens": 1, "words": 1, "bytes": size}
            return Verdict(bits(size), sums=sums, measure=BITS_PER_BYTE)

        monkeypatch.setattr(line_scores, "score_perplexity", score)
        return await run_lines(tmp_path / name, lines)

    return run


def show(found: Comparison, capsys: pytest.CaptureFixture[str]) -> str:
    print_comparison(found, {}, open_console(width=150))
    return capsys.readouterr().out


async def test_bits_per_byte_are_compared_directly(
    measure: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run's are lower, which is better."""
    first = await measure("a", lambda size: 2 + size / 1000)
    second = await measure("b", lambda size: 1.9 + size / 990)
    [found] = compare_paths(first, second, margin=0.2).comparisons
    sizes = [len(str(line["prompt"]).encode()) for line in LINES]
    wanted = sum(size * (1.9 + size / 990 - 2 - size / 1000) for size in sizes) / sum(sizes)
    total = found.total
    assert total.result.difference == pytest.approx(wanted) and total.gain == pytest.approx(-wanted)
    assert (total.better, total.worse, len(found.better), len(found.worse)) == (12, 0, 12, 0)
    assert total.is_significant and total.equivalence is not None and total.equivalence.is_shown
    text = show(found, capsys)
    assert "2.071 bits/byte [" in text and f"{wanted:+.3f} [" in text
    assert "scores 0.099 bits/byte lower (better); significant, and equivalent within 0.2 bits/byte." in text
    shown = json.loads(json.dumps(found.describe(), allow_nan=False))
    assert shown["total"]["measure"] == {"unit": "bits/byte", "better": "lower", "aggregate": "bits / bytes"}
    difference = describe_difference(first, second)
    assert "\u22120.099 bits/byte" in difference.sentence
    assert difference.rows[0].plot == "" and difference.rows[0].first == "2.071 bits/byte"


async def test_conditions_know_the_direction(measure: Callable[..., Any]) -> None:
    first = await measure("a", lambda size: 2.0)
    worse = await measure("b", lambda size: 2.1 + size / 9999)
    found = compare_paths(first, worse).comparisons
    [reason] = parse_condition("regression").find_reasons(found)
    assert reason.startswith("regression: the score changed by +0.10") and "bits/byte (p = " in reason
    assert not list(parse_condition("regression").find_reasons(compare_paths(worse, first).comparisons))
    assert list(parse_condition("score > 2.05").find_reasons(found))
    assert not list(parse_condition("difference > 0.2").find_reasons(found))
    with pytest.raises(JobError, match="score is in bits/byte, not in %"):
        list(parse_condition("score > 80 %").find_reasons(found))


async def test_a_line_that_failed_has_no_score_in_a_unit(
    measure: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """As 0 bits per byte it would be the best of all."""
    first = await measure("a", lambda size: 2.0)
    broken = [LINES[0] | {"max_tokens": 9}, *LINES[1:]]
    second = await measure("b", lambda size: 2.0, broken)
    [found] = compare_paths(first, second, rules=PairingRules(common=True)).comparisons
    assert (found.lost, found.total.result.lines, found.total.result.difference) == (1, 11, 0)
    assert "1 line failed or could not be scored in a run, and not compared" in show(found, capsys)


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_run_without_any_score_in_a_unit_is_not_compared(
    measure: Callable[..., Any], is_first: bool
) -> None:
    """With 0 bits per byte it would be better than any."""
    good = await measure("a", lambda size: 2.0)
    failed = await measure("b", lambda size: 2.0, [line | {"max_tokens": 9} for line in LINES])
    with pytest.raises(JobError, match=r"job.out.jsonl and .*: no line has a score in every run"):
        compare_paths(*((failed, good) if is_first else (good, failed)))
    with pytest.raises(JobError, match="no line has a score in every run"):
        rank_sides(open_sides([good.parent, failed.parent]))


async def test_no_line_with_a_score_is_nothing_to_compare(measure: Callable[..., Any]) -> None:
    """Which unit the scores would have is not known, so that they would be shares of 0."""
    jobs = [
        await measure(name, lambda size: 2.0, [line | {"max_tokens": 9} for line in LINES]) for name in "abc"
    ]
    with pytest.raises(JobError, match="nothing to compare: all lines of every run failed"):
        compare_paths(*jobs[:2])
    with pytest.raises(JobError, match="nothing to compare: all lines of every run failed"):
        rank_sides(open_sides([job.parent for job in jobs]))


async def test_a_unit_is_known_though_all_lines_with_it_failed_on_a_side(measure: Callable[..., Any]) -> None:
    plain = {"id": "p", "prompt": "Hello", "max_tokens": 4, "eval": {"expected": "x", "match": "contains"}}
    first = await measure("a", lambda size: 2.0, [*LINES, plain])
    second = await measure("b", lambda size: 2.0, [*(line | {"max_tokens": 9} for line in LINES), plain])
    with pytest.raises(JobError, match=r"its scores have several units \(bits/byte, points\)"):
        compare_paths(first, second)


async def test_one_text_has_an_interval_without_bounds(measure: Callable[..., Any]) -> None:
    first, second = [await measure(name, lambda size: 2.0, LINES[:1]) for name in "ab"]
    [found] = compare_paths(first, second).comparisons
    shown = json.loads(json.dumps(found.describe(), allow_nan=False))
    assert shown["total"]["interval"] == [None, None] and shown["total"]["p"] == 1


async def test_several_units_are_refused(measure: Callable[..., Any]) -> None:
    plain = {"id": "p", "prompt": "Hello", "max_tokens": 4, "eval": {"expected": "x", "match": "contains"}}
    job = await measure("a", lambda size: 2.0, [*LINES, plain])
    with pytest.raises(JobError, match=r"its scores have several units \(bits/byte, points\)"):
        compare_paths(job, job)
