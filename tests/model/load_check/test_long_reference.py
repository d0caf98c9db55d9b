"""A long row is made of the keys and values of a few tokens, and crosses the model's own windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.model.kv.ragged import layer_caches, row_group
from mlxrun.model.load_check import long_reference
from mlxrun.model.load_check.long_reference import CHUNK, PLAIN_TOKENS, choose_length, repeat_tokens
from tests.helpers import text_models
from tests.helpers.load_check_driver import find_failed, probe_model
from tests.helpers.model_fixtures import Zoo

WINDOW = 40


def make_source(window: int | None) -> tuple[list[Any], list[Any]]:
    """Empty caches of a layer with a window and one without, and the same with 10 tokens."""
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    empty, filled = ([KVCache(), RotatingKVCache(window or 8)] for _ in range(2))
    for layer in filled:
        array = mx.random.normal((1, 2, 10, 4), key=mx.random.key(1))
        layer.update_and_fetch(array, array)
    return empty, filled


def test_a_row_begins_just_before_it_fills_the_largest_window() -> None:
    assert choose_length(*make_source(1024), context=None) == 1020
    assert choose_length(*make_source(1024), context=500) == 500 - long_reference.NEW
    assert choose_length(*make_source(1024), context=9000) == 1020
    assert choose_length(*make_source(100_000), context=None) == PLAIN_TOKENS


def test_rows_that_take_too_much_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_reference, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="1020 tokens takes"):
        choose_length(*make_source(1024), context=None)


def test_repeated_tokens_fill_each_kind_of_cache() -> None:
    empty, filled = make_source(100)
    made = repeat_tokens(filled, empty, 300)
    assert [layer.offset for layer in made] == [300, 300]
    keys = layer_caches.read_keys_values(made[0]).keys[0, 0, :300]
    assert len({tuple(row) for row in keys.tolist()}) == 300  # each token differs from every other
    sizes = mx.abs(keys).mean(axis=-1)
    assert sizes[206:215].mean().item() > 4 * sizes[100:150].mean().item()  # where the window will begin


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**text_models.CONFIGS["gemma3_text"], "sliding_window": WINDOW}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(text_models.CONFIGS, "gemma3_text", config)
        return text_models.build("gemma3_text", tmp_path_factory.mktemp("windowed") / "model")


def test_a_fault_that_shows_only_at_the_models_own_window(
    windowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows that the checks reduce are right; a row loses a key when its own window is full."""
    original = row_group.RowGroup.get_width

    def get_width(self: Any, window: int | None) -> int:
        return original(self, window - 1 if window is not None and window >= WINDOW else window)

    name = f"decode ragged at {WINDOW - 4 + CHUNK + 1} tokens"
    assert name not in find_failed(windowed)
    monkeypatch.setattr(row_group.RowGroup, "get_width", get_width)
    failed = find_failed(windowed)
    assert name in failed and "decode ragged" not in failed


def test_a_model_that_takes_few_tokens_has_a_short_row(zoo: Zoo) -> None:
    report = probe_model(zoo.text("llama"), context_length=40)
    names = [check.name for check in report.checks]
    assert f"prefill chunks at {40 - long_reference.NEW + CHUNK + 1} tokens" in names
