"""Multiple choice by logprob: finds which continuation of a context is likeliest to the model.

The line is a completion of a list of prompts, each the context with one continuation, with `echo`, `logprobs`
and `max_tokens: 0`. Its response has the logprobs of the prompts' tokens. `acc` compares the sums of the
continuations' logprobs, as in lm-evaluation-harness. `acc_norm` compares the sums per character, without the
white space that all continuations begin with; `acc_bytes` the sums per byte of UTF-8. `mass` is the share of
the right continuations in the probability of all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrun.jobs.scoring.verdict import Verdict

NORMALIZATIONS = {"none": "acc", "chars": "acc_norm", "bytes": "acc_bytes", "mass": "mass"}


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """The sum of the logprobs (natural) of a continuation's tokens, and its length."""

    logprob: float
    chars: int
    bytes: int


def sum_continuations(
    choices: Sequence[Mapping[str, Any]], context_chars: int | Sequence[int]
) -> list[ContinuationScore]:
    """Sum the logprobs of each choice's tokens that end behind its context. `context_chars`: the characters
    of the context, one number for all or one for each. ValueError for a choice without logprobs."""
    starts = [context_chars] * len(choices) if isinstance(context_chars, int) else list(context_chars)
    if len(starts) != len(choices):
        raise ValueError(f"there are {len(choices)} choices, and eval.context_chars has {len(starts)}")
    pairs = list(zip(choices, starts, strict=True))
    common = os.path.commonprefix([choice["text"][start:] for choice, start in pairs])
    skipped = len(common) - len(common.lstrip())
    return [_sum_continuation(choice, start, skipped) for choice, start in pairs]


def _sum_continuation(choice: Mapping[str, Any], start: int, skipped: int) -> ContinuationScore:
    text, logprobs = choice["text"], choice.get("logprobs") or {}
    offsets, values = logprobs.get("text_offset") or [], logprobs.get("token_logprobs") or []
    if len(text) <= start or not offsets or len(offsets) != len(values):
        raise ValueError("a choice has no logprobs of a continuation")
    ends = [*offsets[1:], len(text)]
    # A token that begins in the context and ends behind it is a part of the continuation too.
    inside = [p for p, at, end in zip(values, offsets, ends, strict=True) if at >= start or end > start]
    if any(p is None for p in inside):
        raise ValueError("the first token has no logprob; the context must have at least one token")
    continuation = text[start + skipped :]
    return ContinuationScore(math.fsum(inside), len(continuation), len(continuation.encode()))


def score_likeliest(
    choices: Sequence[Mapping[str, Any]], expected: Any, options: Mapping[str, Any]
) -> Verdict:
    """Score a response. `expected`: the index of the right continuation, or a list of indices. Of equal
    continuations the first counts as the likeliest."""
    try:
        sums = sum_continuations(choices, options["context_chars"])
    except ValueError as error:
        return Verdict(0, note=str(error))
    lengths = {
        "acc": [1] * len(sums),
        "acc_norm": [each.chars or 1 for each in sums],
        "acc_bytes": [each.bytes or 1 for each in sums],
    }
    right = expected if isinstance(expected, list) else [expected]
    likeliest = {
        name: max(range(len(sums)), key=lambda at: sums[at].logprob / sizes[at])  # noqa: B023
        for name, sizes in lengths.items()
    }
    scores = {name: float(at in right) for name, at in likeliest.items()}
    if isinstance(expected, list):
        best = max(each.logprob for each in sums)
        shares = [math.exp(each.logprob - best) for each in sums]
        scores["mass"] = math.fsum(shares[at] for at in set(right)) / math.fsum(shares)
    primary = NORMALIZATIONS[options.get("normalize", "none")]
    return Verdict(scores[primary], likeliest.get(primary, likeliest["acc"]), scores=scores)


def check_likeliest(expected: Any, options: Mapping[str, Any], url: str, body: Mapping[str, Any]) -> None:
    """Raise ValueError with the field if a line's body does not give the logprobs of its continuations."""
    prompts = body.get("prompt")
    if url != "/v1/completions" or not isinstance(prompts, list) or len(prompts) < 2:
        raise ValueError("eval.match likeliest needs a completion whose prompt is a list of continuations")
    has_logprobs = type(body.get("logprobs")) is int
    if body.get("echo") is not True or body.get("max_tokens") != 0 or not has_logprobs:
        raise ValueError("eval.match likeliest needs `echo: true, logprobs: 1, max_tokens: 0`")
    if body.get("n", 1) != 1:
        raise ValueError("eval.match likeliest needs `n: 1`")
    right = expected if isinstance(expected, list) else [expected]
    if options.get("normalize") == "mass" and not isinstance(expected, list):
        raise ValueError("eval.normalize mass needs a list of right continuations as `expected`")
    if not all(0 <= index < len(prompts) for index in right):
        raise ValueError(f"eval.expected must be below {len(prompts)}, the number of continuations")
    starts = options["context_chars"]
    if isinstance(starts, list) and len(starts) != len(prompts):
        raise ValueError(f"eval.context_chars has {len(starts)} numbers for {len(prompts)} prompts")
    for at, prompt in enumerate(prompts):
        start = starts[at] if isinstance(starts, list) else starts
        if isinstance(prompt, str) and len(prompt) <= start:
            raise ValueError(f"eval.context_chars is {start}, but prompt[{at}] has {len(prompt)} characters")
