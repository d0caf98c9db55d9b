"""Names for the pages of a prompt: two rows whose pages have the same name may share one.

A page's name is a digest of all content up to its end, as its keys and values depend on all of it. What an
image shows is content, as in the prefix cache; of an image that a page ends in, all of it is.
"""

from __future__ import annotations

import hashlib

from mlxrun.core.content_ids import build_content_ids, has_known_content, round_down
from mlxrun.core.request import Request
from mlxrun.model.kv.paged.kernel_source import PAGE


def compute_page_keys(request: Request, adapter: int, grid: int = 1) -> tuple[bytes, ...]:
    """The names of the full pages of a prompt, which an adapter of this number computes; none where tokens
    were left out, or the content of images is not known. `grid`: only tokens up to a multiple of it, before
    the newest one and not inside an image, count; the rest may have other bytes in each row. A name covers
    where the page's last chunk ends: at a multiple of it, or before an image."""
    if request.positions or not has_known_content(request):
        return ()
    prompt, spans = request.prompt, request.image_spans
    count = round_down(max(len(prompt) - 1, 0), spans, grid) // PAGE
    digest = hashlib.blake2b(adapter.to_bytes(4, "little"), digest_size=16)
    ids = build_content_ids(prompt, spans, request.image_digests)
    keys = []
    for stop in range(PAGE, count * PAGE + 1, PAGE):
        chunk_stop = round_down(-(-stop // grid) * grid, spans)
        digest.update(ids[stop - PAGE : stop].tobytes() + chunk_stop.to_bytes(8, "little"))
        keys.append(digest.copy().digest())
    return tuple(keys)
