"""The prompt with images that the probe computes, made by the model's own template and processor."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from mlxrun.errors import MediaError
from mlxrun.model.model_info import LoadedModelInfo
from mlxrun.scheduler.request import ProcessedPrompt

log = logging.getLogger(__name__)

SIZES = ((64, 64), (96, 64))  # pixels of the images
MAX_TWO = 192  # tokens of a prompt with two images; if it has more, one image has to do
MAX_TOKENS = 1024  # tokens of a prompt that is computed at load


def make_image_prompt(info: LoadedModelInfo) -> ProcessedPrompt:
    """Two images with text between them, or one if images have many tokens. MediaError if the model's files
    make no such prompt of at most MAX_TOKENS tokens."""
    pair = _process(info, 2)
    if isinstance(pair, ProcessedPrompt) and len(pair.ids) <= MAX_TWO:
        return pair
    single = _process(info, 1)
    if isinstance(single, MediaError):
        raise single
    if len(single.ids) > MAX_TOKENS:
        raise MediaError(f"a prompt with a small image has {len(single.ids)} tokens, too many for a check")
    return single


def _process(info: LoadedModelInfo, count: int) -> ProcessedPrompt | MediaError:
    """The prompt with `count` images, by the first text of which the processor makes image tokens."""
    problem = MediaError("neither the chat template nor the processor has a placeholder for images")
    for text in _list_texts(info, count):
        try:
            made = info.process(text, _make_images(count))
        except Exception as error:  # the model's own processor may raise anything
            log.debug("parity probe: the image processor failed", exc_info=True)
            problem = MediaError(f"{type(error).__name__}: {error}")
            continue
        if made.image_spans:
            return made
    return problem


def _list_texts(info: LoadedModelInfo, count: int) -> Iterator[str]:
    """What the chat template makes of a message with images; then plain text with placeholders."""
    parts = [part for _ in range(count) for part in ({"type": "text", "text": "a"}, {"type": "image"})]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "b"}]}]
    if info.chat_template is not None:
        try:
            yield info.tokenizer.apply_chat_template(
                messages, chat_template=info.chat_template, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # foreign code may raise anything
            log.debug("parity probe: the chat template failed", exc_info=True)
    for name in ("boi_token", "image_token"):
        token = getattr(info.processor, name, None)
        if isinstance(token, str):
            yield f"a{token}" * count + "b"


def _make_images(count: int) -> list[Any]:
    """RGB images of random blocks: different ones, of different sizes."""
    from PIL import Image

    random = np.random.default_rng(7)
    blocks = [random.integers(0, 256, size=(4, 4, 3), dtype=np.uint8) for _ in range(count)]
    nearest = Image.Resampling.NEAREST
    return [Image.fromarray(b).resize(size, nearest) for b, size in zip(blocks, SIZES, strict=False)]
