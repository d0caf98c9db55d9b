"""mlx-lm's LRUPromptCache over its BatchGenerator, driven as mlx-lm's server drives them. Imports mlx_lm.

As in the server (mlx_lm/server.py, `_tokenize` and `_generate`): the prompt is split after the system part,
its longest cached prefix is fetched, the rest is inserted in segments, and the row's cache is stored at the
end of each segment but the last token, and once more when the answer ends. At most 10 caches are stored, its
default.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import mlxrun.model  # noqa: F401  OpenBLAS goes before mlx

# isort: split
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.utils import load_model

from benchmarks.prefix_cache.measurement import SideAnswer
from benchmarks.prefix_cache.workloads import PromptCase
from mlxrun.cli.bench.engine.mlx_lm_contender import SETTINGS

KEY = "bench"  # the server's key of a model
CACHES = 10


class MlxLmSide:
    """mlx-lm's server without HTTP; without `reuse` it has no prompt cache."""

    def __init__(self, model: Any, reuse: bool = True) -> None:
        self._generator = BatchGenerator(model, **SETTINGS)
        self._reuse = reuse
        self.clear_cache()

    @classmethod
    def open(cls, folder: Path, reuse: bool = True) -> MlxLmSide:
        """Load the folder's weights as they are."""
        return cls(load_model(folder)[0], reuse)

    def clear_cache(self) -> None:
        """A new cache."""
        self._store = LRUPromptCache(CACHES)

    def serve(self, case: PromptCase) -> SideAnswer:
        """Fetch, insert, and call `next` until the answer has ended."""
        prompt = list(case.prompt)
        start, first = time.perf_counter(), None
        cache, rest = self._store.fetch_nearest_cache(KEY, prompt) if self._reuse else (None, prompt)
        cached = len(prompt) - len(rest)
        segments, types = split_segments(case, cached)
        (uid,) = self._generator.insert_segments(
            segments=[segments], max_tokens=[case.output], caches=[cache], all_tokens=[prompt[:cached]]
        )
        del cache
        tokens: list[int] = []
        done = False
        while not done:
            progress, responses = self._generator.next()
            self._store_segment(progress, uid, types)
            for r in responses:
                first = first or time.perf_counter()
                tokens.append(r.token)
                if r.finish_reason is not None:
                    self._insert(r.all_tokens[:], r.prompt_cache, "assistant")
                    done = True
        assert first is not None
        return SideAnswer(tuple(tokens), first - start, cached, cache_bytes=self._store.nbytes)

    def _store_segment(self, progress: Any, uid: int, types: list[str]) -> None:
        if types and any(r.end_of_segment and not r.end_of_prompt for r in progress):
            cache, tokens = self._generator.extract_cache([uid])[uid]
            self._insert(tokens[:], cache, types.pop(0))

    def _insert(self, tokens: list[int], cache: Any, kind: str) -> None:
        if self._reuse:
            self._store.insert_cache(KEY, tokens, cache, cache_type=kind)

    def close(self) -> None:
        """Release the generator and the model."""
        self._generator.close()
        del self._generator, self._store


def split_segments(case: PromptCase, cached: int) -> tuple[list[list[int]], list[str]]:
    """The prompt's segments past what is cached, and what the server calls them."""
    prompt, system = list(case.prompt), case.cache_positions[0]
    parts = [(0, system, "system"), (system, len(prompt), "user")]
    left = [(max(start, cached), stop, kind) for start, stop, kind in parts if stop > cached]
    return [prompt[start:stop] for start, stop, _ in left], [kind for _, _, kind in left]
