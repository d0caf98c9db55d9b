"""The inputs of a prompt beyond its token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrun.model.vision.image_units import (
    BOUNDS,
    ImageUnits,
    Media,
    MediaRegion,
    split_images,
)

Indices = np.ndarray[Any, np.dtype[np.intp]]


@dataclass(frozen=True, slots=True, eq=False)
class ImagePrompt:
    """A prompt with images and videos. `places`: the indices of all their tokens; `digests`: one for each
    unit; `regions`: of the units, if there are as many."""

    tokens: Sequence[int]
    media: Media
    units: ImageUnits
    digests: Sequence[bytes]
    places: Indices
    regions: Sequence[MediaRegion] = ()

    def cut(self, runs: Sequence[Indices], first: int, last: int) -> ImagePrompt:
        """The part with units [first, last). `runs`: the result of `split_places`."""
        start, stop = max(int(runs[first][0]) - 1, 0), int(runs[last - 1][-1]) + 2
        media, units = self.units.concatenate(first, last), self.units.take(first, last)
        media = {key: array - start if key in BOUNDS else array for key, array in media.items()}
        places = np.concatenate(runs[first:last]) - start
        return ImagePrompt(self.tokens[start:stop], media, units, self.digests[first:last], places)

    def split_places(self) -> list[Indices] | None:
        """The places of each unit; None if they cannot be told apart."""
        if not self.regions or len(self.regions) != len(self.digests):
            return None
        return [np.concatenate([np.arange(*span) for span in region.spans]) for region in self.regions]


def split_prompt(tokens: Sequence[int], media: Media, regions: Sequence[MediaRegion]) -> ImagePrompt | None:
    """A prompt and its units; None if the units cannot be compared by their bytes."""
    units = split_images(media, [region.kind for region in regions])
    if units is None:
        return None
    spans = [np.arange(*span) for region in regions for span in region.spans]
    places = np.concatenate(spans) if spans else np.zeros(0, np.intp)
    return ImagePrompt(tokens, media, units, units.compute_digests(), places, regions)


@dataclass(frozen=True, slots=True, eq=False)
class PendingImages:
    """Images and videos of a prompt that are not encoded yet.

    `tokens`, `media`: the prompt; `prompt`: the same with its units, None if they cannot be told apart.
    `runs`: the places of each unit, of which those from `first` on are pending; empty if one call encodes all
    of them. `blocks`: what the blocks of the tower return in the call that was begun, as far as it is not
    computed; `made`: what that call returns, None between calls.
    """

    tokens: Sequence[int]
    media: Media
    prompt: ImagePrompt | None
    runs: Sequence[Indices] = ()
    first: int = 0
    blocks: Sequence[mx.array] = ()
    made: PromptInputs | None = None


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """The inputs of a prompt besides its token ids. All arrays are evaluated.

    `embeds` [1, L, D]: None for plain text. `positions`: [3, 1, L] for mRoPE models with images (others have
    other axes), or int32 [L] if tokens of the prompt were left out. `position_delta`: added to a later
    token's index for its position. `visual_mask` bool [L]: the tokens of the `deepstack` features, each
    [visual tokens, D].

    `pending`: images that are not encoded yet; their places in `embeds` are undefined, and `deepstack` lacks
    their rows. Before the first one is encoded there are no `embeds` at all. `token_types`: arrays [1, L]
    that the model takes with each chunk, by name.
    """

    embeds: mx.array | None = None
    positions: mx.array | None = None
    position_delta: int = 0
    visual_mask: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    deepstack: tuple[mx.array, ...] = ()
    per_layer: mx.array | None = None
    pending: PendingImages | None = None
    token_types: Media = field(default_factory=dict)

    @property
    def ready(self) -> int | None:
        """How many tokens at the beginning of the prompt can be computed; None if all can."""
        if self.pending is None:
            return None
        return 0 if self.embeds is None else int(self.pending.runs[self.pending.first][0])

    def list_arrays(self) -> list[mx.array]:
        arrays = (self.embeds, self.positions, self.per_layer, *self.deepstack)
        return [a for a in arrays if a is not None]


TEXT_ONLY = PromptInputs()


def make_arrays(media: Media) -> dict[str, Any]:
    """Processed media as MLX arrays. Images of different sizes are a list of them."""
    return {
        key: list(map(mx.array, value)) if isinstance(value, tuple) else mx.array(value)
        for key, value in media.items()
    }


def place_tokens(positions: Sequence[int]) -> PromptInputs:
    """The inputs of a prompt with only the tokens at these positions."""
    left_out = positions[-1] + 1 - len(positions)
    return PromptInputs(positions=mx.array(positions, dtype=mx.int32), position_delta=left_out)
