"""The prompts of the sweep: of several lengths for text, with images for vision-language models."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.sweep.checks import make_request
from benchmarks.tiny.vision_families import VISION
from benchmarks.tiny.vision_media import SIDE
from benchmarks.tiny.vision_prompts import join_parts, make_media
from mlxrun.core.request import Request

LENGTHS = (1, 3, 9, 20, 45, 80)  # tokens of the prompts; the windows of the tiny models hold 8
CONTINUED = (20, 80)  # prompts that another one continues

Requests = dict[str, Request]


def make_text_requests() -> tuple[Requests, Requests]:
    """The prompts of every text family, and those that continue some of them, by name."""
    rng = np.random.default_rng([0, 1])
    prompts = {str(n): rng.integers(0, 256, size=n).tolist() for n in LENGTHS}
    longer = {f"{n} and more": prompts[str(n)] + rng.integers(0, 256, size=6).tolist() for n in CONTINUED}
    return (
        {key: make_request(key, ids) for key, ids in prompts.items()},
        {key: make_request(key, ids) for key, ids in longer.items()},
    )


def make_vision_requests(family: str) -> tuple[Requests, Requests]:
    """Text alone, one image, two, images in two turns; and a second turn that brings the second image."""
    rng = np.random.default_rng([0, 2])
    images = rng.standard_normal((3, 3, SIDE, SIDE)).astype(np.float32)
    text = [rng.integers(0, 256, size=n).tolist() for n in (9, 14, 3, 24, 5)]
    parts: dict[str, list[Any]] = {
        "text": [text[3]],
        "one": [text[0], 0, text[1]],
        "two": [text[2], 0, 1, text[0]],
        "two turns": [text[4], 2, text[3], 1, text[2]],
    }
    longer: dict[str, list[Any]] = {"one and more": [*parts["one"], text[2], 2, text[4]]}
    if VISION[family].most == 1:
        parts = {"text": parts["text"], "one": parts["one"], "another": [text[2], 1, text[0]]}
        longer = {"one and more": [*parts["one"], text[2]]}
    return (
        {key: _join(family, key, some, images) for key, some in parts.items()},
        {key: _join(family, key, some, images) for key, some in longer.items()},
    )


def _join(family: str, name: str, parts: Sequence[list[int] | int], images: np.ndarray[Any, Any]) -> Request:
    """A request of texts and images, which are given by their index."""
    ids, spans = join_parts(family, parts)
    shown = [part for part in parts if isinstance(part, int)]
    if not shown:
        return make_request(name, ids)
    own = [hashlib.blake2b(images[index].tobytes(), digest_size=16).digest() for index in shown]
    digests = tuple(digest for digest in own for _ in range(VISION[family].runs))
    media = make_media(family, images[shown], ids)
    return make_request(name, ids, image_spans=tuple(spans), media=media, image_digests=digests)
