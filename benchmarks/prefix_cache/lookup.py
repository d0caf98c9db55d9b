"""The `lookup` scenario: how long a lookup of 16k tokens takes in the prefix cache with few and many entries.

Payloads are fakes and nothing is computed: only the lookup is timed, including the keys of the prompt.
`found`: all of the prompt is there. `parted`: it begins like every other record and then leaves all of them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from mlxrun.config.settings import CacheSettings, Config
from mlxrun.core.request import Request, SamplingParams
from mlxrun.core.step_plan import SnapshotResult
from mlxrun.engine.prefix_cache.prefix_cache import PrefixCache

TOKENS, CHUNK = 16384, 2048
RECORDS = (10, 5000)
COMMON, OTHER = 100, 256  # tokens at the start of all other prompts, and of each of them in all
VOCAB = 150_000
TIMES = 101

Say = Callable[[str], None]


class FakeCodec:
    """Payloads of one byte."""

    def nbytes(self, payload: Any) -> int:
        return 1

    def encode(self, payload: Any) -> Any:
        raise NotImplementedError

    def decode(self, serialized: Any) -> Any:
        raise NotImplementedError

    def is_usable(self, payload: Any, tokens: int) -> bool:
        return True


def measure_lookup(config: Config, seed: int, say: Say, records: Sequence[int] = RECORDS) -> dict[str, Any]:
    """Median seconds of a search, by the number of records in the store."""
    rng = random.Random(f"lookup {seed}")
    known, common = _draw_tokens(rng, TOKENS), _draw_tokens(rng, COMMON)
    parted = common + _draw_tokens(rng, TOKENS - COMMON)
    rows = []
    for count in records:
        cache = _fill_cache(config.cache, known, common, count, rng)
        stored = cache.read_counters()["entries"]
        row: dict[str, Any] = {"records": stored}
        for name, prompt in (("found", known), ("parted", parted)):
            row[f"{name}_s"], row[f"{name}_tokens"] = _time_lookup(cache, prompt + _draw_tokens(rng, 1))
        say(f"lookup among {stored} entries: {row['found_s'] * 1e6:.0f} us")
        rows.append(row)
    return {"tokens": TOKENS, "chunk": CHUNK, "times": TIMES, "rows": rows}


def _draw_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(VOCAB), k=count))


def _fill_cache(
    settings: CacheSettings, known: tuple[int, ...], common: tuple[int, ...], count: int, rng: random.Random
) -> Any:
    """A cache with the whole known prompt, and other prompts of one record each up to `count` records."""
    cache: Any = PrefixCache(
        b"bench" * 4,
        CHUNK,
        deltas=True,
        states=False,
        codec=FakeCodec(),
        settings=settings,
        memory_bytes=1 << 40,
    )
    _add_prompt(cache, known)
    for _ in range(count - cache.read_counters()["entries"]):
        _add_prompt(cache, common + _draw_tokens(rng, OTHER - len(common)))
    return cache


def _add_prompt(cache: Any, tokens: tuple[int, ...]) -> None:
    """As the engine does for a prompt of these tokens and one more."""
    target = len(tokens)
    cache.track(_make_request("fill", (*tokens, 0)))
    cache.lookup("fill", (), target)
    for start in range(0, target, CHUNK):
        for save in cache.plan_snapshots("fill", start, min(start + CHUNK, target), target):
            cache.store_snapshot(SnapshotResult(save, object()))
    for save in cache.plan_final_snapshots("fill", (0,), target):
        cache.store_snapshot(SnapshotResult(save, object()))
    cache.forget("fill")


def _time_lookup(cache: Any, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Median seconds from a new request to its hit, and the hit's tokens."""
    times, length = [], 0
    for i in range(TIMES):
        request = _make_request(f"lookup-{i}", prompt)
        start = time.perf_counter()
        cache.track(request)
        hit = cache.lookup(request.id, (), len(prompt) - 1)
        times.append(time.perf_counter() - start)
        length = hit.length if hit else 0
        cache.forget(request.id)
    return statistics.median(times), length


def _make_request(name: str, prompt: tuple[int, ...]) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=1))
