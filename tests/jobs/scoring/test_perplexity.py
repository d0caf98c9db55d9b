"""Bits per byte and perplexities of texts, against their definitions; and lines that are measured so."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from scipy import stats

from mlxrun.jobs.scoring.eval_spec import EvalReader, check_line_eval, parse_eval
from mlxrun.jobs.scoring.perplexity import TextSums, format_text_sums, score_perplexity
from mlxrun.jobs.scoring.score_groups import Scores, format_share
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
    assert found.score == pytest.approx(math.exp(-3.75 / 25))
    assert score_perplexity({"choices": [{"text": "x"}]}, "x").note == "the response has no logprobs"


def test_figures_are_those_of_all_texts_together() -> None:
    """The mean over texts would be another one: short texts would count as long ones."""
    sums = TextSums()
    for bits, size in ((80.0, 10), (100.0, 90)):
        sums.add({"bits": bits, "tokens": 4, "words": 2, "bytes": size})
    found = sums.describe()
    assert found["bits_per_byte"] == 1.8 != (8 + 100 / 90) / 2
    assert found["byte_perplexity"] == pytest.approx(2**1.8)
    assert found["word_perplexity"] == pytest.approx(2 ** (180 / 4))
    assert found["token_perplexity"] == pytest.approx(2 ** (180 / 8))
    assert (found["words"], found["bytes"], found["tokens"], found["better"]) == (4, 100, 8, "lower")


def test_texts_of_one_length_have_the_interval_of_a_mean() -> None:
    sums, bits = TextSums(), [30.0, 42.0, 35.0, 38.0]
    for each in bits:
        sums.add({"bits": each, "tokens": 1, "words": 1, "bytes": 10})
    ratios = [each / 10 for each in bits]
    wanted = stats.t.interval(0.95, 3, sum(ratios) / 4, stdev(ratios) / 2)
    assert sums.compute_interval() == pytest.approx(wanted)
    assert format_text_sums(sums.describe()) == f"3.625 bits/byte [{wanted[0]:.3f}, {wanted[1]:.3f}]"


def test_clusters_are_what_is_sampled() -> None:
    """The twin: chapters of two books as so many texts would have a narrower interval."""
    alone, books, merged = TextSums(), TextSums(), TextSums()
    for at in range(20):
        part = {"bits": 10.0 + 5 * (at % 2), "tokens": 1, "words": 1, "bytes": 10}
        alone.add(part)
        books.add(part, at % 2)
        other = TextSums()
        other.add(part, at % 2)
        merged.merge(other)
    narrow, wide = alone.compute_interval(), books.compute_interval()
    assert narrow is not None and wide is not None
    assert narrow[1] - narrow[0] < 0.3 < wide[1] - wide[0]
    assert merged.compute_interval() == pytest.approx(wide)
    single = TextSums()
    single.add({"bits": 10.0, "tokens": 1, "words": 1, "bytes": 10}, "book")
    assert single.compute_interval() is None and format_text_sums(single.describe()) == "1.000 bits/byte"


def test_an_impossible_text_has_no_number_that_is_no_json() -> None:
    sums = TextSums()
    sums.add({"bits": 1e6, "tokens": 1, "words": 1, "bytes": 10_000})
    found = sums.describe()
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
    assert total.texts.bytes == 99 and total.failed == 1
    assert format_share(total).split(" [")[0] == f"{total.texts.bits / 99:.3f} bits/byte"
    again = Scores()
    for record in records:
        again.add(record)
    assert again.compute_total().texts.describe() == total.texts.describe()
