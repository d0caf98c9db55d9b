"""Processed images and videos as units: the vision tower's input for each, split from the input for all.

Only known layouts are split. Anything else is one unit of all images and videos. The module also reads a
processor's video sampling, makes its arguments, and computes digests of videos.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np

from mlxrun.config.media_settings import Video, VideoSampling

log = logging.getLogger(__name__)
Media = Mapping[str, Any]
Span = tuple[int, int]

_TOKEN_KEYS = {
    kind: (f"{kind}_token_id", f"{kind}_token_index", *others)
    for kind, others in {
        "image": (
            *("im_patch_id", "im_patch_token", "image_patch_id", "image_patch_token_id"),
            *("img_context_token_id", "media_placeholder_token_id", "img_id"),
        ),
        "video": ("video_context_token_id",),
    }.items()
}
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # arrays [1, L] of whole prompts
VIDEO_KEYS = VIDEO_PIXELS, VIDEO_GRID = "pixel_values_videos", "video_grid_thw"


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """The placeholders of image and video features in prompts, and the token between the lines of an image.
    None if there is none."""

    image: int | None
    video: int | None = None
    line_break: int | None = None


@dataclass(frozen=True, slots=True)
class MediaRegion:
    """An image or a video in a prompt: `spans` of placeholders, with text or line breaks between."""

    is_video: bool
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class ImageUnits:
    """The arrays of each image or video. `axis`: the axis along which they are concatenated."""

    units: tuple[Media, ...]
    axis: int

    def compute_digests(self) -> list[bytes]:
        """A 16-byte digest of each unit."""
        return [_compute_digest(unit) for unit in self.units]

    def take(self, first: int, last: int) -> ImageUnits:
        """Units [first, last)."""
        return ImageUnits(self.units[first:last], self.axis)

    def concatenate(self, first: int, last: int) -> Media:
        """Units [first, last), as the processor would make them together."""
        some = self.units[first:last]
        parts = {key: [unit[key] for unit in some if key in unit] for unit in some for key in unit}
        return {key: np.concatenate(arrays, axis=self.axis) for key, arrays in parts.items()}


def read_media_token(config: Any, kind: str) -> int | None:
    """The placeholder of an `image` or a `video`, by the usual keys of configs, at the top or in a part.
    `config`: config.json, or an object with its values. None if there is none."""
    values = config if isinstance(config, Mapping) else vars(config)
    found = (values.get(name) for name in _TOKEN_KEYS[kind])
    token = next((value for value in found if isinstance(value, int)), None)
    if token is not None:
        return token
    parts = (part for part in values.values() if isinstance(part, Mapping) or is_dataclass(part))
    return next((token for part in parts if (token := read_media_token(part, kind)) is not None), None)


def find_regions(ids: Sequence[int], tokens: MediaTokens, media: Media) -> list[MediaRegion]:
    """The images and videos of a prompt, in order. The videos' grids in `media` tell which spans are one
    video. Without them, each span is one."""
    array = np.array(ids)
    kinds = np.zeros(len(array), np.int8)
    for kind, token in ((1, tokens.image), (2, tokens.video)):
        if token is not None:
            kinds[array == token] = kind
    edges = np.flatnonzero(np.diff(kinds, prepend=0, append=0)).tolist()
    spans = [span for span in zip(edges, edges[1:], strict=False) if kinds[span[0]]]
    lengths = [stop - start for start, stop in spans if kinds[start] == 2]
    videos = iter(_number_videos(lengths, media.get(VIDEO_GRID)))
    found: list[tuple[int | None, list[Span]]] = []  # the number of a video, None for an image
    for span in spans:
        number = next(videos) if kinds[span[0]] == 2 else None
        last, before = found[-1] if found else (None, [])
        if number is not None:
            same = last == number
        else:
            same = last is None and bool(before) and _is_line_break(array, before[-1], span, tokens)
        if same:
            before.append(span)
        else:
            found.append((number, [span]))
    return [MediaRegion(number is not None, tuple(group)) for number, group in found]


def _is_line_break(ids: np.ndarray, before: Span, span: Span, tokens: MediaTokens) -> bool:
    """Whether only the token that ends a line of an image is between two spans."""
    return span[0] == before[1] + 1 and tokens.line_break is not None and ids[before[1]] == tokens.line_break


def _number_videos(lengths: Sequence[int], grid: Any) -> list[int]:
    """The number of the video of each span, of which the lengths are given: a video has as many tokens as its
    part of all patches says."""
    alone = list(range(len(lengths)))
    if grid is None or not lengths:
        return alone
    patches = np.asarray(grid).prod(axis=-1)
    ends = np.cumsum(patches) * sum(lengths)
    stops = np.cumsum(lengths) * int(patches.sum())
    numbers = np.searchsorted(ends, stops)
    is_whole = set(ends.tolist()) <= set(stops.tolist())
    return numbers.tolist() if is_whole else alone


def split_images(media: Media, are_videos: Sequence[bool] = ()) -> ImageUnits | None:
    """The units of processed images and videos in the order of the prompt. None if they cannot be compared by
    their bytes. `are_videos`: whether each is a video, by the prompt. Token types are left out."""
    arrays = {key: np.asarray(value) for key, value in media.items() if key not in TOKEN_TYPES}
    if not arrays.keys() & {"pixel_values", VIDEO_PIXELS} or any(a.dtype.hasobject for a in arrays.values()):
        return None
    videos = {key: a for key, a in arrays.items() if key in VIDEO_KEYS}
    images = {key: a for key, a in arrays.items() if key not in videos}
    axis, parts = _split_kind(images, "pixel_values", "image_grid_thw")
    if not videos:
        return ImageUnits((arrays,) if parts is None else tuple(parts), 0 if parts is None else axis)
    clips = _split_kind(videos, VIDEO_PIXELS, VIDEO_GRID)[1]
    if (
        axis
        or parts is None
        or clips is None
        or [len(parts), len(clips)]
        != [sum(is_video == kind for is_video in are_videos) for kind in (False, True)]
    ):
        return ImageUnits((arrays,), 0)
    take = {False: iter(parts), True: iter(clips)}
    return ImageUnits(tuple(next(take[is_video]) for is_video in are_videos), 0)


def _split_kind(
    arrays: Mapping[str, np.ndarray], pixels_key: str, grid_key: str
) -> tuple[int, list[Media] | None]:
    """The axis and the units of images alone or of videos alone; None: not known."""
    if not arrays:
        return 0, []
    pixels, grid = arrays.get(pixels_key), arrays.get(grid_key)
    if pixels is None:
        return 0, None
    axis = 1 if grid is None and pixels.ndim == 5 and pixels.shape[0] == 1 else 0
    if grid is not None:
        patches = [int(n) for n in grid.prod(axis=-1)]
        lengths = {pixels_key: patches, grid_key: [1] * len(patches)}  # of each image, along the axis
        is_known = arrays.keys() == lengths.keys() and pixels.shape[0] == sum(patches)
    elif pixels.ndim == 4 + axis:
        lengths = {key: [1] * pixels.shape[axis] for key in arrays}
        is_known = all(a.ndim > axis and a.shape[axis] == pixels.shape[axis] for a in arrays.values())
    else:
        return 0, None
    if not is_known:
        return 0, None
    parts = {key: np.split(a, np.cumsum(lengths[key])[:-1], axis=axis) for key, a in arrays.items()}
    return axis, [dict(zip(parts, unit, strict=True)) for unit in zip(*parts.values(), strict=True)]


def _compute_digest(media: Media) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for key in sorted(media):
        array = np.ascontiguousarray(media[key])
        found.update(f"{key} {array.dtype} {array.shape} ".encode())
        found.update(array.data)
    return found.digest()


def read_video_sampling(processor: Any, config: Mapping[str, Any]) -> VideoSampling | None:
    """How a processor samples frames of a video, by the library. None if the model takes no videos, or has
    its own rule for frames."""
    from mlx_vlm.generate.video import processor_handles_video
    from mlx_vlm.utils import resolve_video_sampling

    if read_media_token(config, "video") is None or not processor_handles_video(processor):
        return None
    component = processor.video_processor
    if getattr(component, "sample_frames_in_loader", False):
        log.info("videos are not accepted: the model's processor chooses frames by a rule of its own")
        return None
    found = resolve_video_sampling(processor, {})
    # What the library merges is checked here, since it may come from a checkpoint's files.
    numbers = (found.fps, found.min_frames, found.max_frames, found.frame_factor)
    if found.nframes is not None or not all(isinstance(n, (int, float)) and n > 0 for n in numbers):
        return None
    return VideoSampling(float(found.fps), *(int(n) for n in numbers[1:]))


def list_video_arguments(videos: Sequence[Video]) -> dict[str, Any]:
    """The arguments of mlx-vlm's `prepare_inputs` for these videos."""
    if not videos:
        return {}
    described = [
        {
            "total_num_frames": video.total,
            "fps": video.fps,
            "frames_indices": list(video.indices),
            "width": video.frames.shape[3],
            "height": video.frames.shape[2],
            "duration": video.total / video.fps,
        }
        for video in videos
    ]
    return {"videos": [video.frames for video in videos], "video_metadata": described}


def compute_video_digest(video: Video, settings: bytes = b"") -> bytes:
    """A 16-byte digest of a video's frames, their times, and its processor's settings."""
    found = hashlib.blake2b(settings, digest_size=16)
    found.update(f"video {video.frames.shape} {video.indices} {video.total} {video.fps!r}".encode())
    for frame in video.frames:
        found.update(np.ascontiguousarray(frame).data)
    return found.digest()
