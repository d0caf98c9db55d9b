"""Processed images as units: the input of the vision tower for each image, split from the input for all.

Only known layouts are split; anything else is one unit of all the images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Media = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ImageUnits:
    """Arrays of each image; `axis`: the axis along which they are concatenated."""

    units: tuple[Media, ...]
    axis: int

    def compute_digests(self) -> list[bytes]:
        """A digest of each unit, 16 bytes."""
        return [_compute_digest(unit) for unit in self.units]

    def take(self, first: int, last: int) -> ImageUnits:
        """Units `first` to `last`, without `last`."""
        return ImageUnits(self.units[first:last], self.axis)

    def concatenate(self, first: int, last: int) -> Media:
        """Units `first` to `last`, without `last`, as the processor would have made them together."""
        some = self.units[first:last]
        return {key: np.concatenate([unit[key] for unit in some], axis=self.axis) for key in some[0]}


def split_images(media: Media) -> ImageUnits | None:
    """The units of processed images; None where images cannot be compared by their bytes."""
    arrays = {key: np.asarray(value) for key, value in media.items()}
    if "pixel_values" not in arrays or any(a.dtype.hasobject for a in arrays.values()):
        return None
    axis, lengths = _find_layout(arrays)
    if lengths is None:
        return ImageUnits((arrays,), 0)
    edges = {key: np.cumsum(of)[:-1] for key, of in lengths.items()}
    parts = {key: np.split(a, edges[key], axis=axis) for key, a in arrays.items()}
    count = len(next(iter(lengths.values())))
    return ImageUnits(tuple({key: part[i] for key, part in parts.items()} for i in range(count)), axis)


def number_regions(spans: Sequence[tuple[int, int]], ids: Sequence[int], line_break: int | None) -> list[int]:
    """The number of each span's region: spans belong to one image if only the token `line_break`, which ends
    a line of an image, is between them."""
    numbers: list[int] = []
    end = 0
    for start, stop in spans:
        same = numbers and start == end + 1 and line_break is not None and ids[end] == line_break
        numbers.append(numbers[-1] + (not same) if numbers else 0)
        end = stop
    return numbers


def _find_layout(arrays: Mapping[str, np.ndarray]) -> tuple[int, dict[str, Sequence[int]] | None]:
    """The axis, and for each array the length of each image along it. None: not known."""
    pixels, grid = arrays["pixel_values"], arrays.get("image_grid_thw")
    if grid is not None:
        patches = [int(n) for n in grid.prod(axis=-1)]
        known = arrays.keys() == {"pixel_values", "image_grid_thw"} and pixels.shape[0] == sum(patches)
        return 0, {"pixel_values": patches, "image_grid_thw": [1] * len(patches)} if known else None
    axis = 1 if pixels.ndim == 5 and pixels.shape[0] == 1 else 0
    if pixels.ndim != 4 + axis or any(
        a.ndim <= axis or a.shape[axis] != pixels.shape[axis] for a in arrays.values()
    ):
        return 0, None
    return axis, {key: [1] * pixels.shape[axis] for key in arrays}


def _compute_digest(media: Media) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for key in sorted(media):
        array = np.ascontiguousarray(media[key])
        found.update(f"{key} {array.dtype} {array.shape} ".encode())
        found.update(array.data)
    return found.digest()
