"""The inputs of a prompt beyond its token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrun.model.vision.image_units import ImageUnits, Media, number_regions


@dataclass(frozen=True, slots=True, eq=False)
class ImagePrompt:
    """A prompt with images. `places`: the indices of all its image tokens; `digests`: one a unit."""

    tokens: Sequence[int]
    media: Media
    units: ImageUnits
    digests: Sequence[bytes]
    places: np.ndarray[Any, np.dtype[np.intp]]

    def cut(self, runs: Sequence[np.ndarray[Any, np.dtype[np.intp]]], first: int, last: int) -> ImagePrompt:
        """The part with units `first` to `last`, without `last`. `runs`: what `split_places` returned."""
        start, stop = max(int(runs[first][0]) - 1, 0), int(runs[last - 1][-1]) + 2
        media, units = self.units.concatenate(first, last), self.units.take(first, last)
        places = np.concatenate(runs[first:last]) - start
        return ImagePrompt(self.tokens[start:stop], media, units, self.digests[first:last], places)

    def split_places(self, line_break: int | None) -> list[np.ndarray[Any, np.dtype[np.intp]]] | None:
        """The places of each unit; None if they cannot be told. An image is a run of image tokens, or several
        lines of them with the token `line_break` between."""
        if len(self.places) == 0:
            return None
        runs = np.split(self.places, np.flatnonzero(np.diff(self.places) > 1) + 1)
        spans = [(int(run[0]), int(run[-1]) + 1) for run in runs]
        numbers = number_regions(spans, self.tokens, line_break)
        if numbers[-1] + 1 != len(self.digests):
            return None
        edges = [len(run) for run in runs]
        starts = [at for at in range(1, len(runs)) if numbers[at] != numbers[at - 1]]
        return np.split(self.places, np.cumsum(edges)[np.array(starts, dtype=int) - 1])


@dataclass(frozen=True, slots=True, eq=False)
class PendingImages:
    """The images of a prompt from number `first` on. `runs`: the places of each image of the prompt."""

    prompt: ImagePrompt
    runs: Sequence[np.ndarray[Any, np.dtype[np.intp]]]
    first: int


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """All arrays are evaluated.

    `embeds` [1, L, D] or None for plain text; `positions` [3, 1, L] for mRoPE models with images;
    `position_delta` is added to a later token's index for its position; `visual_mask` bool [L] marks the
    tokens that the `deepstack` features, each [visual tokens, D], belong to. `pending`: images that are not
    encoded yet, whose places in `embeds` hold nothing of use and whose rows `deepstack` lacks.
    """

    embeds: mx.array | None = None
    positions: mx.array | None = None
    position_delta: int = 0
    visual_mask: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    deepstack: tuple[mx.array, ...] = ()
    per_layer: mx.array | None = None
    pending: PendingImages | None = None

    def list_arrays(self) -> list[mx.array]:
        arrays = (self.embeds, self.positions, self.per_layer, *self.deepstack)
        return [a for a in arrays if a is not None]


TEXT_ONLY = PromptInputs()
