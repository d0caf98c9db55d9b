"""Scorers of tasks of the box, each as lm-evaluation-harness or lmms-eval scores the same task."""

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


def score_docvqa(answer: str, expected: list[str]) -> Json:
    """Score the similarity with the nearest of the expected answers, and 0 below a half (ANLS)."""
    given, *others = (" ".join(text.lower().split()) for text in (answer, *expected))
    found = max(_compare_texts(given, each) for each in others)
    return {"score": found if found >= 0.5 else 0.0, "extracted": answer.strip()}


def _compare_texts(one: str, other: str) -> float:
    """1 less the edit distance of two texts, as a part of the longer one."""
    before = list(range(len(other) + 1))
    for at, letter in enumerate(one, 1):
        row = [at]
        for to, wanted in enumerate(other, 1):
            row.append(min(before[to] + 1, row[-1] + 1, before[to - 1] + (letter != wanted)))
        before = row
    return 1 - before[-1] / max(len(one), len(other), 1)
