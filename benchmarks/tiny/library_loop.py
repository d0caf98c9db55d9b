"""What a prompt must give: greedy, cold and alone, through the library's own loop for one request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrun.model.hooks.given_embeddings import hook_embeddings
from mlxrun.model.hooks.single_placeholders import hook_placeholders
from mlxrun.model.hooks.tile_features import hook_tiles
from mlxrun.model.load.model_files import read_json
from mlxrun.model.run.prompt_inputs import make_arrays
from mlxrun.model.vision.placeholders import FEATURE_TOKEN, find_placeholder

TIE = 1e-5  # difference of two logprobs that rounding may turn round


@dataclass(frozen=True, slots=True)
class LibraryAnswer:
    """`prompt`: token ids with image placeholders expanded; `logprobs`: [tokens, vocabulary], float32."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: np.ndarray[Any, Any]

    def measure(self, tokens: Sequence[int], logprobs: Sequence[float]) -> float:
        """The largest difference of the logprobs of `tokens` from this answer's; infinite where a token is
        another one. What follows two equally likely tokens is not compared."""
        if not 0 < len(tokens) <= len(self.tokens):
            return math.inf
        worst = 0.0
        for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            difference = float(abs(logprob - self.logprobs[i, token]))
            worst = max(worst, difference if math.isfinite(difference) else math.inf)
            if token != self.tokens[i]:
                tie = self.logprobs[i, self.tokens[i]] - self.logprobs[i, token] < TIE
                return worst if tie else math.inf
        return worst


def answer_text(folder: Path, prompt: Sequence[int], count: int, step: int = 2048) -> LibraryAnswer:
    """The answer of an mlx-lm model; `step`: tokens that the library prefills at once."""
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    return _collect(
        prompt, generate_step(mx.array(list(prompt)), model, max_tokens=count, prefill_step_size=step)
    )


def _collect(prompt: Sequence[int], steps: Iterable[Any]) -> LibraryAnswer:
    tokens, rows = zip(*((int(token), np.array(row, dtype=np.float32)) for token, row in steps), strict=True)
    return LibraryAnswer(tuple(prompt), tokens, np.stack(rows))


def answer_media(folder: Path, rendered: tuple[str, Any, Any, Any], count: int) -> LibraryAnswer:
    """The answer of an mlx-vlm model to a rendered text with its images, videos and sounds, which the
    library's own `prepare_inputs` processes."""
    from mlx_vlm import load
    from mlx_vlm.generate.ar import generate_step
    from mlx_vlm.utils import prepare_inputs

    model, processor = load(str(folder))
    text, images, videos, sounds = rendered
    assert not videos
    samples = [each.samples for each in sounds]
    given: Any = dict(prepare_inputs(processor, images=images or None, audio=samples or None, prompts=text))
    ids, pixels, mask = (given.pop(key, None) for key in ("input_ids", "pixel_values", "attention_mask"))
    steps = generate_step(ids, model, pixels, mask, max_tokens=count, temperature=0.0, **given)
    return _collect(ids[0].tolist(), steps)


def answer_vision(
    folder: Path, prompt: Sequence[int], media: Mapping[str, Any] | None, count: int
) -> LibraryAnswer:
    """The answer of an mlx-vlm model; `media`: as its processor makes them, None without images. Where the
    library places features wrongly, they are placed as transformers does (tile_features.py); where it leaves
    them out, they are given (given_embeddings.py)."""
    from mlx_vlm.generate.ar import generate_step
    from mlx_vlm.utils import load_model

    model, config = load_model(folder), read_json(folder / "config.json")
    hook_tiles(model, config)
    hook_embeddings(model)
    inputs = make_arrays(media or {})
    pixels = inputs.pop("pixel_values", None)
    single = find_placeholder(config)
    given = list(prompt)
    if single is not None and pixels is not None and len(pixels) == 1:
        at = given.index(FEATURE_TOKEN)
        given = [*given[:at], single.token, *given[at + given.count(FEATURE_TOKEN) :]]
    else:  # of families whose prompts have one token for each feature, MiniCPM-o alone has this hook
        hook_placeholders(model, config)
    ids = mx.array([given])
    steps = generate_step(ids, model, pixels, mx.ones_like(ids), max_tokens=count, temperature=0.0, **inputs)
    return _collect(prompt, steps)
