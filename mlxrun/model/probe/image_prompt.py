"""The prompts with images and videos that the probe computes, by the model's own template and processor."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from mlxrun.config.video_sampling import Video
from mlxrun.core.errors import MediaError
from mlxrun.core.request import ProcessedPrompt
from mlxrun.model.load.model_info import LoadedModelInfo

log = logging.getLogger(__name__)

SIZES = ((64, 64), (96, 64))  # pixels of the images, and of the frames of the videos
FRAMES = 4
MAX_TWO = 192  # tokens of a prompt with two images; if it has more, one image has to do
MAX_TOKENS = 1024  # tokens of a prompt that is computed at load


def list_media_prompts(info: LoadedModelInfo, kind: str = "image") -> list[ProcessedPrompt]:
    """Two images, or two videos, with text between them, unless they have many tokens; and one. MediaError if
    the model's files make no such prompt of at most MAX_TOKENS tokens."""
    pair, single = _process(info, [kind] * 2), _process(info, [kind])
    limits = ((pair, MAX_TWO), (single, MAX_TOKENS))
    found = [made for made, most in limits if isinstance(made, ProcessedPrompt) and len(made.ids) <= most]
    return found or [_check_size(single, kind)]


def make_mixed_prompt(info: LoadedModelInfo) -> ProcessedPrompt:
    """An image and a video. MediaError as above."""
    return _check_size(_process(info, ["image", "video"]), "video")


def _check_size(made: ProcessedPrompt | MediaError, kind: str) -> ProcessedPrompt:
    if isinstance(made, MediaError):
        raise made
    if len(made.ids) > MAX_TOKENS:
        raise MediaError(f"a prompt with a small {kind} has {len(made.ids)} tokens, too many for a check")
    return made


def _process(info: LoadedModelInfo, kinds: list[str]) -> ProcessedPrompt | MediaError:
    """The prompt with these images and videos, by the first text of which the processor makes their
    tokens."""
    problem = MediaError(f"neither the chat template nor the processor has a placeholder for {kinds[-1]}s")
    images = [_make_image(size) for kind, size in zip(kinds, SIZES, strict=False) if kind == "image"]
    videos = [_make_video(size) for kind, size in zip(kinds, SIZES, strict=False) if kind == "video"]
    for text in _list_texts(info, kinds):
        try:
            made = info.process(text, images, videos) if videos else info.process(text, images)
        except Exception as error:  # the model's own processor may raise anything
            log.debug("parity probe: the processor of images failed", exc_info=True)
            problem = MediaError(f"{type(error).__name__}: {error}")
            continue
        if len(made.image_spans) >= len(set(kinds)):
            return made
    return problem


def _list_texts(info: LoadedModelInfo, kinds: list[str]) -> Iterator[str]:
    """What the chat template makes of a message with images and videos; then plain text with placeholders of
    images."""
    parts = [part for kind in kinds for part in ({"type": "text", "text": "a"}, {"type": kind})]
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
        if isinstance(token, str) and set(kinds) == {"image"}:
            yield f"a{token}" * len(kinds) + "b"


def _make_image(size: tuple[int, int]) -> Any:
    """An RGB image of random blocks, different for each size."""
    from PIL import Image

    blocks = np.random.default_rng([7, *size]).integers(0, 256, size=(4, 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize(size, Image.Resampling.NEAREST)


def _make_video(size: tuple[int, int]) -> Video:
    """Frames of random pixels."""
    width, height = size
    shape = (FRAMES, 3, height, width)
    frames = np.random.default_rng([8, *size]).integers(0, 256, size=shape, dtype=np.uint8)
    return Video(frames, tuple(range(0, 2 * FRAMES, 2)), 2 * FRAMES, 4.0)
