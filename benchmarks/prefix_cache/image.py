"""The `image` scenario: a picture, then another question about it, prepared as a chat request is.

The vision tower's calls are counted on the loaded model: a warm request should make none.
"""

from __future__ import annotations

import asyncio
import base64
import io
import random
from collections.abc import Callable
from typing import Any

from benchmarks.prefix_cache.workloads import LEAST_OUTPUT, PromptCase, Script
from mlxrun.config.settings import Config
from mlxrun.core.errors import MlxrunError

SIDE = 128  # pixels
SYSTEM, QUESTION = 512, 12  # words
LEAST_SYSTEM = 64
WORDS = tuple(f"word{i}" for i in range(64))


def count_calls(model: Any) -> Callable[[], int]:
    """Count the model's vision tower from now on."""
    tower, calls = model.vision_tower, [0]
    kind = type(tower)

    class Counted(kind):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            return super().__call__(*args, **kwargs)

    tower.__class__ = Counted
    return lambda: calls[0]


def make_image_script(model_info: Any, config: Config, scale: float, seed: str) -> Script:
    """Two questions about one image, which no earlier seed has shown."""
    rng = random.Random(f"image {seed}")
    system, image = _draw_words(rng, max(LEAST_SYSTEM, round(SYSTEM * scale))), _draw_picture(rng)
    for warm in (False, True):
        question = _draw_words(rng, QUESTION)
        request = _prepare(model_info, config, system, image, question)
        yield PromptCase(
            "warm" if warm else "cold",
            request.prompt,
            LEAST_OUTPUT,
            request.cache_positions,
            clear_before=not warm,
            request=request,
        )


def _draw_words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def _draw_picture(rng: random.Random) -> str:
    """Random blocks, as a data URL."""
    from PIL import Image

    small = Image.frombytes("RGB", (8, 8), rng.randbytes(3 * 64))
    out = io.BytesIO()
    small.resize((SIDE, SIDE), Image.Resampling.NEAREST).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def _prepare(model_info: Any, config: Config, system: str, image: str, question: str) -> Any:
    """The Request that a front end makes of such a chat."""
    from mlxrun.api.openai.request import prepare_request
    from mlxrun.api.prepared import ApiContext
    from mlxrun.api.text.media.images import MediaLoader

    content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": question}]
    messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]
    body = {"messages": messages, "max_tokens": LEAST_OUTPUT, "seed": 0}
    context = ApiContext(model_info, config, MediaLoader(config.media, None))
    prepared = asyncio.run(prepare_request("/v1/chat/completions", body, context))
    (request,) = prepared.requests
    if not request.image_spans:
        raise MlxrunError("bench: the model's processor made no image tokens")
    return request
