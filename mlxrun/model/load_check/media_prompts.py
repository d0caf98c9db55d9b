"""The prompts with media that the load check computes, and the library's embeddings of them.

The model's own template and processor make the prompts. The library must give the same embeddings of the same
images each time, and the same ones of an image alone and beside others.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlxrun.config.media_settings import Audio, Video
from mlxrun.core.errors import MediaError
from mlxrun.core.media_names import KINDS, PLURALS, MediaKind
from mlxrun.core.request import ProcessedPrompt
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.run.prompt_inputs import make_arrays, split_prompt
from mlxrun.model.vision.embedder import Embedder
from mlxrun.model.vision.image_units import find_regions

log = logging.getLogger(__name__)

SIZES = ((64, 64), (96, 64))  # pixels of the images, and of the frames of the videos
FRAMES = 4
SECONDS = (1.2, 1.9)  # of audio; below a second, some towers compute it otherwise beside other audio
MAX_TWO = 192  # tokens of a prompt with two images; if it has more, one image has to do
MAX_TOKENS = 1024  # tokens of a prompt that is computed at load
MAX_TOWER_TOKENS = 4096  # of one whose images alone are encoded
REPETITIONS = 2  # one right after the other, so that what changes with every call is found
GIVEN = ("_position_ids", "_rope_deltas", "_no_grad")


def list_media_prompts(info: LoadedModelInfo, kind: MediaKind = "image") -> list[ProcessedPrompt]:
    """A prompt with two media of a kind and text between, if it has few tokens, and a prompt with one.
    MediaError if the model's files make no such prompt of at most MAX_TOKENS tokens."""
    pair, single = _process(info, [kind] * 2), _process(info, [kind])
    limits = ((pair, MAX_TWO), (single, MAX_TOKENS))
    found = [made for made, most in limits if isinstance(made, ProcessedPrompt) and len(made.ids) <= most]
    return found or [_check_size(single, kind)]


def make_mixed_prompt(info: LoadedModelInfo, kinds: Sequence[MediaKind]) -> ProcessedPrompt:
    """A prompt with media of these kinds. MediaError as `list_media_prompts`."""
    return _check_size(_process(info, kinds), kinds[-1])


def make_image_prompt(info: LoadedModelInfo, side: int) -> ProcessedPrompt:
    """A prompt with an image of `side` x `side` pixels. MediaError if the model's files make none."""
    made = _process(info, ["image"], [(side, side)])
    if isinstance(made, MediaError):
        raise made
    return made


def make_pair(info: LoadedModelInfo, kind: MediaKind) -> ProcessedPrompt:
    """A prompt with two images or two videos, for the vision tower alone. MediaError as
    `list_media_prompts`."""
    return _check_size(_process(info, [kind] * 2), kind, MAX_TOWER_TOKENS)


def _check_size(
    made: ProcessedPrompt | MediaError, kind: MediaKind, most: int = MAX_TOKENS
) -> ProcessedPrompt:
    if isinstance(made, MediaError):
        raise made
    if len(made.ids) > most:
        raise MediaError(f"a prompt with a small {kind} has {len(made.ids)} tokens, too many for a check")
    return made


def _process(
    info: LoadedModelInfo, kinds: Sequence[MediaKind], sizes: Sequence[tuple[int, int]] = SIZES
) -> ProcessedPrompt | MediaError:
    """The prompt with media of these kinds, by the first text of which the processor makes their tokens.
    `sizes`: pixels of images and videos."""
    name = PLURALS[kinds[-1]]
    problem = MediaError(f"neither the chat template nor the processor has a placeholder for {name}")
    media: dict[MediaKind, list[Any]] = {kind: [] for kind in KINDS}
    for number, kind in enumerate(kinds):
        media[kind].append(_make_medium(info, kind, number, sizes))
    for text in _list_texts(info, kinds):
        try:
            made = info.process(text, *media.values())
        except Exception as error:  # the model's own processor may raise anything
            log.debug("load check: the processor of images failed", exc_info=True)
            problem = MediaError(f"{type(error).__name__}: {error}")
            continue
        if len(made.image_spans) >= len(set(kinds)):
            return made
    return problem


def _make_medium(
    info: LoadedModelInfo, kind: MediaKind, number: int, sizes: Sequence[tuple[int, int]]
) -> Any:
    """A small image, video or audio, another one for each number."""
    if kind == "audio":
        assert info.audio_sampling is not None
        return _make_audio(SECONDS[number], info.audio_sampling.rate)
    return _make_image(sizes[number]) if kind == "image" else _make_video(sizes[number])


