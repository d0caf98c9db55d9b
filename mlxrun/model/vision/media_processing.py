"""Prompts with media as the model's own processor makes them, and the digests of what they show."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlxrun.config.media_settings import Audio, Video
from mlxrun.core.errors import MediaError
from mlxrun.core.media_names import PLURALS, MediaKind
from mlxrun.core.request import ProcessedPrompt
from mlxrun.model.load.processor_files import list_arrays
from mlxrun.model.vision.image_units import (
    MediaRegion,
    MediaTokens,
    compute_audio_digests,
    find_regions,
    group_by_kind,
    read_media_token,
)
from mlxrun.model.vision.media_sampling import list_video_arguments
from mlxrun.model.vision.placeholders import FEATURE_TOKEN, find_placeholder

# How many times as long as the other a side of an image may be: the limit of many families. Other processors
# enlarge the shorter side first, and a line of 2,000 pixels would take gigabytes.
MOST_TIMES = 200


def call_processor(
    processor: Any,
    config: Mapping[str, Any],
    text: str,
    images: Sequence[Any],
    videos: Sequence[Video],
    audio: Sequence[Audio],
) -> dict[str, Any]:
    """The arrays of a rendered prompt with one placeholder for each image, video and audio. `config`: the
    model's config.json. MediaError if the processor refuses them."""
    from mlx_vlm.utils import prepare_inputs

    for image in images:
        times = max(image.size) / min(image.size)
        if times > MOST_TIMES:
            raise MediaError(
                f"a side of an image is {times:,.0f} times as long as the other; it must be less than "
                f"{MOST_TIMES} times"
            )
    single = find_placeholder(config)
    token = read_media_token(config, "image") if single is None else single.token
    given: dict[str, Any] = {"images": list(images)} if images else {}
    if audio:
        given["audio"] = [each.samples for each in audio]
    try:
        given |= list_video_arguments(videos)
        made = prepare_inputs(processor, prompts=[text], image_token_index=token, **given)
        return list_arrays(processor, made)
    except (ValueError, TypeError, IndexError, KeyError) as error:
        name = PLURALS["video" if videos else "audio" if audio and not images else "image"]
        raise MediaError(f"the model's processor refused the {name}: {error}") from error


def make_prompt(
    processor: Any,
    config: Mapping[str, Any],
    settings: bytes,
    arrays: dict[str, Any],
    images: Sequence[Any],
    videos: Sequence[Video],
    audio: Sequence[Audio],
) -> ProcessedPrompt:
    """The prompt of a processor's arrays. `settings`: a digest of the processor's. MediaError if the arrays
    are not those of one prompt with these media."""
    prompts = np.atleast_2d(arrays.pop("input_ids"))
    if len(prompts) > 1:
        raise MediaError(
            f"the model's processor makes {len(prompts)} prompts of {len(images)} images: this model "
            "takes one image in a prompt"
        )
    if any(key.startswith(("image_grid", "grid_")) and not np.all(arrays[key]) for key in arrays):
        raise MediaError("an image is too small for this model: its processor makes no patch of it")
    ids = tuple(int(i) for i in prompts[0])
    for unused in ("attention_mask", "labels"):
        arrays.pop(unused, None)
    if audio and "audio" not in group_by_kind(arrays):
        raise MediaError(f"the processor's arrays of audio are not known: {', '.join(sorted(arrays))}")
    single = find_placeholder(config)
    line_break = getattr(processor, "image_break_token_id", None)
    tokens = MediaTokens.read(config, line_break, None if single is None else FEATURE_TOKEN)
    if single is not None:
        ids = single.expand(ids, arrays)
    regions = find_regions(ids, tokens, arrays)
    heard = sum(region.kind == "audio" for region in regions)
    if heard != len(audio):
        raise MediaError(f"the model's processor has places for {heard} of {len(audio)} audio parts")
    digests: dict[MediaKind, Sequence[bytes]] = {
        "image": [compute_image_digest(image, settings) for image in images],
        "video": [compute_video_digest(video, settings) for video in videos],
        "audio": compute_audio_digests(arrays, settings) if audio else [],
    }
    spans = tuple(span for region in regions for span in region.spans)
    return ProcessedPrompt(ids, spans, arrays, _digest_spans(regions, digests))


def _digest_spans(
    regions: Sequence[MediaRegion], own: Mapping[MediaKind, Sequence[bytes]]
) -> tuple[bytes, ...]:
    """A digest of each span: of its own medium where that is known, else of all in order. `own`: the digests
    of each kind."""
    kinds = [region.kind for region in regions]
    if [kinds.count(kind) for kind in own] == list(map(len, own.values())):
        take = {kind: iter(digests) for kind, digests in own.items()}
        digests = [next(take[kind]) for kind in kinds]
    else:
        every = hashlib.blake2b(b"".join(itertools.chain(*own.values())), digest_size=16).digest()
        digests = [every] * len(kinds)
    spans = zip(digests, regions, strict=True)
    return tuple(digest for digest, region in spans for _ in region.spans)


def compute_image_digest(image: Any, settings: bytes = b"") -> bytes:
    """A 16-byte digest of an image's decoded pixels and of its processor's settings."""
    found = hashlib.blake2b(settings, digest_size=16)
    found.update(f"{image.mode} {image.size}".encode())
    if image.mode in ("P", "PA"):
        found.update(bytes(image.getpalette() or b""))
    found.update(image.tobytes())
    return found.digest()


def compute_video_digest(video: Video, settings: bytes = b"") -> bytes:
    """A 16-byte digest of a video's frames, their times, and its processor's settings."""
    found = hashlib.blake2b(settings, digest_size=16)
    found.update(f"video {video.frames.shape} {video.indices} {video.total} {video.fps!r}".encode())
    for frame in video.frames:
        found.update(np.ascontiguousarray(frame).data)
    return found.digest()
