"""mlxrun's Engine with its prefix cache as a side of `python -m benchmarks prefix-cache`, stepped on this
thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.prefix_cache.measurement import SideAnswer
from benchmarks.prefix_cache.workloads import PromptCase
from mlxrun.config.settings import Config
from mlxrun.core.errors import MlxrunError
from mlxrun.core.request import HitKind, Request, SamplingParams

Calls = Callable[[], int]


class MlxrunSide:
    """Greedy requests without stop ids, one at a time."""

    def __init__(self, engine: Any, tower: Calls | None = None) -> None:
        """`tower`: how often the model's vision tower was called so far."""
        self._engine = engine
        self._tower = tower
        self._count = 0

    @classmethod
    def open(cls, config: Config, count: bool = False) -> MlxrunSide:
        """Load the model that the config names; `count`: count its vision tower's calls."""
        from benchmarks.prefix_cache.image import count_calls
        from mlxrun.engine.build import build_engine

        engine: Any = build_engine(config)
        return cls(engine, count_calls(engine.generation.runner._caller.model) if count else None)

    @property
    def model_info(self) -> Any:
        """The model without its weights."""
        return self._engine.model_info

    def serve(self, case: PromptCase) -> SideAnswer:
        """Serve one request alone, and step until its snapshots are stored too."""
        self._count += 1
        request = _make_request(case, f"bench-{self._count}")
        before = self._tower() if self._tower else None
        start, first = time.perf_counter(), None
        self._engine.add(request)
        tokens: list[int] = []
        cached, kind = 0, None
        while self._engine.busy:
            for event in self._engine.step():
                if event.error is not None:
                    raise event.error
                if event.tokens and first is None:
                    first = time.perf_counter()
                tokens += event.tokens
                cached, kind = max(cached, event.num_cached_tokens), event.hit_kind or kind
        if first is None or len(tokens) != case.output:
            raise MlxrunError(f"bench: {len(tokens)} tokens instead of {case.output}: the run is not counted")
        tower = None if self._tower is None or before is None else self._tower() - before
        return SideAnswer(
            tuple(tokens), first - start, cached, _name_hit(kind), self._count_cache_bytes(), tower
        )

    def _count_cache_bytes(self) -> int:
        return int(self._engine.prefix_cache.read_counters().get("memory_bytes", 0))

    def clear_cache(self) -> None:
        """Evict everything from memory."""
        self._engine.prefix_cache.shrink(0)

    def close(self) -> None:
        """Release the engine; its own close() would end this thread's MLX streams."""
        self._engine.prefix_cache.shutdown()
        del self._engine, self._tower


def _make_request(case: PromptCase, name: str) -> Request:
    params = SamplingParams(max_tokens=case.output)
    if case.request is not None:
        return replace(case.request, id=name, params=params)
    return Request(name, case.prompt, params, cache_positions=case.cache_positions)


def _name_hit(kind: HitKind | None) -> str | None:
    return None if kind is None else str(kind)
