"""Ids of content: equal ids mean equal content. The prefix cache and the pages of rows find by them what a
prompt shares with others.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from mlxrun.core.request import Request

IDS_PER_HASH = 8  # ids that one hash yields
MASK = (1 << 63) - 1


def compute_digest(*parts: bytes) -> bytes:
    """The digest of 16 bytes by which content is known."""
    return blake2b(b"".join(parts), digest_size=16).digest()


def has_known_content(request: Request) -> bool:
    """Whether its prompt has content ids: not that of images whose tokens are not known."""
    spans, digests = request.image_spans, request.image_digests
    return len(spans) == len(digests) and (request.media is None or len(spans) > 0)


def build_content_ids(
    tokens: Sequence[int], spans: Sequence[tuple[int, int]], digests: Sequence[bytes]
) -> array[int]:
    """Return the token ids, where an image's are replaced by negative numbers derived from its digest.

    ValueError if there is not one digest for each image: such a prompt matches nothing.
    """
    if len(spans) != len(digests):
        raise ValueError(f"{len(spans)} image spans, but {len(digests)} digests")
    ids = array("q", tokens)
    for (start, stop), image_digest in zip(spans, digests, strict=True):
        ids[start:stop] = _build_image_ids(image_digest, ids[start:stop])
    return ids


def _build_image_ids(image_digest: bytes, tokens: array[int]) -> array[int]:
    """Return one id for each token of the image; they depend on the tokens too, as the layout of an image may
    differ."""
    seed = compute_digest(compute_digest(image_digest), tokens.tobytes())
    blocks = range(-(-len(tokens) // IDS_PER_HASH))
    words = array("q")
    words.frombytes(b"".join(blake2b(seed + i.to_bytes(8, "little")).digest() for i in blocks))
    return array("q", [-1 - (word & MASK) for word in words[: len(tokens)]])


def round_down(length: int, spans: Sequence[tuple[int, int]], grid: int = 1) -> int:
    """Return the longest length up to this one that is a multiple of `grid` and does not end inside an
    image."""
    while True:
        length -= length % grid
        inside = [start for start, stop in spans if start < length < stop]
        if not inside:
            return length
        length = inside[0]
