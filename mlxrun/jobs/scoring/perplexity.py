"""Perplexity: how well a model predicts a text, by the logprobs of its tokens.

The line is a completion with `prompt_windows`, whose response has the logprob of every token of the text.
Words and bytes are counted as lm-evaluation-harness counts them. A group's figures are those of all its texts
together, not means over texts:

    bits per byte     - sum of logprobs / ln 2 / bytes of UTF-8     comparable between tokenizers
    word, byte, token perplexity    exp(- sum of logprobs / their number)

Lower is better. A line's `score` is its bits per byte.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from mlxrun.jobs.scoring.measure import LOWER, ScoreMeasure
from mlxrun.jobs.scoring.verdict import Verdict

PERPLEXITY = "perplexity"  # the match
WINDOWS = "prompt_windows"  # the field of the body that it needs
BITS_PER_BYTE = ScoreMeasure("bits/byte", LOWER, "bits / bytes")
_SPACE = re.compile(r"\s+")
_DIGITS = 10


def check_perplexity(body: Mapping[str, Any]) -> None:
    """Raise ValueError if a line's body does not give the logprobs of a whole text."""
    if WINDOWS not in body:
        raise ValueError(f"eval.match {PERPLEXITY} needs a completion with `{WINDOWS}`")


def score_perplexity(response: Mapping[str, Any], text: str) -> Verdict:
    """Score the response of a line with this text."""
    values = (response["choices"][0].get("logprobs") or {}).get("token_logprobs")
    if not values:
        return Verdict(0, note="the response has no logprobs")
    bits, size = -math.fsum(values) / math.log(2), len(text.encode())
    counts = {"tokens": len(values), "words": len(_SPACE.split(text)), "bytes": size}
    return Verdict(bits / size, sums={"bits": bits, **counts}, measure=BITS_PER_BYTE)


def describe_perplexities(sums: Mapping[str, float]) -> dict[str, Any]:
    """Describe the sums of several texts as scores.json has them."""
    nats = sums["bits"] * math.log(2)
    counts = {"word": sums["words"], "byte": sums["bytes"], "token": sums["tokens"]}
    return {
        **{f"{name}_perplexity": _raise(nats / count) for name, count in counts.items()},
        **{f"{name}s": round(count) for name, count in counts.items()},
    }


def _raise(exponent: float) -> float | None:
    """e to this power; None for one that no float holds."""
    return round(math.exp(exponent), _DIGITS) if exponent < 700 else None
