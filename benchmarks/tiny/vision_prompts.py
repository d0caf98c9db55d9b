"""Prompts with images for tiny vision-language models, which have no image processor of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.tiny.vision_families import VISION
from benchmarks.tiny.vision_media import END, IMAGE, LAYOUTS, SIDE, START, Array
from mlxrun.core.request import ProcessedPrompt
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.vision.media_processing import compute_image_digest

PLACEHOLDER = "IMAGE"  # in what the chat template of byte_tokenizer.py renders


def join_parts(family: str, parts: Sequence[list[int] | int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids and the spans of images, made of texts as token ids and of images, which are numbers."""
    entry = VISION[family]
    if entry.first and any(isinstance(part, int) for part in parts):
        texts = [token for part in parts if not isinstance(part, int) for token in part]
        parts = [texts[:1], *(part for part in parts if isinstance(part, int)), texts[1:]]
    before, after = ([START], [END]) if entry.wrapped else ([], [])
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for part in parts:
        if not isinstance(part, int):
            ids += part
            continue
        start = len(ids) + len(before)
        spans.append((start, start + entry.tokens))
        ids += [*before, *[IMAGE] * entry.tokens, *after]
    return ids, spans


@dataclass(frozen=True, slots=True)
class TinyVisionInfo(LoadedModelInfo):
    """The info of a tiny model of a `family`, which stands for its processor too: so the checks at load see
    images, as with a real checkpoint."""

    family: str = ""

    def process(
        self, text: str, images: Sequence[Any], videos: Sequence[Any] = (), audio: Sequence[Any] = ()
    ) -> ProcessedPrompt:
        texts = [self.tokenizer.encode(part, add_special_tokens=False) for part in text.split(PLACEHOLDER)]
        parts = [part for i, ids in enumerate(texts) for part in ((i - 1, ids) if i else (ids,))]
        ids, spans = join_parts(self.family, parts)
        pixels = np.stack([_read_pixels(image) for image in images])
        media = LAYOUTS[VISION[self.family].media](pixels)
        return ProcessedPrompt(tuple(ids), tuple(spans), media, tuple(map(compute_image_digest, images)))


def _read_pixels(image: Any) -> Array:
    """[3, 32, 32], float32, around 0."""
    pixels = np.array(image.resize((SIDE, SIDE)), dtype=np.float32).transpose(2, 0, 1)
    return pixels / 128 - 1
