"""Perplexity: how well a model predicts a text, by the logprobs of its tokens.

The line is a completion with `prompt_windows`, whose response has the logprob of every token of the text.
Words and bytes are counted as lm-evaluation-harness counts them. A group's figures are those of all its texts
together, not means over texts:

    bits per byte     - sum of logprobs / ln 2 / bytes of UTF-8     comparable between tokenizers
    word, byte, token perplexity    exp(- sum of logprobs / their number)

Lower is better. A line's `score` is from 0 to 1, and higher is better: the geometric mean of the probability
of a byte. That is 2 to the power of minus the bits per byte.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxrun.jobs.scoring.intervals import find_quantile
from mlxrun.jobs.scoring.verdict import Verdict

PERPLEXITY = "perplexity"  # the match
WINDOWS = "prompt_windows"  # the field of the body that it needs
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
    return Verdict(2 ** (-bits / size), sums={"bits": bits, **counts})


@dataclass(slots=True)
class TextSums:
    """The sums of several texts. `alone`: bits and bytes of each text; `clusters`: those of the texts that
    share one, together. They are what is sampled."""

    bits: float = 0.0
    tokens: int = 0
    words: int = 0
    bytes: int = 0
    alone: list[tuple[float, int]] = field(default_factory=list)
    clusters: dict[Hashable, tuple[float, int]] = field(default_factory=dict)

    def add(self, sums: Mapping[str, float], cluster: Hashable = None) -> None:
        """Add the sums of one text."""
        unit = float(sums["bits"]), int(sums["bytes"])
        own = TextSums(unit[0], int(sums["tokens"]), int(sums["words"]), unit[1])
        if cluster is None:
            own.alone.append(unit)
        else:
            own.clusters[cluster] = unit
        self.merge(own)

    def merge(self, other: TextSums) -> None:
        """Add all texts of other sums. Clusters of one name are one."""
        for name in ("bits", "tokens", "words", "bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.alone += other.alone
        for cluster, (bits, size) in other.clusters.items():
            known = self.clusters.get(cluster, (0.0, 0))
            self.clusters[cluster] = known[0] + bits, known[1] + size

    @property
    def bits_per_byte(self) -> float:
        return self.bits / self.bytes

    def compute_interval(self) -> tuple[float, float] | None:
        """Compute the 95 % interval of the bits per byte, a ratio of two sums over texts. It is Student's t
        with the standard error of the residuals. None for fewer than two texts."""
        units, ratio = [*self.alone, *self.clusters.values()], self.bits_per_byte
        count = len(units)
        if count < 2:
            return None
        squares = math.fsum((bits - ratio * size) ** 2 for bits, size in units)
        reach = find_quantile(count - 1) * math.sqrt(squares * count / (count - 1)) / self.bytes
        return max(0.0, ratio - reach), ratio + reach

    def describe(self) -> dict[str, Any]:
        """Describe the sums as scores.json has them."""
        interval, nats = self.compute_interval(), self.bits * math.log(2)
        counts = {"word": self.words, "byte": self.bytes, "token": self.tokens}
        return {
            "bits_per_byte": round(self.bits_per_byte, _DIGITS),
            "interval": None if interval is None else [round(bound, _DIGITS) for bound in interval],
            "better": "lower",
            **{f"{name}_perplexity": _raise(nats / count) for name, count in counts.items()},
            **{f"{name}s": count for name, count in counts.items()},
        }


def _raise(exponent: float) -> float | None:
    """e to this power; None for one that no float holds."""
    return round(math.exp(exponent), _DIGITS) if exponent < 700 else None


def format_text_sums(found: Mapping[str, Any]) -> str:
    """Format described sums: `1.234 bits/byte [1.201, 1.267]`."""
    interval = found["interval"]
    bounds = "" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]"
    return f"{found['bits_per_byte']:.3f} bits/byte{bounds}"
