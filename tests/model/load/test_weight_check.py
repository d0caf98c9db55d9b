"""Which weights of a checkpoint may be left out, and which make it another model's."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.weight_check import _LOADING, check_loading, load_checked_weights


class TinyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 2, bias=False)


class TinyTrunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(4, 2)
        self.layers = [TinyLayer(), TinyLayer()]


class TinyCausalModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = TinyTrunk()


def make_weights(**more: mx.array) -> dict[str, mx.array]:
    """A checkpoint of the model, in ones; `more` with `__` for dots."""
    own = {name: mx.ones(value.shape) for name, value in tree_flatten(TinyCausalModel().parameters())}
    return own | {name.replace("__", "."): value for name, value in more.items()}


HARMLESS = [
    "model.layers.0.proj.rotary_emb.inv_freq",
    "model.layers.1.k_scale",
    "model.layers.2.eh_proj.weight",
    "model.mtp.0.norm.weight",
    "mtp.fc.weight",
    "vision_tower.blocks.0.weight",
    "model.multi_modal_projector.weight",
    "score.weight",
]
HARMFUL = [
    "model.layers.0.proj.bias",
    "model.layers.0.q_norm.weight",
    "model.layers.0.eh_proj.weight",
    "model.layers.2.proj.weight",
    "model.layers.0.vision_gate.weight",
    "model.embed_norm.weight",
    "model.stranger.weight",
    "lm_head.weight",
    "model.embed_tokens.scales",
]


@pytest.mark.parametrize("name", HARMLESS)
def test_what_cannot_matter_is_reported(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = TinyCausalModel()
    with caplog.at_level(logging.WARNING, "mlxrun.model.load.weight_check"):
        unused = load_checked_weights(model, make_weights() | {name: mx.ones((2,))}, Path("m"))
    assert unused == (name,)
    assert f"m: the model does not use {name}" in caplog.text
    assert all(mx.all(value == 1).item() for _, value in tree_flatten(model.parameters()))


@pytest.mark.parametrize("name", HARMFUL)
def test_what_might_matter_is_refused_by_name(name: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"m: the checkpoint has weights .*not in model.*: {name}$"):
        load_checked_weights(TinyCausalModel(), make_weights() | {name: mx.ones((2,))}, Path("m"))


def test_the_layer_that_drafts_is_behind_the_last_one() -> None:
    """With all that it has; a layer between it and the model's last one means that the config has too few."""
    names = {"model.layers.2.enorm.weight", "model.layers.2.proj.weight"}
    extra = {name: mx.ones((2,)) for name in names}
    assert load_checked_weights(TinyCausalModel(), make_weights() | extra, Path("m")) == tuple(sorted(names))
    extra = {name.replace("2", "3"): value for name, value in extra.items()}
    more = make_weights(model__layers__2__proj__weight=mx.ones((2, 2)))
    with pytest.raises(ModelLoadError, match=r"might be wrong: model\.layers\.2\.proj\.weight$"):
        load_checked_weights(TinyCausalModel(), more | extra, Path("m"))


def test_a_head_of_a_tied_model_is_not_used() -> None:
    weights = make_weights(lm_head__weight=mx.ones((4, 2)))
    assert load_checked_weights(TinyCausalModel(), weights, Path("m"), tied=True) == ("lm_head.weight",)


def test_missing_weights_and_other_shapes_are_refused_by_name() -> None:
    weights = make_weights()
    weights["model.layers.1.proj.weight"] = mx.ones((3, 2))
    with pytest.raises(ModelLoadError, match=r"layers\.1\.proj\.weight has the shape \(3, 2\), .* \(2, 2\)"):
        load_checked_weights(TinyCausalModel(), weights, Path("m"))
    del weights["model.layers.1.proj.weight"], weights["model.layers.0.proj.weight"]
    with pytest.raises(ModelLoadError, match=r"missing weights: 2 \(model\.layers\.0\.proj\.weight, model"):
        load_checked_weights(TinyCausalModel(), weights, Path("m"))


def test_the_class_is_as_before_afterwards() -> None:
    """Also where loading fails, and where the class has a way of its own."""

    class OwnLoading(TinyCausalModel):
        def load_weights(self, *given: Any, **more: Any) -> Any:
            return "own"

    for model_class in (TinyCausalModel, OwnLoading):
        before = model_class.load_weights
        with check_loading(model_class, Path("m"), False) as unused:
            weights = make_weights(score__weight=mx.ones((1,)))
            model_class().load_weights(list(weights.items()), strict=False)
        assert unused == ["score.weight"]
        with pytest.raises(ModelLoadError), check_loading(model_class, Path("m"), False):
            model_class().load_weights([])
        assert model_class.load_weights is before


def test_two_threads_load_one_after_the_other() -> None:
    """Else the class would keep what the second one found, which is the first one's way."""
    before, entered = TinyCausalModel.load_weights, threading.Event()

    def load() -> None:
        with check_loading(TinyCausalModel, Path("second"), False):
            entered.set()

    thread = threading.Thread(target=load)
    with check_loading(TinyCausalModel, Path("first"), False):
        thread.start()
        assert _LOADING.locked() and not entered.is_set()
    thread.join()
    assert entered.is_set() and not _LOADING.locked()
    assert TinyCausalModel.load_weights is before
