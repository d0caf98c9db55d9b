"""The load check's prompt with images, by the model's own template and processor."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mlxrun.core.errors import MediaError
from mlxrun.core.request import ProcessedPrompt
from mlxrun.model.load.model_info import LoadedModelInfo, load_model_info
from mlxrun.model.load_check import media_prompts
from mlxrun.model.load_check.media_prompts import list_media_prompts
from tests.helpers import engine_driver, vision_models
from tests.helpers.model_fixtures import Zoo


def load_info(zoo: Zoo, family: str) -> LoadedModelInfo:
    return load_model_info(engine_driver.make_config(zoo.vision(family)).model)


@pytest.mark.parametrize("family", vision_models.CORE)
@pytest.mark.parametrize("template", [True, False])
def test_two_images_with_text_between_them(zoo: Zoo, family: str, template: bool) -> None:
    """With the chat template, or with the processor's placeholders."""
    info = load_info(zoo, family)
    made, single = list_media_prompts(info if template else replace(info, chat_template=None))
    assert len(made.image_spans) == 2 and len(made.ids) <= media_prompts.MAX_TWO
    assert made.image_spans[0][1] < made.image_spans[1][0] and made.image_spans[1][1] < len(made.ids)
    assert len(set(made.image_digests)) == 2 and len(set(single.image_digests)) == 1


def make_info(tokens: int) -> Any:
    """A model whose processor makes so many tokens of each image."""

    def process(text: str, images: list[Any], *others: list[Any]) -> ProcessedPrompt:
        spans = tuple((1 + i * (tokens + 1), 1 + i * (tokens + 1) + tokens) for i in range(text.count("I")))
        return ProcessedPrompt((0,) * (spans[-1][1] + 1), spans, {})

    return SimpleNamespace(chat_template=None, process=process, processor=SimpleNamespace(image_token="I"))


def test_large_images_cost_less_or_are_left_out() -> None:
    assert [len(made.image_spans) for made in list_media_prompts(make_info(40))] == [2, 1]
    assert [len(made.image_spans) for made in list_media_prompts(make_info(400))] == [1]
    with pytest.raises(MediaError, match="has 2002 tokens, too many for a check"):
        list_media_prompts(make_info(2000))


def test_a_processor_without_placeholders() -> None:
    info = make_info(4)
    info.processor = None
    with pytest.raises(MediaError, match="has a placeholder for images"):
        list_media_prompts(info)
