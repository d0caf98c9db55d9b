"""Families whose processors make one token of an image: each feature gets a token, and each token its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from PIL import Image

from benchmarks.tiny import omni_models
from benchmarks.tiny.processor_files import PROCESSORS
from benchmarks.tiny.random_models import read_vision_info, write_vision_model
from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import MediaError
from mlxrun.core.request import ProcessedPrompt
from mlxrun.model.hooks.single_placeholders import hook_placeholders
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.vision.placeholders import FEATURE_TOKEN, find_placeholder

SEVERAL = ("fastvlm", "phi4mm", "phi4_siglip")  # that take several images
FAMILIES = (*SEVERAL, "llava_bunny", "multi_modality")
IMAGES = [Image.new("RGB", size, (*size, 9)) for size in ((90, 50), (40, 100))]


class Family:
    def __init__(self, family: str, folder: Path) -> None:
        from mlx_vlm.utils import load_model

        write_vision_model(family, folder)
        self.info = read_vision_info(family, folder)
        self.model: Any = load_model(folder)
        self.placeholder = PROCESSORS[family].placeholder

    def process(self, *images: Any) -> ProcessedPrompt:
        text = "".join(f"a{self.placeholder}bc" for _ in images)
        return self.info.process(f"<|im_start|>{text}", list(images))

    def embed(self, ids: Any, media: Any) -> np.ndarray:
        """The model's embeddings of a prompt [L, D]."""
        tokens, given = mx.array([list(ids)]), {key: mx.array(value) for key, value in media.items()}
        made = self.model.get_input_embeddings(
            tokens, given.pop("pixel_values", None), mask=mx.ones_like(tokens), **given
        )
        return np.array(made.inputs_embeds[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_is_embedded_as_the_library_does(tmp_path: Path, family: str) -> None:
    """From its own prompt, with one token for all features."""
    made = Family(family, tmp_path / "model")
    prompt, single = made.process(IMAGES[0]), find_placeholder(made.info.config)
    assert single is not None
    (start, stop), ids = prompt.image_spans[0], list(prompt.ids)
    assert stop - start > 1 and set(ids[start:stop]) == {FEATURE_TOKEN}
    expected = made.embed([*ids[:start], single.token, *ids[stop:]], prompt.media)
    assert hook_placeholders(made.model, made.info.config) == 1
    assert np.array_equal(made.embed(ids, prompt.media), expected)


@pytest.mark.parametrize("family", SEVERAL)
def test_two_images_are_each_in_their_place(tmp_path: Path, family: str) -> None:
    """With the features that each has alone, and with the text around them."""
    made = Family(family, tmp_path / "model")
    hook_placeholders(made.model, made.info.config)
    both = made.process(*IMAGES)
    found = made.embed(both.ids, both.media)
    for (start, stop), image in zip(both.image_spans, IMAGES, strict=True):
        alone = made.process(image)
        own = slice(*alone.image_spans[0])
        assert np.abs(found[start:stop] - made.embed(alone.ids, alone.media)[own]).max() < 1e-5
    text = np.array(both.ids) != FEATURE_TOKEN
    assert np.array_equal(found[text], made.embed(np.array(both.ids)[text].tolist(), {}))


@pytest.mark.parametrize("family", ["llava_bunny", "multi_modality"])
def test_a_second_image_is_refused_where_the_processor_drops_it(tmp_path: Path, family: str) -> None:
    made = Family(family, tmp_path / "model")
    with pytest.raises(MediaError, match="1 placeholders of 2 images: this model takes one image"):
        made.process(*IMAGES)


def test_other_than_as_many_features_as_were_counted_are_an_error(tmp_path: Path) -> None:
    """The twin: a count that is wrong would shift all later tokens."""
    made = Family("multi_modality", tmp_path / "model")
    hook_placeholders(made.model, made.info.config | {"num_image_tokens": 575})
    prompt = made.process(IMAGES[0])
    with pytest.raises(ValueError, match="576 features of an image for 575 tokens"):
        made.embed(prompt.ids, prompt.media)


def test_the_weights_of_phi_4_never_change(tmp_path: Path) -> None:
    """The library's method would give all rows those for sound, if there are some."""
    made = Family("phi4mm", tmp_path / "model")
    hook_placeholders(made.model, made.info.config)
    made.model.set_modality(has_image=True)
    made.model.set_modality(has_audio=True)
    made.model._base_weights = {"a": mx.zeros(1)}
    with pytest.raises(ValueError, match="changes the weights for sound"):
        made.model.set_modality(has_audio=True)


def test_mini_cpm_o_takes_one_prompt(tmp_path: Path) -> None:
    """Without the axis of prompts, as with it."""
    from mlx_vlm.utils import load_model

    folder = tmp_path / "model"
    write_vision_model("minicpmo", folder)
    text, *media = omni_models.render("minicpmo", ["a", IMAGES[0], "b", omni_models.make_audio(1)])
    made = load_model_info(ModelSettings(path=str(folder))).process(text, *media)
    ids, given = mx.array([list(made.ids)]), {key: mx.array(a) for key, a in made.media.items()}
    pixels, model = given.pop("pixel_values"), load_model(folder)
    nested = {key: array[None] if array.ndim == 2 else array for key, array in given.items()}
    expected = model.get_input_embeddings(ids, pixels[None], **nested).inputs_embeds
    assert hook_placeholders(model, {}) == 1
    for found in (
        model.get_input_embeddings(ids, pixels, **given),
        model.get_input_embeddings(ids, pixels[None], **nested),
    ):
        assert mx.array_equal(found.inputs_embeds, expected).item()


def test_other_models_are_left_alone() -> None:
    assert find_placeholder({"model_type": "llava"}) is None
    model = nn.Linear(2, 2)
    assert hook_placeholders(model, {"model_type": "llava"}) == 0 and type(model) is nn.Linear
