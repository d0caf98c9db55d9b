"""What is loaded of a draft model."""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlxrun.config.settings import Config, ModelSettings, PrefillSettings
from mlxrun.model.kv.ragged.layer_caches import LayerKind
from mlxrun.model.load.loader import load_small_model
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.sparse import build
from mlxrun.model.sparse.build import _cut_layers, make_selector


class ListModel:
    """Nine layers; a forward uses as many of them as `uses` says."""

    def __init__(self, uses: int | None, caches: int | None) -> None:
        self.layers = list(range(9))
        self._uses, self._caches = uses, caches

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in range(self._caches or len(self.layers))]

    def __call__(self, ids: mx.array, cache: list[KVCache]) -> mx.array:
        for index in range(self._uses or len(self.layers)):
            keys = mx.ones((1, 1, ids.shape[1], 4)) * self.layers[index]
            cache[index].update_and_fetch(keys, keys)
        return mx.zeros((*ids.shape, 7))


@pytest.mark.parametrize(("uses", "caches", "left"), [(None, None, 6), (9, None, 9), (None, 9, 9)])
def test_the_last_layers_are_left_out_where_the_model_computes_without_them(
    uses: int | None, caches: int | None, left: int
) -> None:
    model: Any = ListModel(uses, caches)
    _cut_layers(ModelCaller(model))
    assert model.layers == list(range(left))


def test_layers_stay_where_only_the_last_ones_attend(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a hybrid of few layers: recurrent ones have no scores."""
    model: Any = ListModel(None, None)
    monkeypatch.setattr(build, "get_kind", lambda cache: cache)
    kinds = [LayerKind.STATE] * 6 + [LayerKind.KV] * 3
    model.make_cache = lambda: kinds[: len(model.layers)]
    monkeypatch.setattr(build, "run_trial_forward", lambda caller: (caller.make_cache(), 7))
    _cut_layers(ModelCaller(model))
    assert len(model.layers) == 9
    kinds[5] = LayerKind.KV
    _cut_layers(ModelCaller(model))
    assert len(model.layers) == 6


def test_layers_that_are_no_list_stay() -> None:
    model: Any = ListModel(None, None)
    model.layers = tuple(model.layers)
    _cut_layers(ModelCaller(model))
    assert len(model.layers) == 9


def test_a_model_that_chooses_for_itself_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    settings = ModelSettings(path="embedded", draft="embedded")
    config, info = Config(model=settings, prefill=PrefillSettings("draft")), load_model_info(settings)
    with caplog.at_level(logging.WARNING):
        make_selector(config, info, load_small_model(config, info, info))
    assert "model.draft is model.path: sparse prefill reads each long prompt about twice" in caplog.text
