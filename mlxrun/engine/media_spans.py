"""Prompts whose images are not computed one by one: what is cached of them is found with all of them only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mlxrun.core.content_ids import compute_digest
from mlxrun.core.errors import RequestError
from mlxrun.core.request import Request


def join_media_spans(request: Request) -> Request:
    """The request with one span, from its first token to the end of its last image: no chunk ends inside, and
    nothing cached either. RequestError if it wants the logprobs of its prompt, which a span has none of."""
    if request.params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs are not supported for prompts with images of this model")
    spans, digests = request.image_spans, request.image_digests
    if not spans:  # where its images are is not known
        return replace(request, image_spans=((0, len(request.prompt)),), image_digests=())
    stop = spans[-1][1]
    content = np.array(request.prompt[:stop], np.int64).tobytes()
    digest = compute_digest(*digests, content)
    known = len(digests) == len(spans)
    return replace(request, image_spans=((0, stop),), image_digests=(digest,) if known else ())


def join_digests(request: Request) -> Request:
    """The request with digests that each cover all its images. Images that are encoded together round
    otherwise than each alone, so that the same bytes come of the same images only."""
    every = request.image_digests
    return replace(request, image_digests=tuple(compute_digest(own, *every) for own in every))
