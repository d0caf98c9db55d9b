"""ORACLE: what a request must give: greedy, cold, alone, float32, through the library's own one-request loop.

Each call loads the model anew (10 ms), so that none sees what another left behind. Logprobs are full rows.
`Answer.gap` tells how far apart the two best tokens ever were: below 1e-3 equality of tokens proves little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image

from mlxrun.config.media_settings import Audio, Video

TOLERANCE = 1e-4
TIE = 1e-5  # between logprobs


@dataclass(frozen=True)
class Answer:
    """`ids` is the prompt as the model saw it, placeholders expanded; `logprobs` is [tokens, vocabulary]."""

    ids: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: np.ndarray

    @property
    def chosen(self) -> np.ndarray:
        return self.logprobs[np.arange(len(self.tokens)), list(self.tokens)]

    @property
    def gap(self) -> float:
        best = np.sort(self.logprobs, axis=-1)
        return float((best[:, -1] - best[:, -2]).min())

    def check(self, tokens: Sequence[int], logprobs: Any = None, tolerance: float = TOLERANCE) -> None:
        """Fail unless these are the first tokens of the answer; logprobs: of the chosen, or full rows.

        Two tokens that are equally likely but for rounding are both right; what follows is then not compared.
        """
        n = len(tokens)
        assert n > 0, "nothing to compare"
        first = next((i for i in range(n) if tokens[i] != self.tokens[i]), n)
        if first < n:
            best, other = self.logprobs[first, [self.tokens[first], tokens[first]]]
            assert best - other < TIE, f"{list(tokens)} is not {list(self.tokens[:n])}, gap {self.gap:.2g}"
        if logprobs is not None:
            known = min(first + 1, n)
            found = np.asarray(logprobs, dtype=np.float32)[:known]
            wanted = self.logprobs[:known]
            if found.ndim == 1:
                wanted = wanted[np.arange(known), list(tokens[:known])]
            off = float(np.abs(found - wanted).max())
            assert off < tolerance, f"logprobs are off by {off:.2g}"


def text_answer(
    folder: Path,
    ids: Sequence[int],
    count: int = 24,
    step: int = 512,
    adapter: str | None = None,
    **options: Any,
) -> Answer:
    """The answer of an mlx_lm model; `step` is the library's prefill step: 1 is one token at a time, and
    gives the same. `adapter`: a folder with a LoRA adapter. `options`: of its `generate_step`."""
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_adapters, load_model

    model, _ = load_model(folder)
    if adapter is not None:
        model = load_adapters(model, adapter)
        model.eval()
    prompt = mx.array(list(ids))
    steps = generate_step(prompt, model, max_tokens=count, prefill_step_size=step, **options)
    return _collect(ids, steps)


def text_scores(folder: Path, ids: Sequence[int]) -> np.ndarray:
    """The logprobs [tokens, vocabulary] that follow each token of a prompt, by one forward of the library."""
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    logits = model(mx.array([list(ids)]), cache=make_prompt_cache(model))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def vision_scores(folder: Path, prompt: str, images: Sequence[Image.Image]) -> tuple[list[int], np.ndarray]:
    """The token ids of a prompt with images, and the same logprobs of them."""
    from mlx_vlm import load
    from mlx_vlm.models.cache import make_prompt_cache

    model, processor = load(str(folder))
    inputs = vision_inputs(processor, prompt, images)
    ids, pixels, mask = (inputs.pop(key, None) for key in ("input_ids", "pixel_values", "attention_mask"))
    made = model.get_input_embeddings(ids, pixels, mask=mask, **inputs).to_dict()
    inputs |= {name: value for name, value in made.items() if value is not None}
    cache = make_prompt_cache(model.language_model)
    logits = model.language_model(ids, cache=cache, **inputs).logits[0].astype(mx.float32)
    return ids[0].tolist(), np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def vision_answer(
    folder: Path,
    prompt: str | Sequence[int],
    images: Sequence[Image.Image] = (),
    count: int = 24,
    videos: Sequence[Video] = (),
    audio: Sequence[Audio] = (),
) -> Answer:
    """The answer of an mlx_vlm model to rendered text with one placeholder for each medium, or to token
    ids."""
    from mlx_vlm import load
    from mlx_vlm.generate.ar import generate_step

    model, processor = load(str(folder))
    inputs = vision_inputs(processor, prompt, images, videos, audio)
    ids, pixels, mask = (inputs.pop(key, None) for key in ("input_ids", "pixel_values", "attention_mask"))
    steps = generate_step(ids, model, pixels, mask, max_tokens=count, temperature=0.0, **inputs)
    return _collect(ids[0].tolist(), steps)


def vision_inputs(
    processor: Any,
    prompt: str | Sequence[int],
    images: Sequence[Image.Image],
    videos: Sequence[Video] = (),
    audio: Sequence[Audio] = (),
) -> dict[str, Any]:
    """What the library's processor makes of a prompt: input_ids, attention_mask, pixel_values and more."""
    from mlx_vlm.utils import VideoMetadata, prepare_inputs

    if isinstance(prompt, str):
        given: dict[str, Any] = {}
        if videos:
            reported = [VideoMetadata(v.total, v.fps, list(v.indices)) for v in videos]
            given = {"videos": [v.frames for v in videos], "video_metadata": reported}
        if audio:
            given["audio"] = [each.samples for each in audio]
        return dict(prepare_inputs(processor, images=list(images) or None, prompts=prompt, **given))
    ids = mx.array([list(prompt)])
    return {"input_ids": ids, "attention_mask": mx.ones_like(ids)}


def _collect(ids: Sequence[int], steps: Any) -> Answer:
    tokens, rows = zip(*((int(token), np.array(row)) for token, row in steps), strict=True)
    return Answer(tuple(ids), tokens, np.stack(rows))
