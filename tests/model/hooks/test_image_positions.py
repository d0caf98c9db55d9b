"""Falcon OCR: positions, and what tokens of an image see, come with each call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from PIL import Image

from benchmarks.tiny.random_models import read_vision_info, write_vision_model
from mlxrun.core.request import ProcessedPrompt
from mlxrun.model.hooks.image_positions import hook_positions
from mlxrun.model.run.model_caller import VisionModelCaller

Pair = tuple[VisionModelCaller, ProcessedPrompt]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The hooked model, and a prompt with an image."""
    from mlx_vlm.utils import load_model

    folder: Path = tmp_path_factory.mktemp("falcon") / "model"
    write_vision_model("falcon_ocr", folder)
    model: Any = load_model(folder)
    assert hook_positions(model) == 1 and hook_positions(model.language_model) == 0
    image = Image.effect_mandelbrot((64, 48), (-2.0, -1.5, 1.0, 1.5), 9).convert("RGB")
    return VisionModelCaller(model), read_vision_info("falcon_ocr", folder).process("plain", [image])


def answer_by_library(caller: VisionModelCaller, prompt: ProcessedPrompt) -> mx.array:
    """Logits [1, V] of the prompt's last token, from one call for the whole prompt."""
    ids, given = mx.array([prompt.ids]), {key: mx.array(value) for key, value in prompt.media.items()}
    made = caller.model.get_input_embeddings(ids, given.pop("pixel_values"), **given).to_dict()
    logits: mx.array = caller.model.language_model(ids, cache=caller.make_cache(), **made).logits
    return logits[:, -1]


@pytest.mark.parametrize("edge", [3, 0], ids=["inside the image", "after it"])
def test_chunks_behind_the_image_are_exact(pair: Pair, edge: int) -> None:
    """The twin: a chunk that ends between the tokens of an image hides the later ones from the first."""
    caller, prompt = pair
    stop = prompt.image_spans[-1][1] - edge
    inputs, cache = caller.prepare_inputs(prompt.ids, prompt.media), caller.make_cache()
    inputs = caller.encode_images(inputs, len(prompt.ids))
    for start, end in ((0, stop), (stop, len(prompt.ids))):
        logits = caller.prefill(mx.array([prompt.ids[start:end]]), cache, start, inputs)
    difference = mx.abs(logits[:, -1] - answer_by_library(caller, prompt)).max().item()
    assert (difference < 1e-5) == (edge == 0)


def test_a_text_is_answered_alike_after_an_image(pair: Pair) -> None:
    """By the library's own calls too, which the load check compares with."""
    caller, prompt = pair

    def answer() -> mx.array:
        cache = caller.make_cache()
        caller.call_library([1, 2, 3], cache, 0)
        return caller.call_library([4], cache, 3)

    before = answer()
    answer_by_library(caller, prompt)
    assert mx.array_equal(answer(), before).item()
