"""Made-up logprobs of prompts."""

from __future__ import annotations

import random

from mlxrun.core.request import Request, TokenLogprob


def make_prompt_logprobs(request: Request) -> tuple[TokenLogprob | None, ...]:
    """Numbers that depend on the prompt up to each token alone; None inside images."""
    count, scores = request.params.prompt_logprobs, list[TokenLogprob | None]()
    if count is None:
        return ()
    for at in range(request.logprobs_from, len(request.prompt)):
        rng = random.Random(repr(request.prompt[:at]))
        top = [(97 + i, -0.5 - i - rng.random() / 2) for i in range(count)]
        own = -21 - random.Random(repr(request.prompt[: at + 1])).random()  # less likely than all of `top`
        own = next((value for token, value in top if token == request.prompt[at]), own)
        inside = any(start <= at < stop for start, stop in request.image_spans)
        scores.append(
            None if inside else TokenLogprob(own, tuple(top), 1 + sum(value > own for _, value in top))
        )
    return tuple(scores)
