"""Names for the pages of a prompt: two rows whose pages have the same name may share one.

A page's name is a digest of all tokens up to its end, as its keys and values depend on all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from mlxrun.model.paged.kernel_source import PAGE


def compute_page_keys(tokens: Sequence[int], adapter: int, grid: int = 1) -> tuple[bytes, ...]:
    """The names of the full pages of a prompt, which an adapter of this number computes. `grid`: only tokens
    up to the last multiple of it count, before the newest one; the rest may have other bytes in each row."""
    count = max(len(tokens) - 1, 0) // grid * grid // PAGE
    digest = hashlib.blake2b(adapter.to_bytes(4, "little"), digest_size=16)
    data = np.array(tokens[: count * PAGE], dtype=np.int32).tobytes()
    size = 4 * PAGE
    keys = []
    for page in range(count):
        digest.update(data[page * size : (page + 1) * size])
        keys.append(digest.copy().digest())
    return tuple(keys)
