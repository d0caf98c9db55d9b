"""The prompts of the sweep: of several lengths for text, with images for vision-language models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.sweep.checks import make_request
from benchmarks.tiny.omni_families import FAMILIES
from benchmarks.tiny.omni_models import Part, make_audio, render
from benchmarks.tiny.processor_files import PROCESSORS
from benchmarks.tiny.vision_families import VISION
from benchmarks.tiny.vision_prompts import PLACEHOLDER
from mlxrun.core.request import Request
from mlxrun.model.load.model_info import LoadedModelInfo

LENGTHS = (1, 3, 9, 20, 45, 80)  # tokens of the prompts; the windows of the tiny models hold 8
CONTINUED = (20, 80)  # prompts that another one continues
PICTURES = ((90, 50), (40, 100), (30, 30))  # width and height in pixels: wide, tall, tiny

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


def make_vision_requests(family: str, info: LoadedModelInfo) -> tuple[Requests, Requests]:
    """Text alone, one image, two, images in two turns; and a second turn that brings the second image. The
    model's own processor makes pixels and tokens, if it has one. MediaError if it refuses an image."""
    rng = np.random.default_rng([0, 2])
    text = ["".join(map(chr, rng.integers(97, 123, size=n))) for n in (9, 14, 3, 24, 5)]
    parts: dict[str, list[Any]] = {
        "text": [text[3]],
        "one": [text[0], 0, text[1]],
        "two": [text[2], 0, text[4], 1, text[0]],
        "two turns": [text[4], 2, text[3], 1, text[2]],
    }
    longer: dict[str, list[Any]] = {"one and more": [*parts["one"], text[2], 2, text[4]]}
    if VISION[family].most == 1:
        parts = {"text": parts["text"], "one": parts["one"], "another": [text[2], 1, text[0]]}
        longer = {"one and more": [*parts["one"], text[2]]}
    made = [
        {key: _make_vision_request(family, info, key, some) for key, some in every.items()}
        for every in (parts, longer)
    ]
    return made[0], made[1]


def _make_vision_request(
    family: str, info: LoadedModelInfo, name: str, parts: Sequence[str | int]
) -> Request:
    """A request of texts and of pictures, which are given by their index."""
    placeholder = PROCESSORS[family].placeholder if family in PROCESSORS else PLACEHOLDER
    text = "".join(part if isinstance(part, str) else placeholder for part in parts)
    shown = [_make_picture(*PICTURES[part]) for part in parts if isinstance(part, int)]
    if not shown:
        return make_request(name, info.tokenizer.encode(text, add_special_tokens=False))
    made = info.process(text, shown)
    given = {"image_spans": made.image_spans, "media": made.media, "image_digests": made.image_digests}
    return make_request(name, made.ids, **given)


def list_audio_prompts(family: str, seed: int = 1) -> tuple[dict[str, list[Part]], dict[str, list[Part]]]:
    """Prompts with sounds, as parts: text alone, one sound, two, and a sound beside an image, as far as the
    family takes them; and one that goes on. `seed`: of the sounds."""
    one, other = make_audio(seed, 0.4), make_audio(seed + 1, 1.3)
    entry, picture = FAMILIES[family], _make_picture(32, 32)
    prompts: dict[str, list[Part]] = {"text": ["nothing to hear"], "one": ["what is ", other, " about?"]}
    if entry.several:
        prompts["two"] = ["is ", one, " in ", other, "?"]
    if entry.beside:
        prompts["image"] = ["is ", one, " in ", picture, "?"]
    return prompts, {"one and more": [*prompts["one"], " And then?"]}


def make_audio_request(family: str, info: LoadedModelInfo, name: str, parts: Sequence[Part]) -> Request:
    """A request of texts, images and sounds, by the model's own processor."""
    text, images, videos, audio = render(family, parts)
    if not (images or audio):
        return make_request(name, info.tokenizer.encode(text, add_special_tokens=False))
    made = info.process(text, images, videos, audio)
    given = {"image_spans": made.image_spans, "media": made.media, "image_digests": made.image_digests}
    return make_request(name, made.ids, **given)


def _make_picture(width: int, height: int) -> Any:
    """An RGB image of random pixels."""
    from PIL import Image

    pixels = np.random.default_rng([3, width, height]).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
