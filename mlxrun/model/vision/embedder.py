"""Prompts with images and videos as an mlx-vlm model embeds them, with or without its vision tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxrun.errors import ModelLoadError, RequestError
from mlxrun.model.prompt_inputs import PromptInputs
from mlxrun.model.vision.image_units import VIDEO_GRID, MediaTokens, read_media_token

# Fields of mlx-vlm's InputEmbeddingsFeatures that we do not pass on; its 4-D mask is never used.
_UNSUPPORTED = ("cross_attention_states", "decoder_inputs_embeds", "pos_hw")


class Embedder:
    """`mrope`: positions have three axes. `tokens`: the placeholders of features, as far as they are known;
    `line_break`: the token between the lines of an image."""

    def __init__(self, model: nn.Module, line_break: int | None = None) -> None:
        self._model = model
        if getattr(getattr(model.config, "text_config", None), "cross_attention_layers", None):
            raise ModelLoadError("layers that attend to images (cross attention) are not supported")
        ids = mx.array([[1, 1]])
        self._language = model.language_model
        # Some models leave positions on the module, where the next request would find them.
        deltas = model.get_input_embeddings(ids, None, mask=mx.ones_like(ids)).rope_deltas
        self.mrope = deltas is not None or hasattr(self._language, "get_rope_index")
        image, video = (
            read_media_token(lambda name: getattr(model.config, name, None), kind)
            for kind in ("image", "video")
        )
        self.tokens = MediaTokens(image, video, line_break)

    def embed_prompt(self, prompt: Sequence[int], media: Mapping[str, Any]) -> PromptInputs:
        """The whole prompt, by way of the vision tower."""
        ids = mx.array([list(prompt)])
        given = {key: mx.array(value) for key, value in media.items()}
        grids = given.get("image_grid_thw"), given.get(VIDEO_GRID)
        pixels = given.pop("pixel_values", None)
        features = self._model.get_input_embeddings(ids, pixels, mask=mx.ones_like(ids), **given)
        for name in _UNSUPPORTED:
            if getattr(features, name) is not None:
                raise RequestError(f"images are refused for this model: {name} are not supported")
        made = features.inputs_embeds.shape[1]
        if made != len(prompt):
            raise RequestError(
                f"images are refused for this model: mlx-vlm makes {made} embeddings of the {len(prompt)} "
                "tokens of this prompt"
            )
        visual, deepstack = features.visual_pos_masks, features.deepstack_visual_embeds
        positions, delta = features.position_ids, features.rope_deltas
        if self.mrope and positions is None:
            positions, delta = self._compute_positions(ids, grids)
        positions, delta = self._read_positions(positions, delta, len(prompt))
        return PromptInputs(
            embeds=features.inputs_embeds,
            positions=positions,
            position_delta=delta,
            visual_mask=None if visual is None else np.array(visual).reshape(-1)[: len(prompt)],
            deepstack=() if deepstack is None else tuple(deepstack),
            per_layer=features.per_layer_inputs,
        )

    def embed_text(self, prompt: Sequence[int], media: Mapping[str, Any]) -> PromptInputs:
        """The same, except for the embeddings and deepstack features of image and video tokens."""
        ids = mx.array([list(prompt)])
        mask = mx.ones_like(ids)
        features = self._model.get_input_embeddings(ids, None, mask=mask)
        position_ids, delta = features.position_ids, features.rope_deltas
        grids = [mx.array(media[key]) if key in media else None for key in ("image_grid_thw", VIDEO_GRID)]
        has_grid = any(grid is not None for grid in grids)
        if (has_grid or position_ids is None) and hasattr(self._language, "get_rope_index"):
            position_ids, delta = self._compute_positions(ids, grids)
        positions, shift = self._read_positions(position_ids, delta, len(prompt))
        return PromptInputs(features.inputs_embeds, positions, shift, per_layer=features.per_layer_inputs)

    def _compute_positions(self, ids: mx.array, grids: Sequence[mx.array | None]) -> tuple[mx.array, Any]:
        """Positions [3, 1, L] or [1, L], and the offset of later ones. Images without a grid have those of
        text; not every language model then has what its `get_rope_index` reads."""
        if all(grid is None for grid in grids):
            return mx.arange(ids.shape[1])[None], None
        positions, delta = self._language.get_rope_index(ids, *grids, mx.ones_like(ids))
        return positions, delta

    def _read_positions(self, positions: Any, delta: Any, length: int) -> tuple[mx.array | None, int]:
        """Positions [3, 1, L] if the model uses mRoPE, and the offset of later tokens' positions."""
        if not self.mrope:
            positions = None
        elif positions.ndim == 2:
            positions = mx.broadcast_to(positions[None], (3, 1, length))
        return positions, 0 if delta is None else int(delta.item())
