"""A model's logits are made of slices of its hidden states only where they are the same."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxrun.model.load.loader import load_adapter
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.run import hidden_tap
from mlxrun.model.run.adapter import Adapter
from mlxrun.model.run.hidden_tap import HiddenTap, find_hidden_tap
from mlxrun.model.run.prompt_inputs import TEXT_ONLY
from tests.helpers import engine_driver, vision_models
from tests.helpers.model_fixtures import Zoo

pytestmark = pytest.mark.thorough

PATHS = {"mamba2": ("backbone",), "nemotron_h": ("backbone",), "gpt_bigcode": ("transformer",)}
PATHS |= {"qwen3_5": ("language_model", "model")}
ALONE = ("idefics3", "smolvlm")  # their layers and head are one module


def load(folder: Any) -> Adapter:
    config = engine_driver.make_config(folder)
    return load_adapter(config, load_model_info(config.model, weights=True))


@pytest.mark.parametrize("family", ["llama", "gemma2", *PATHS])
def test_text_families_have_hidden_states(zoo: Zoo, family: str) -> None:
    tap = find_hidden_tap(load(zoo.text(family)))
    assert tap is not None and tap.path == PATHS.get(family, ("model",))


@pytest.mark.parametrize("family", vision_models.CORE)
def test_vision_families_have_them_or_say_so(zoo: Zoo, family: str, caplog: pytest.LogCaptureFixture) -> None:
    tap = find_hidden_tap(load(zoo.vision(family)))
    assert (tap is None) == (family in ALONE)
    assert (f"mlx_vlm.models.{family}" in caplog.text) == (family in ALONE)


def test_the_model_itself_stays_as_it_is(zoo: Zoo) -> None:
    adapter = load(zoo.text("llama"))
    before, trunk = dict(adapter.model), adapter.model.model
    tap = find_hidden_tap(adapter)
    assert tap is not None and dict(adapter.model) == before and adapter.model.model is trunk
    ids = mx.array([[5, 6, 7]])
    hidden = tap.compute_hidden(lambda model: adapter.prefill(ids, adapter.make_cache(), 0, TEXT_ONLY, model))
    logits = adapter.prefill(ids, adapter.make_cache(), 0, TEXT_ONLY)
    last = tap.compute_logits(hidden[:, 2:], lambda model: model(ids[:, 2:]))
    assert mx.allclose(last[0, 0], logits[0, 2], atol=1e-5).item()


class Mixer(nn.Module):
    """A head that looks at other tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.model
        self.lm_head = model.lm_head

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        hidden = self.model(ids, cache=cache)
        return self.lm_head(hidden + mx.cumsum(hidden, axis=1))

    @property
    def layers(self) -> Any:
        return self.model.layers


def test_a_head_that_mixes_tokens_is_refused(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    adapter = load(zoo.text("llama"))
    assert find_hidden_tap(Adapter(Mixer(adapter.model))) is None
    assert "does not give hidden states" in caplog.text


def test_a_part_after_which_layers_come_is_refused(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding, and the norm after the layers, which would be computed again for each slice."""
    adapter = load(zoo.text("llama"))
    paths = [("model", "embed_tokens"), ("model", "norm"), ("lm_head",)]
    monkeypatch.setattr(hidden_tap, "_iterate_paths", lambda model: iter(paths))
    assert find_hidden_tap(adapter) is None


def test_recorded_states_do_not_stay(zoo: Zoo) -> None:
    adapter = load(zoo.text("llama"))
    tap = HiddenTap(adapter.model, ("model",))
    tap.compute_hidden(lambda model: model(mx.array([[1, 2]])))
    assert tap._trunk.recorded == [] and tap._trunk.replayed is None
