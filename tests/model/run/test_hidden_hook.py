"""A model's logits are made of slices of its hidden states only where they are the same."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxrun.model.load.loader import load_caller
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.run import hidden_hook
from mlxrun.model.run.hidden_hook import HiddenStateHook, find_hidden_hook
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prompt_inputs import TEXT_ONLY
from tests.helpers import engine_driver, vision_models
from tests.helpers.model_fixtures import Zoo

pytestmark = pytest.mark.thorough

PATHS = {"mamba2": ("backbone",), "nemotron_h": ("backbone",), "gpt_bigcode": ("transformer",)}
PATHS |= {"qwen3_5": ("language_model", "model")}
ALONE = ("idefics3", "smolvlm")  # their layers and head are one module


def load(folder: Any) -> ModelCaller:
    config = engine_driver.make_config(folder)
    return load_caller(config, load_model_info(config.model, weights=True))


@pytest.mark.parametrize("family", ["llama", "gemma2", *PATHS])
def test_text_families_have_hidden_states(zoo: Zoo, family: str) -> None:
    hook = find_hidden_hook(load(zoo.text(family)))
    assert hook is not None and hook.path == PATHS.get(family, ("model",))


@pytest.mark.parametrize("family", vision_models.CORE)
def test_vision_families_have_them_or_say_so(zoo: Zoo, family: str, caplog: pytest.LogCaptureFixture) -> None:
    hook = find_hidden_hook(load(zoo.vision(family)))
    assert (hook is None) == (family in ALONE)
    assert (f"mlx_vlm.models.{family}" in caplog.text) == (family in ALONE)


def test_the_model_itself_stays_as_it_is(zoo: Zoo) -> None:
    caller = load(zoo.text("llama"))
    before, trunk = dict(caller.model), caller.model.model
    hook = find_hidden_hook(caller)
    assert hook is not None and dict(caller.model) == before and caller.model.model is trunk
    ids = mx.array([[5, 6, 7]])
    hidden = hook.compute_hidden(lambda own: own.prefill(ids, caller.make_cache(), 0, TEXT_ONLY))
    logits = caller.prefill(ids, caller.make_cache(), 0, TEXT_ONLY)
    last = hook.compute_logits(hidden[:, 2:], lambda own: own.text_model(ids[:, 2:]))
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
    caller = load(zoo.text("llama"))
    assert find_hidden_hook(ModelCaller(Mixer(caller.model))) is None
    assert "does not give hidden states" in caplog.text


def test_a_part_after_which_layers_come_is_refused(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding, and the norm after the layers, which would be computed again for each slice."""
    caller = load(zoo.text("llama"))
    paths = [("model", "embed_tokens"), ("model", "norm"), ("lm_head",)]
    monkeypatch.setattr(hidden_hook, "iterate_paths", lambda model: iter(paths))
    assert find_hidden_hook(caller) is None


def test_recorded_states_do_not_stay(zoo: Zoo) -> None:
    caller = load(zoo.text("llama"))
    hook = HiddenStateHook(caller, ("model",))
    hook.compute_hidden(lambda own: own.text_model(mx.array([[1, 2]])))
    assert hook._trunk.recorded == [] and hook._trunk.replayed is None
