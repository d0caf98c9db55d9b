"""Prompts with text, images, videos and audio for the tiny models of omni_families.py. `render` writes a
placeholder for each medium; `make_audio` makes audio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.tiny.omni_families import FAMILIES, RATE
from mlxrun.config.media_settings import Audio, Video

MEDIA: tuple[type[Any], ...] = (Image.Image, Video, Audio)
Part = str | Image.Image | Video | Audio
OMNI = tuple(name for name, entry in FAMILIES.items() if not entry.refused)


def render(family: str, parts: Sequence[Part]) -> tuple[str, list[Image.Image], list[Video], list[Audio]]:
    """A user's turn in ChatML, and its images, videos and audio."""
    marks = dict(zip(MEDIA, FAMILIES[family].placeholders, strict=True))
    texts = [next((marks[kind] for kind in MEDIA if isinstance(part, kind)), part) for part in parts]
    text = f"<|im_start|>user\n{''.join(map(str, texts))}<|im_end|>\n<|im_start|>assistant\n"
    images, videos, audio = ([part for part in parts if isinstance(part, kind)] for kind in MEDIA)
    return text, images, videos, audio


def make_audio(seed: int, seconds: float = 0.5) -> Audio:
    """Tones and noise, other ones for each seed."""
    rng = np.random.default_rng([seed, 3])
    at = np.arange(round(seconds * RATE)) / RATE
    tones = [np.sin(2 * np.pi * hertz * at) for hertz in rng.uniform(100, 4000, 3)]
    samples = 0.2 * np.sum(tones, axis=0) + rng.uniform(-0.1, 0.1, len(at))
    return Audio(samples.astype(np.float32), RATE)
