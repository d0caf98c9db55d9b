"""Bits per byte and perplexities of texts, against their definitions; and lines that are measured so."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from scipy import stats

from mlxrun.jobs.scoring.eval_spec import EvalReader, check_line_eval, parse_eval
from mlxrun.jobs.scoring.measure import MeasuredLines
from mlxrun.jobs.scoring.perplexity import BITS_PER_BYTE, describe_perplexities, score_perplexity
from mlxrun.jobs.scoring.score_groups import Scores, format_score
from tests.helpers.batch_fakes import Bench, read, write_job

TEXT = "The river\n runs past: \u00e4."


def respond(*logprobs: float) -> dict[str, Any]:
    return {"choices": [{"text": TEXT, "logprobs": {"token_logprobs": list(logprobs)}}]}


def measure(custom_id: str, text: str, **more: Any) -> dict[str, Any]:
    """A job line."""
    body = {"prompt": text, "prompt_windows": {"size": 8, "stride": 4}, "echo": True, "logprobs": 0}
    return {"id": custom_id, **body, "max_tokens": 0, "eval": {"match": "perplexity", **more}}


def test_a_text_is_measured_as_the_harness_does() -> None:
    """Words are what white space separates, bytes those of UTF-8, and logprobs natural."""
    found = score_perplexity(respond(-1.0, -2.5, -0.25), TEXT)
    assert found.sums == {"bits": pytest.approx(3.75 / math.log(2)), "tokens": 3, "words": 5, "bytes": 25}
    assert found.score == pytest.approx(3.75 / math.log(2) / 25) and found.measure == BITS_PER_BYTE
    assert score_perplexity({"choices": [{"text": "x"}]}, "x").note == "the response has no logprobs"


def add_up(*texts: tuple[float, int], cluster: str | None = None) -> MeasuredLines:
    """Texts by their bits and bytes."""
    found = MeasuredLines(BITS_PER_BYTE)
    for bits, size in texts:
        found.add(bits / size, {"bits": bits, "tokens": 4, "words": 2, "bytes": size}, cluster)
    return found


def test_figures_are_those_of_all_texts_together() -> None:
    """The mean over texts would be another one: short texts would count as long ones."""
    lines = add_up((80.0, 10), (100.0, 90))
    assert lines.value == 1.8 != (8 + 100 / 90) / 2
    found = describe_perplexities(lines.add_up())
    assert found["byte_perplexity"] == pytest.approx(2**1.8)
    assert found["word_perplexity"] == pytest.approx(2 ** (180 / 4))
    assert found["token_perplexity"] == pytest.approx(2 ** (180 / 8))
    assert (found["words"], found["bytes"], found["tokens"]) == (4, 100, 8)


def test_texts_of_one_length_have_the_interval_of_a_mean() -> None:
    bits = [30.0, 42.0, 35.0, 38.0]
    lines = add_up(*((each, 10) for each in bits))
    ratios = [each / 10 for each in bits]
    wanted = stats.t.interval(0.95, 3, sum(ratios) / 4, stdev(ratios) / 2)
    found = lines.compute_interval()
    assert found is not None and found.bounds == pytest.approx(wanted)
    text = BITS_PER_BYTE.format(lines.value, found.bounds)
    assert text == f"3.625 bits/byte [{wanted[0]:.3f}, {wanted[1]:.3f}]"
    assert add_up((10.0, 10)).compute_interval() is None


def test_an_impossible_text_has_no_number_that_is_no_json() -> None:
    found = describe_perplexities({"bits": 1e6, "tokens": 1, "words": 1, "bytes": 10_000})
    assert found["word_perplexity"] is None and found["byte_perplexity"] == pytest.approx(2**100)


def test_a_line_needs_windows_and_expects_nothing() -> None:
    spec = parse_eval({"match": "perplexity", "group": "a"}, {})
    assert spec.expected is None
    with pytest.raises(ValueError, match="perplexity needs a completion with `prompt_windows`"):
        check_line_eval(spec, "/v1/completions", {"prompt": "x", "echo": True})
    kept = EvalReader(changes={"match": "exact"}).read({"match": "perplexity"})
    assert kept is not None and kept.match == "perplexity"


async def test_a_job_measures_texts(tmp_path: Path) -> None:
    """From the tokens of the engine to the table; a failed line is counted, and has no sums."""
    lines = [measure(f"t{at}", f"Text number {at}, which has windows.") for at in range(3)]
    bench = Bench(write_job(tmp_path, [*lines, measure("long", "x", cluster="c") | {"max_tokens": 9}]))
    outcome = await bench.run()
    assert (outcome.done, outcome.failed) == (3, 1)
    records = read(bench.paths.out)
    for record in records:
        values = record["response"]["body"]["choices"][0]["logprobs"]["token_logprobs"]
        sums = record["eval"]["sums"]
        assert sums["bits"] == pytest.approx(-sum(values) / math.log(2)) and sums["bytes"] == 33
        assert len(values) == sums["tokens"] > 8  # a window's
    total = outcome.scores.compute_total()
    sums = total.measured[BITS_PER_BYTE].add_up()
    assert sums["bytes"] == 99 and total.failed == 1 and total.value == pytest.approx(sums["bits"] / 99)
    assert format_score(total).split(" [")[0] == f"{total.value:.2f} bits/byte"
    again = Scores()
    for record in records:
        again.add(record)
    assert again.compute_total().describe()["perplexity"] == describe_perplexities(sums)
    assert again.compute_total().value == total.value
