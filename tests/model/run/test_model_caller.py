"""How text and vision models are called."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.core.errors import ModelLoadError, RequestError
from mlxrun.model.run.model_caller import run_trial_forward
from mlxrun.model.run.prompt_inputs import TEXT_ONLY
from tests.helpers import text_models
from tests.helpers.model_fixtures import Zoo
from tests.helpers.runner_driver import load_tiny_caller


def test_the_trial_forward_gives_caches_of_two_tokens_and_the_width_of_the_logits(zoo: Zoo) -> None:
    caller = load_tiny_caller(zoo.text("llama"))
    cache, vocab = run_trial_forward(caller)
    assert {layer.offset for layer in cache} == {2}
    assert vocab == caller.prefill(mx.array([[1]]), caller.make_cache(), 0, TEXT_ONLY).shape[-1]


def test_a_model_that_computes_nan_is_refused(zoo: Zoo) -> None:
    caller = load_tiny_caller(zoo.text("llama"))
    caller.model.model.norm.weight = mx.full(caller.model.model.norm.weight.shape, mx.nan)
    with pytest.raises(ModelLoadError, match="NaN"):
        run_trial_forward(caller)


def test_a_model_whose_tokens_see_later_ones_is_refused(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a prompt could be computed before its end is known. Some libraries compute it at once."""
    caller = load_tiny_caller(zoo.text("llama"))
    prefill = caller.prefill
    monkeypatch.setattr(caller, "prefill", lambda ids, *rest: prefill(ids, *rest) * ids.sum())
    with pytest.raises(ModelLoadError, match="see later ones"):
        run_trial_forward(caller)
    caller.library_computes_whole = True
    run_trial_forward(caller)
    assert caller.whole_prompts


def test_a_text_model_takes_no_images(zoo: Zoo) -> None:
    caller = load_tiny_caller(zoo.text("llama"))
    assert caller.prepare_inputs([1, 2], None) is TEXT_ONLY
    with pytest.raises(RequestError, match="takes no images"):
        caller.prepare_inputs([1, 2], object())


@pytest.mark.parametrize("kind", ["text", "vision"])
def test_prefill_and_decode_give_what_one_forward_gives(zoo: Zoo, kind: str) -> None:
    folder = zoo.text("llama") if kind == "text" else zoo.vision("qwen3_vl")
    caller = load_tiny_caller(folder)
    (prompt,) = text_models.prompts(3, [12])
    whole = caller.prefill(mx.array([prompt]), caller.make_cache(), 0, TEXT_ONLY)[:, -1]
    cache = caller.make_cache()
    caller.prefill(mx.array([prompt[:7]]), cache, 0, TEXT_ONLY)
    caller.prefill(mx.array([prompt[7:11]]), cache, 7, TEXT_ONLY)
    last = caller.decode(mx.array([prompt[11:]]), cache, [11])[:, -1]
    assert np.abs(np.array(whole) - np.array(last)).max() < 1e-4


def test_the_comparison_sees_a_wrong_position(zoo: Zoo) -> None:
    """The mutation twin: positions are explicit for a model with multimodal rotary positions."""
    caller = load_tiny_caller(zoo.vision("qwen3_vl"))
    (prompt,) = text_models.prompts(3, [12])
    outputs = []
    for position in (11, 17):
        cache = caller.make_cache()
        caller.prefill(mx.array([prompt[:11]]), cache, 0, TEXT_ONLY)
        outputs.append(np.array(caller.decode(mx.array([prompt[11:]]), cache, [position])[:, -1]))
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3
