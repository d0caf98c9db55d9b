"""A pinned prefix gives the cold answer, after everything else was evicted: with every kind of cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.engine.engine import Engine
from mlxrun.engine.prefix_cache.entry import CacheEntry
from tests.helpers import engine_driver, text_models
from tests.helpers.model_fixtures import Zoo, mark_sweep
from tests.parity.test_prefix_cache import BASE, BOUNDARY, COUNT, OTHER, ask, once

pytestmark = pytest.mark.usefixtures("probed_once")

FAMILIES = mark_sweep(text_models.TEXT, ("llama", "gemma3_text", "qwen3_next"))


def pin(engine: Engine, cut: int) -> None:
    """Compute the first `cut` tokens of BASE, and pin them, as the server does."""
    request = engine_driver.make_text_request("warm", BASE[: cut + 1], max_tokens=0)
    once(engine, request)
    while engine.busy:
        engine.step()
    pinned = engine.prefix_cache.pin_prefix(request, cut, "agent")
    assert pinned is not None and pinned.tokens == cut and pinned.nbytes > 0


def check_pinned(zoo: Zoo, family: str, make: Callable[[Path], Engine]) -> None:
    """Two questions behind the prefix, each after all that may go has gone."""
    engine = make(zoo.text(family))
    for cut in (BOUNDARY, 48):
        pin(engine, cut)
        for number in range(2):
            ids = (*BASE[:cut], *OTHER[number * 9 : number * 9 + 20])
            once(engine, ask("other", OTHER[number:]))
            engine.prefix_cache.shrink(0)
            event = once(engine, ask(f"{cut} {number}", ids, [cut]))
            engine_driver.check_answer(event, zoo.answer(family, ids, COUNT))
            assert event.num_cached_tokens >= cut


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pinned_prefix_gives_the_cold_answer(zoo: Zoo, family: str) -> None:
    check_pinned(zoo, family, engine_driver.make_real_engine)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_comes_back_from_disk(zoo: Zoo, family: str, tmp_path: Path) -> None:
    """Where pinned entries may leave memory, the tier has them."""

    def make(folder: Path) -> Engine:
        return engine_driver.make_real_engine(folder, backend="disk", disk_path=str(tmp_path))

    check_pinned(zoo, family, make)


def test_eviction_that_ignores_the_mark_is_found(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: the prefix is evicted, and computed again."""
    for method in ("must_stay", "must_stay_in_memory"):
        monkeypatch.setattr(CacheEntry, method, lambda entry: entry.pins > 0)
    with pytest.raises(AssertionError):
        check_pinned(zoo, "llama", engine_driver.make_real_engine)


def test_a_prefix_of_another_prompt_is_no_hit(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other twin: what is pinned has other content, and its length alone makes no hit."""
    real = engine_driver.make_text_request

    def make_other(name: str, ids: Any, **params: Any) -> Any:
        made = real(name, ids, **params)
        return replace(made, prompt=(*OTHER[:BOUNDARY], *made.prompt[BOUNDARY:])) if name == "warm" else made

    monkeypatch.setattr(engine_driver, "make_text_request", make_other)
    with pytest.raises(AssertionError):
        check_pinned(zoo, "llama", engine_driver.make_real_engine)