def _list_texts(info: LoadedModelInfo, kinds: Sequence[MediaKind]) -> Iterator[str]:
    """What the chat template makes of a message with media; then plain text with placeholders of images."""
    parts = [part for kind in kinds for part in ({"type": "text", "text": "a"}, {"type": kind})]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "b"}]}]
    if info.chat_template is not None:
        try:
            yield info.tokenizer.apply_chat_template(
                messages, chat_template=info.chat_template, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # foreign code may raise anything
            log.debug("load check: the chat template failed", exc_info=True)
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


def _make_audio(seconds: float, rate: int) -> Audio:
    """Samples of noise."""
    samples = np.random.default_rng([9, round(seconds * 10)]).uniform(-0.3, 0.3, round(seconds * rate))
    return Audio(samples.astype(np.float32), rate)


def embed_by_library(model: Any, ids: Sequence[int], media: Mapping[str, Any]) -> dict[str, Any]:
    """The non-empty results of the library's own call for a prompt, by name."""
    tokens = mx.array([list(ids)])
    given = make_arrays(media)
    pixels = given.pop("pixel_values", None)
    made = model.get_input_embeddings(tokens, pixels, mask=mx.ones_like(tokens), **given).to_dict()
    return {name: value for name, value in made.items() if value is not None}


def measure_repetition(
    embedder: Embedder, prompt: ProcessedPrompt, before: Mapping[str, Any], own: Collection[str]
) -> float:
    """How far the library's embeddings of a prompt are from those `before`, in standard deviations. Meanwhile
    it embeds text, and the prompt's first image alone, if it can.

    ValueError if the model keeps arrays of the images, where another request would find them. `own`: names of
    the arrays that it kept before it saw any image.
    """
    model = embedder.model
    if kept := [name for name in find_kept_arrays(model) if name not in own]:
        raise ValueError(f"mlx-vlm keeps {', '.join(kept)} of the last images on the model")
    whole = split_prompt(prompt.ids, prompt.media, find_regions(prompt.ids, embedder.tokens, prompt.media))
    runs = None if whole is None else whole.split_places()
    if whole is not None and runs is not None and len(runs) > 1:
        part = whole.cut(runs, 0, 1)
        try:
            mx.eval(embed_by_library(model, part.tokens, part.media)["inputs_embeds"])
        except Exception:  # a library may raise anything; whether it can is for another check
            log.debug("load check: an image of a prompt cannot be embedded alone", exc_info=True)
    mx.eval(embed_by_library(model, prompt.ids[:1], {})["inputs_embeds"])
    again = [embed_by_library(model, prompt.ids, prompt.media)["inputs_embeds"] for _ in range(REPETITIONS)]
    return max(compare_arrays(found, before["inputs_embeds"]) for found in again)


def find_kept_arrays(model: Any) -> list[str]:
    """The attributes of a model and its language model with arrays that are no parameters: a call left them
    there. Positions are excluded, since the model caller gives them with each call."""
    found = []
    for module in (model, model.language_model):
        values = {**vars(module), **{key: module[key] for key in module}}
        for name, value in values.items():
            if name.startswith("_") and name not in GIVEN and not isinstance(value, nn.Module):
                found += [name] if any(isinstance(a, mx.array) for _, a in tree_flatten([value])) else []
    return sorted(set(found))


def measure_neighbours(embedder: Embedder, made: ProcessedPrompt) -> float:
    """How far the features of an image or video beside others are from those that it has alone, in standard
    deviations. ValueError if they cannot be told apart."""
    prompt = split_prompt(made.ids, made.media, find_regions(made.ids, embedder.tokens, made.media))
    runs = None if prompt is None else prompt.split_places()
    whole = embedder.embed_prompt(made.ids, made.media)
    if prompt is None or runs is None or whole.embeds is None or len(runs) < 2:
        raise ValueError("the images and videos of the prompt cannot be told apart")
    ranks = None if whole.visual_mask is None else np.cumsum(whole.visual_mask) - 1
    worst = 0.0
    for at, run in enumerate(runs):
        part = prompt.cut(runs, at, at + 1)
        alone = embedder.embed_prompt(part.tokens, part.media)
        assert alone.embeds is not None
        pairs = [(whole.embeds[0, mx.array(run)], alone.embeds[0, mx.array(part.places)])]
        if ranks is not None and alone.deepstack:  # the mask has kinds with deepstack features
            own = (features[mx.array(ranks[run])] for features in whole.deepstack)
            pairs += zip(own, alone.deepstack, strict=True)
        worst = max(worst, *(compare_arrays(*pair) for pair in pairs))
    return worst


def compare_arrays(found: mx.array, expected: mx.array) -> float:
    """The largest difference, in standard deviations of `expected`."""
    a, b = (np.array(x.astype(mx.float32)) for x in (found, expected))
    return float(np.abs(a - b).max() / (b.std() + 1e-9))
