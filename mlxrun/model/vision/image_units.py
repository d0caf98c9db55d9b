"""Processed images, videos and audio as units: the tower's input for each, split from the input for all.

Only known layouts are split. Anything else is one unit of all media of a prompt. Images of different sizes
may be a tuple of arrays, one for each. Their digests are here too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np

from mlxrun.core.media_names import KINDS, MediaKind

Media = Mapping[str, Any]
Span = tuple[int, int]

_OTHER_TOKEN_KEYS: dict[MediaKind, tuple[str, ...]] = {
    "image": (
        *("im_patch_id", "im_patch_token", "image_patch_id", "image_patch_token_id"),
        *("img_context_token_id", "media_placeholder_token_id", "img_id"),
    ),
    "video": ("video_context_token_id",),
    "audio": ("sound_context_token_id",),
}
_TOKEN_KEYS: dict[MediaKind, tuple[str, ...]] = {
    kind: (f"{kind}_token_id", f"{kind}_token_index", *others) for kind, others in _OTHER_TOKEN_KEYS.items()
}
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # arrays [1, L] of whole prompts
VIDEO_PIXELS, VIDEO_GRID = "pixel_values_videos", "video_grid_thw"
VIDEO_FRAMES = "num_frames_per_video"
# What the tower of each kind sees: one of these, by family.
_TOWER_KEYS: dict[MediaKind, tuple[str, ...]] = {
    "image": ("pixel_values",),
    "video": (VIDEO_PIXELS,),
    "audio": ("input_features", "audio_features", "input_audio_embeds", "audio_input_ids"),
}
# Where features are in a prompt [n, 2], of families whose placeholders do not tell what they are of.
BOUNDS: dict[str, MediaKind] = {"image_bound": "image", "audio_bounds": "audio"}
# Other arrays that are surely of the kind.
_KEYS: dict[MediaKind, tuple[str, ...]] = {
    "image": ("image_grid_thw", "image_bound"),
    "video": (VIDEO_GRID, "video_second_per_grid", "video_position_ids", VIDEO_FRAMES),
    "audio": (
        *("input_features_mask", "feature_attention_mask", "audio_feature_lengths"),
        *("audio_feature_lens", "audio_bounds", "audio_embed_sizes", "audio_attention_mask"),
        "audio_input_ids_mask",
    ),
}
# Placeholders that are in the library's code, where configs do not name them.
_UNNAMED: dict[tuple[str, MediaKind], int] = {("phi4mm", "audio"): 200011}


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """The placeholders of image, video and audio features in prompts, and the token between the lines of an
    image. None if there is none."""

    image: int | None
    video: int | None = None
    line_break: int | None = None
    audio: int | None = None

    @staticmethod
    def read(config: Any, line_break: int | None, feature: int | None = None) -> MediaTokens:
        """The placeholders that a config names. `config`: as in `read_media_token`; `feature`: that of image
        features, if it is another."""
        image, video, audio = (read_media_token(config, kind) for kind in KINDS)
        return MediaTokens(image if feature is None else feature, video, line_break, audio)

    @property
    def by_kind(self) -> dict[MediaKind, int]:
        """The placeholder of each kind that has one."""
        found: dict[MediaKind, int | None] = {"image": self.image, "video": self.video, "audio": self.audio}
        return {kind: token for kind, token in found.items() if token is not None}


@dataclass(frozen=True, slots=True)
class MediaRegion:
    """An image, a video or audio in a prompt: `spans` of placeholders, with text or line breaks between."""

    kind: MediaKind
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class ImageUnits:
    """The arrays of each image, video or audio. `axis`: the axis along which they are concatenated."""

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
        return {key: _join(arrays, self.axis) for key, arrays in parts.items()}


def _join(arrays: Sequence[np.ndarray], axis: int) -> np.ndarray | tuple[np.ndarray, ...]:
    """One array, or those of images that differ in size."""
    if len({(*array.shape[:axis], *array.shape[axis + 1 :]) for array in arrays}) > 1:
        return tuple(each for array in arrays for each in array)
    return np.concatenate(arrays, axis=axis)


def read_media_token(config: Any, kind: MediaKind) -> int | None:
    """The placeholder of a `kind` of media, by the usual keys of configs, at the top or in a part.
    `config`: config.json, or an object with its values. None if there is none."""
    values = config if isinstance(config, Mapping) else vars(config)
    found = (values.get(name) for name in _TOKEN_KEYS[kind])
    token = next((value for value in found if isinstance(value, int)), None)
    token = _UNNAMED.get((str(values.get("model_type")), kind)) if token is None else token
    if token is not None:
        return token
    parts = (part for part in values.values() if isinstance(part, Mapping) or is_dataclass(part))
    return next((token for part in parts if (token := read_media_token(part, kind)) is not None), None)


def find_regions(ids: Sequence[int], tokens: MediaTokens, media: Media) -> list[MediaRegion]:
    """The images, videos and audio of a prompt, in order. The videos' grids or frames in `media` tell which
    spans are one video. Without them, each span is one. BOUNDS in `media` are spans too."""
    array = np.array(ids)
    kinds = np.zeros(len(array), np.int8)
    for kind, token in tokens.by_kind.items():
        kinds[array == token] = KINDS.index(kind) + 1
    for key in BOUNDS.keys() & media.keys():
        for start, stop in np.asarray(media[key]).reshape(-1, 2).tolist():
            kinds[start:stop] = KINDS.index(BOUNDS[key]) + 1
    edges = np.flatnonzero(np.diff(kinds, prepend=0, append=0)).tolist()
    spans = [
        (KINDS[kinds[span[0]] - 1], span) for span in zip(edges, edges[1:], strict=False) if kinds[span[0]]
    ]
    lengths = [stop - start for kind, (start, stop) in spans if kind == "video"]
    videos = iter(_number_videos(lengths, media.get(VIDEO_GRID), media.get(VIDEO_FRAMES)))
    found: list[tuple[MediaKind, int, list[Span]]] = []  # with the number of a video
    for kind, span in spans:
        number = next(videos) if kind == "video" else 0
        last, last_number, before = found[-1] if found else ("", 0, [])
        is_same = (kind, number) == (last, last_number)
        if is_same and (
            kind == "video" or (kind == "image" and _is_line_break(array, before[-1], span, tokens))
        ):
            before.append(span)
        else:
            found.append((kind, number, [span]))
    return [MediaRegion(kind, tuple(group)) for kind, _, group in found]


def _is_line_break(ids: np.ndarray, before: Span, span: Span, tokens: MediaTokens) -> bool:
    """Whether only the token that ends a line of an image is between two spans."""
    return span[0] == before[1] + 1 and tokens.line_break is not None and ids[before[1]] == tokens.line_break


def _number_videos(lengths: Sequence[int], grid: Any, frames: Any) -> list[int]:
    """The number of the video of each span, of which the lengths are given: a video has as many tokens as its
    part of all patches says. `frames`: of each video, if each has a span."""
    alone = list(range(len(lengths)))
    if frames is not None and sum(frames) == len(lengths):
        return np.repeat(np.arange(len(frames)), frames).tolist()
    if grid is None or not lengths:
        return alone
    patches = np.asarray(grid).prod(axis=-1)
    ends = np.cumsum(patches) * sum(lengths)
    stops = np.cumsum(lengths) * int(patches.sum())
    numbers = np.searchsorted(ends, stops)
    is_whole = set(ends.tolist()) <= set(stops.tolist())
    return numbers.tolist() if is_whole else alone


def find_tower_array(kind: MediaKind, media: Media) -> Any:
    """What the tower of this kind sees of a processed prompt; None if it sees nothing."""
    return next((media[key] for key in _TOWER_KEYS[kind] if key in media), None)


def group_by_kind(media: Media) -> dict[MediaKind, Media]:
    """The arrays of each kind of media that a processed prompt has. Token types are left out."""
    kinds = {key: kind for kind in KINDS for key in (*_TOWER_KEYS[kind], *_KEYS[kind])}
    shown = [kind for kind in KINDS if find_tower_array(kind, media) is not None]
    found: dict[MediaKind, dict[str, Any]] = {kind: {} for kind in shown or KINDS[:1]}
    others = next(iter(found))  # the kind of arrays with unknown names
    for key, value in media.items():
        if key not in TOKEN_TYPES:
            kind = kinds.get(key, others)
            found[kind if kind in found else others][key] = value
    return {kind: arrays for kind, arrays in found.items() if arrays}


def split_images(media: Media, kinds: Sequence[MediaKind] = ()) -> ImageUnits | None:
    """The units of processed media in the order of the prompt. None if they cannot be compared by their
    bytes. `kinds`: of each, by the prompt. Token types are left out."""
    arrays = {
        key: value if isinstance(value, tuple) else np.asarray(value)
        for key, value in media.items()
        if key not in TOKEN_TYPES
    }
    groups = group_by_kind(arrays)
    is_known = any(find_tower_array(kind, arrays) is not None for kind in KINDS)
    if not is_known or any(not isinstance(a, tuple) and a.dtype.hasobject for a in arrays.values()):
        return None
    if groups.keys() == {"image"}:
        axis, parts = _split_images(arrays)
        return ImageUnits((arrays,) if parts is None else tuple(parts), axis)
    split = {kind: _split_kind(kind, group) for kind, group in groups.items()}
    take = {kind: iter(parts) for kind, parts in split.items() if len(parts) == kinds.count(kind)}
    if take.keys() != set(kinds) | groups.keys():
        return ImageUnits((arrays,), 0)
    return ImageUnits(tuple(next(take[kind]) for kind in kinds), 0)


def _split_kind(kind: MediaKind, arrays: Media) -> list[Media]:
    """The units of one kind beside others, concatenated along the first axis; none if that is not known."""
    if kind == "image":
        axis, parts = _split_images(arrays)
        if parts is not None:
            return parts if axis == 0 else []
    grid, frames = arrays.get(VIDEO_GRID), [int(n) for n in arrays.get(VIDEO_FRAMES, ())]
    count = len(frames) or len(find_tower_array(kind, arrays) if grid is None else grid)
    each = [1] * count
    lengths: dict[str, Sequence[int]] = {
        key: frames if np.ndim(a[:1]) and len(a) == sum(frames) > 0 else each for key, a in arrays.items()
    }
    if grid is not None:
        lengths[VIDEO_PIXELS] = [int(n) for n in grid.prod(axis=-1)]
    return _split_arrays(arrays, lengths, 0) or []


def _split_images(arrays: Media) -> tuple[int, list[Media] | None]:
    """The axis and the units of images alone; None: not known."""
    pixels, grid = arrays.get("pixel_values"), arrays.get("image_grid_thw")
    if pixels is None:
        return 0, None
    if isinstance(pixels, tuple):
        return 0, _split_arrays(arrays, dict.fromkeys(arrays, [1] * len(pixels)), 0)
    axis = 1 if grid is None and pixels.ndim == 5 and pixels.shape[0] == 1 else 0
    if grid is not None:
        patches = [int(n) for n in grid.prod(axis=-1)]
        lengths = {"pixel_values": patches, "image_grid_thw": [1] * len(patches)}
        parts = _split_arrays(arrays, lengths, axis) if arrays.keys() == lengths.keys() else None
    elif pixels.ndim == 4 + axis:
        parts = _split_arrays(arrays, {key: [1] * pixels.shape[axis] for key in arrays}, axis)
    else:
        return 0, None
    return (0, None) if parts is None else (axis, parts)


def _split_arrays(arrays: Media, lengths: Mapping[str, Sequence[int]], axis: int) -> list[Media] | None:
    """The units of arrays. `lengths`: of each unit, along the axis; None if an array has others."""
    parts: dict[str, list[np.ndarray]] = {}
    for key, array in arrays.items():
        if isinstance(array, tuple):
            parts[key] = [each[None] for each in array]
        elif array.ndim <= axis or array.shape[axis] != sum(lengths[key]):
            return None
        else:
            parts[key] = np.split(array, np.cumsum(lengths[key])[:-1], axis=axis)
    if len(set(map(len, parts.values()))) > 1:
        return None
    return [dict(zip(parts, unit, strict=True)) for unit in zip(*parts.values(), strict=True)]


def _compute_digest(media: Media) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for key in sorted(media.keys() - BOUNDS.keys()):  # which are places, not contents
        value = media[key]
        for array in map(np.ascontiguousarray, value if isinstance(value, tuple) else (value,)):
            found.update(f"{key} {array.dtype} {array.shape} ".encode())
            found.update(array.data)
    return found.digest()


def compute_audio_digests(media: Media, settings: bytes = b"") -> list[bytes]:
    """A 16-byte digest of each audio of a processed prompt, by what its tower sees: its own features and
    those beside it. One of all if they cannot be told apart."""
    arrays = group_by_kind(media).get("audio")
    if arrays is None:
        return []
    units = _split_kind("audio", {key: np.asarray(value) for key, value in arrays.items()}) or [arrays]
    every = settings + b"".join(map(_compute_digest, units))
    return [hashlib.blake2b(b"%d " % i + every, digest_size=16).digest() for i in range(len(units))]
