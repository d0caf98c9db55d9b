"""Which pages hold the tokens of which row: pure bookkeeping, for all layers with the same window.

Pages are numbered from 1; dummy rows write to page 0. A row's pages are in the order of its tokens. Pages
before its window are freed once no step can read them. Rows whose prompts begin alike share pages if there is
no window. Nothing is ever written to shared pages.

Shared pages have the same key: a digest of all content up to the page's end, as keys and values depend on all
of it. Image content counts, as in the prefix cache. If a page ends inside an image, the whole image counts.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlxrun.core.request import Request, build_content_ids, has_known_content, round_down
from mlxrun.model.kernels.kernel_source import PAGE

SLACK = 64  # tokens before a window that are kept, so that a row may give back its newest tokens
FEWEST_COLUMNS = 4  # of a table, whose number of columns is a power of two: their shape changes rarely


@dataclass(slots=True)
class _RowPages:
    """`first`: index in the row of the first of `pages`; `keys`: of those that further rows may share, which
    come before all others. `limit`: the most tokens for which the pages stay as they are."""

    first: int
    pages: list[int] = field(default_factory=list)
    keys: Sequence[bytes] = ()
    limit: int = 0


class PageTable:
    """The pages of all rows. `window`: tokens that these layers attend to; None: all."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.capacity = 1  # pages that exist, page 0 included
        self._free: list[int] = []
        self._rows: dict[str, _RowPages] = {}
        self._shared: dict[bytes, int] = {}  # pages that further rows may share, by their keys
        self._holders: Counter[int] = Counter()  # rows of each of these pages
        # Tokens of rows in pages that another row has too; those of one row of each page do not count.
        self.shared_tokens = 0

    @property
    def used(self) -> int:
        """Pages in use, page 0 included."""
        return self.capacity - len(self._free)

    def count_missing(self, rows: Sequence[tuple[int, Sequence[bytes]]]) -> int:
        """How many pages must be added before new rows fit. `rows`: as in count_needed."""
        return max(self.count_needed(rows) - len(self._free), 0)

    def count_needed(self, rows: Sequence[tuple[int, Sequence[bytes]]]) -> int:
        """How many pages new rows need. `rows`: the tokens and page keys of each."""
        needed = sum(self._find_last(n) - self._find_first(n) + 1 for n, _ in rows)
        if self.window is None:
            keys = [key for _, keys in rows for key in keys]
            needed -= len(keys) - len(set(keys).difference(self._shared))
        return needed

    def add_capacity(self, pages: int) -> None:
        """Note that this many pages were added to the pools."""
        for page in range(self.capacity, self.capacity + pages):
            heapq.heappush(self._free, page)
        self.capacity += pages

    def add_row(self, rid: str, length: int, keys: Sequence[bytes] = ()) -> int:
        """Take pages for the tokens of a row that are within its window. `keys`: of its first pages. Returns
        how many of its tokens are in pages shared with earlier rows."""
        first = self._find_first(length)
        shared = [] if self.window is not None else [self._shared.get(key) for key in keys]
        known = [page for page in shared if page is not None]  # the first ones: keys name all tokens before
        own = [heapq.heappop(self._free) for _ in range(first + len(known), self._find_last(length) + 1)]
        self._rows[rid] = row = _RowPages(first, known + own, keys if self.window is None else ())
        row.limit = self._find_limit(row)
        self._shared |= zip(row.keys, row.pages, strict=False)
        self._holders.update(row.pages[: len(row.keys)])
        self.shared_tokens += len(known) * PAGE
        return len(known) * PAGE

    def remove_row(self, rid: str) -> None:
        """Free a row's pages, except for those that other rows share."""
        row = self._rows.pop(rid)
        for page, key in itertools.zip_longest(row.pages, row.keys):
            self._holders[page] -= 1
            if self._holders[page] <= 0:
                del self._holders[page]
                self._shared.pop(key, None)
                heapq.heappush(self._free, page)
            else:
                self.shared_tokens -= PAGE

    def find_outgrown(self, lengths: Mapping[str, int]) -> dict[str, int]:
        """Of these rows and their next lengths, those whose pages must change."""
        rows = self._rows
        return {rid: n for rid, n in lengths.items() if n > rows[rid].limit}

    def count_missing_for_step(self, lengths: Mapping[str, int]) -> int:
        """How many pages must be added before rows can have these lengths."""
        needed = sum(
            max(self._find_last(n) - row.first - len(row.pages) + 1, 0)
            for rid, n in lengths.items()
            for row in [self._rows[rid]]
        )
        return max(needed - len(self._free), 0)

    def extend_row(self, rid: str, length: int) -> None:
        """Give a row the pages for `length` tokens, and free those before its window."""
        row = self._rows[rid]
        missing = self._find_last(length) - row.first - len(row.pages) + 1
        for _ in range(missing):
            row.pages.append(heapq.heappop(self._free))
        passed = self._find_first(length) - row.first
        for _ in range(passed):
            heapq.heappush(self._free, row.pages.pop(0))
            row.first += 1
        row.limit = self._find_limit(row)

    def list_slots(self, rid: str, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Where a row's tokens [start, stop) are in the pools."""
        row = self._rows[rid]
        pages = np.array(row.pages, dtype=np.int32)[:, None] * PAGE
        slots = (pages + np.arange(PAGE, dtype=np.int32)).reshape(-1).astype(np.int32)
        return slots[start - row.first * PAGE : stop - row.first * PAGE]

    def list_columns(self, rids: Sequence[str]) -> list[list[int]]:
        """The pages of these rows, page i in column i % columns. All rows have equally many columns."""
        most = max((len(self._rows[rid].pages) for rid in rids), default=1)
        columns = max(1 << (most - 1).bit_length(), FEWEST_COLUMNS)
        tables = []
        for rid in rids:
            row = self._rows[rid]
            table = [0] * columns
            for index, page in enumerate(row.pages, row.first):
                table[index % columns] = page
            tables.append(table)
        return tables

    def compact(self) -> list[int]:
        """Renumber the pages in use from 1. Returns their old numbers, page 0's first."""
        old = [0, *dict.fromkeys(page for row in self._rows.values() for page in row.pages)]
        new = {page: number for number, page in enumerate(old)}
        for row in self._rows.values():
            row.pages = [new[page] for page in row.pages]
        self._shared = {key: new[page] for key, page in self._shared.items()}
        self._holders = Counter({new[page]: count for page, count in self._holders.items()})
        self.capacity, self._free = len(old), []
        return old

    def _find_limit(self, row: _RowPages) -> int:
        """The most tokens for which a row neither lacks a page nor has one before its window."""
        filled = (row.first + len(row.pages)) * PAGE
        if self.window is None:
            return filled
        return min(filled, (row.first + 1) * PAGE + self.window + SLACK - 1)

    def _find_first(self, length: int) -> int:
        """Index of the first page that a row of so many tokens needs."""
        return 0 if self.window is None else max(length - self.window - SLACK, 0) // PAGE

    def _find_last(self, length: int) -> int:
        """Index of the page of its newest token."""
        return max(length - 1, 0) // PAGE


def compute_page_keys(request: Request, adapter: int, grid: int = 1) -> tuple[bytes, ...]:
    """The keys of the full pages of a prompt that is computed with the adapter of this number. Empty if
    tokens were left out, or if the content of images is unknown.

    `grid`: only tokens up to a multiple of it count, before the newest one and not inside an image. The other
    tokens may have other bytes in each row. A key covers where the page's last chunk ends: at a multiple of
    `grid`, or before an image.
    """
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
