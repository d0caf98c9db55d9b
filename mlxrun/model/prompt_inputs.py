"""The inputs of a prompt beyond its token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """All arrays are evaluated.

    `embeds` [1, L, D] or None for plain text; `positions` [3, 1, L] for mRoPE models with images;
    `position_delta` is added to a later token's index for its position; `visual_mask` bool [L] marks the
    tokens that the `deepstack` features, each [visual tokens, D], belong to.
    """

    embeds: mx.array | None = None
    positions: mx.array | None = None
    position_delta: int = 0
    visual_mask: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    deepstack: tuple[mx.array, ...] = ()
    per_layer: mx.array | None = None

    def list_arrays(self) -> list[mx.array]:
        arrays = (self.embeds, self.positions, self.per_layer, *self.deepstack)
        return [a for a in arrays if a is not None]


TEXT_ONLY = PromptInputs()
