"""The scorers of the tasks of the box, each as lm-evaluation-harness scores the same task."""

from __future__ import annotations

import re
from typing import Any

Json = dict[str, Any]
_STRICT = re.compile(r"The answer is (\-?[0-9\.\,]+).")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")


def score_gsm8k(answer: str, expected: str) -> Json:
    """Score the number behind `The answer is` (strict-match), and the last number (flexible-extract)."""
    strict = _STRICT.search(answer)
    last = ([next(filter(None, found)).strip() for found in _FLEXIBLE.findall(answer)] or [None])[-1]
    found = {"strict-match": strict and strict[1], "flexible-extract": last}
    scores = {name: float(_strip_number(text) == _strip_number(expected)) for name, text in found.items()}
    return {"score": scores["strict-match"], "scores": scores, "extracted": found["strict-match"]}


def _strip_number(text: str | None) -> str | None:
    """The text of a number without what does not count in it."""
    for pattern in _IGNORED:
        text = re.sub(pattern, "", text) if text is not None else None
    return text and text.lower()
