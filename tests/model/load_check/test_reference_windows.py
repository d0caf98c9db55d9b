"""Reduced windows: large ones are crossed by short prompts, as the model crosses its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlxrun.model.kv.ragged.layer_caches import LayerKind, get_kind
from mlxrun.model.load_check.reference import REDUCED, list_windows, reduce_windows
from mlxrun.model.load_check.report import ComparedWindow
from tests.helpers import text_models
from tests.helpers.load_check_driver import list_failed, probe_model

WINDOW = 64


def test_reduced_caches_are_of_the_librarys_kind() -> None:
    cache: list[Any] = [KVCache(), RotatingKVCache(WINDOW), RotatingKVCache(4), RotatingKVCache(WINDOW)]
    assert list_windows(cache) == [4, WINDOW]
    reduce_windows(cache)
    assert list_windows(cache) == [4, REDUCED]
    assert [get_kind(layer) for layer in cache[1:]] == [LayerKind.WINDOW] * 3
    assert type(cache[1]) is type(cache[3]) and isinstance(cache[1], RotatingKVCache)


@pytest.mark.parametrize("window_size", [None, WINDOW, WINDOW + 1, WINDOW - 2])
def test_a_mask_keeps_its_distance_from_the_cache(window_size: int | None) -> None:
    """A model that passes a window of a token more than its cache keeps still does so."""
    cache = [RotatingKVCache(WINDOW)]
    reduce_windows(cache)
    mask = cache[0].make_mask(12, window_size=window_size)
    plain = RotatingKVCache(REDUCED)
    own = None if window_size is None else window_size - WINDOW + REDUCED
    assert mx.array_equal(mask, plain.make_mask(12, window_size=own)).item()


@pytest.fixture(scope="module")
def wide_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose windows are longer than the load check's prompts."""
    root, made = tmp_path_factory.mktemp("wide"), {}
    for family in ("gemma3_text", "gpt_oss", "gemma4_text"):
        config = {**text_models.CONFIGS[family], "sliding_window": WINDOW}
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(text_models.CONFIGS, family, config)
            made[family] = text_models.build(family, root / family)
    return made


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "gemma4_text"])
def test_sound_models_with_large_windows_pass(wide_folders: dict[str, Path], family: str) -> None:
    report = probe_model(wide_folders[family])
    assert list_failed(report) == [] and report.windows == (ComparedWindow(WINDOW, WINDOW),)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_a_model_whose_window_is_a_token_longer_than_its_cache(
    wide_folders: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts then depend on how they are split, as in mlx-lm's plamo3."""
    original = RotatingKVCache.make_mask

    def make_mask(self: Any, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        longer = None if window_size is None else window_size + 1
        return original(self, N, window_size=longer, return_array=return_array)

    monkeypatch.setattr(RotatingKVCache, "make_mask", make_mask)
    report = probe_model(wide_folders[family])
    assert list_failed(report)[0].startswith("prefill chunks") and report.methods.library_chunks
