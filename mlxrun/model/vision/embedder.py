"""Prompts with images and videos as an mlx-vlm model embeds them, with or without its vision tower."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxrun.core.errors import ModelLoadError, RequestError
from mlxrun.core.media_names import MediaKind
from mlxrun.model.run.prompt_inputs import PromptInputs, make_arrays
from mlxrun.model.vision.image_units import (
    TOKEN_TYPES,
    VIDEO_GRID,
    Media,
    MediaTokens,
    group_by_kind,
)

log = logging.getLogger(__name__)
Mask = np.ndarray[Any, np.dtype[np.bool_]]
_GRIDS = ("image_grid_thw", VIDEO_GRID)

# Fields of mlx-vlm's InputEmbeddingsFeatures that we do not pass on; its 4-D mask is never used.
_UNSUPPORTED = ("cross_attention_states", "decoder_inputs_embeds")


class Embedder:
    """Embeds prompts. `mrope`: positions have three axes, on the first dimension, or on the last with
    `axes_last`. `tokens`: the known placeholders of features; `line_break`: the token between the lines of an
    image. `deepstack_form`: see `shape_deepstack`."""

    def __init__(self, model: nn.Module, line_break: int | None = None) -> None:
        self.model = model
        if getattr(getattr(model.config, "text_config", None), "cross_attention_layers", None):
            raise ModelLoadError("layers that attend to images (cross attention) are not supported")
        ids = mx.array([[1, 1]])
        self._language = model.language_model
        # Some models leave positions on the module, where the next request would find them.
        deltas = model.get_input_embeddings(ids, None, mask=mx.ones_like(ids)).rope_deltas
        self.axes_last = False
        self.deepstack_form: Literal["rows", "chunk", "prompt"] = "rows"
        self.mrope = deltas is not None or self._has_axes(ids)
        self.tokens = MediaTokens.read(model.config, line_break, getattr(model, "feature_token", None))

    def forget_positions(self) -> None:
        """Drop the positions that some language models keep of the last prompt."""
        if getattr(self._language, "_position_ids", None) is not None:
            self._language._position_ids = None

    def embed_prompt(self, prompt: Sequence[int], media: Mapping[str, Any]) -> PromptInputs:
        """The inputs of the whole prompt, through the vision tower. RequestError if the model needs
        unsupported inputs."""
        groups = group_by_kind(media)
        if len(groups) > 1 and groups.keys() <= self.tokens.by_kind.keys():
            return self._embed_each_kind(np.array(prompt), media, groups)
        ids = mx.array([list(prompt)])
        given = make_arrays(media)
        pixels = given.pop("pixel_values", None)
        self.forget_positions()
        features = self.model.get_input_embeddings(ids, pixels, mask=mx.ones_like(ids), **given)
        for name in _UNSUPPORTED:
            if getattr(features, name) is not None:
                raise RequestError(f"images are refused for this model: {name} are not supported")
        made = features.inputs_embeds.shape[1]
        if made != len(prompt):
            raise RequestError(
                f"images are refused for this model: mlx-vlm makes {made} embeddings of the {len(prompt)} "
                "tokens of a prompt"
            )
        visual = features.visual_pos_masks
        mask = None if visual is None else np.array(visual).reshape(-1)[: len(prompt)]
        positions, delta = features.position_ids, features.rope_deltas
        if self.mrope and positions is None:
            positions, delta = self._compute_positions(ids, media)
        if features.pos_hw is not None:  # places in an image, as the last two axes
            positions = mx.concatenate([positions[None], mx.moveaxis(features.pos_hw, -1, 0)])
        positions, delta = self.read_positions(positions, delta, len(prompt))
        if not self.mrope:  # some leave positions with axes of their own on the language model
            positions = getattr(self._language, "_position_ids", None)
        return PromptInputs(
            embeds=features.inputs_embeds,
            positions=positions,
            position_delta=delta,
            visual_mask=mask,
            deepstack=self.read_deepstack(features.deepstack_visual_embeds, mask),
            per_layer=features.per_layer_inputs,
        )

    def _embed_each_kind(
        self, ids: np.ndarray[Any, Any], media: Media, groups: Mapping[MediaKind, Media]
    ) -> PromptInputs:
        """The inputs of a prompt with several kinds of media, of which each goes through a call of its own.
        In one call, some families leave out the videos. Tokens of other kinds are text meanwhile."""
        known = self.tokens.by_kind
        text = next(int(token) for token in (*ids, 0) if token not in known.values())
        places = {kind: ids == known[kind] for kind in groups}
        made = {}
        for kind, arrays in groups.items():
            other = np.isin(ids, [token for each, token in known.items() if each != kind])
            types = {key: np.where(other, 0, media[key]) for key in TOKEN_TYPES if key in media}
            made[kind] = self.embed_prompt(np.where(other, text, ids).tolist(), {**arrays, **types})
        first = next(iter(made.values()))
        positions, delta = first.positions, first.position_delta
        if self.mrope:
            found = self._compute_positions(mx.array(ids[None]), media)
            positions, delta = self.read_positions(*found, len(ids))
        embeds, per_layer = first.embeds, first.per_layer
        for kind, inputs in made.items():
            chosen = mx.array(places[kind])
            embeds = _choose_rows(chosen, inputs.embeds, embeds)
            per_layer = _choose_rows(chosen, inputs.per_layer, per_layer)
        deep = {kind: inputs.deepstack for kind, inputs in made.items() if inputs.deepstack}
        shown = [np.flatnonzero(places[kind]) for kind in deep]
        order = mx.array(np.argsort(np.concatenate([*shown, np.zeros(0, np.intp)])))
        return PromptInputs(
            embeds=embeds,
            positions=positions,
            position_delta=delta,
            visual_mask=np.any([places[kind] for kind in deep], axis=0) if deep else None,
            deepstack=tuple(mx.concatenate(parts)[order] for parts in zip(*deep.values(), strict=True)),
            per_layer=per_layer,
        )

    def read_deepstack(self, features: Any, mask: Mask | None) -> tuple[mx.array, ...]:
        """Arrays [visual tokens, D], one for each layer, of the library's features. Sets `deepstack_form`.
        Some families have rows for all tokens, [1, L, layers, D] or [layers, L, D]."""
        features = getattr(features, "embeddings", features)
        if features is None:
            return ()
        visual = 0 if mask is None else int(mask.sum())
        if not isinstance(features, mx.array) or (features.ndim == 3 and features.shape[1] == visual):
            return tuple(features)
        self.deepstack_form = "chunk" if features.ndim == 4 else "prompt"
        layers = features[0].swapaxes(0, 1) if features.ndim == 4 else features
        return () if mask is None else tuple(layers[:, mx.array(np.flatnonzero(mask))])

    def shape_deepstack(self, parts: Sequence[mx.array], mask: Mask, start: int, stop: int) -> dict[str, Any]:
        """The language model's arguments for a chunk of a prompt. They are features of the visual tokens
        alone (`rows`), of all tokens of the `chunk`, or of the whole `prompt`. `parts`: of the visual tokens
        of the chunk, or with `prompt` of all; `mask`: the prompt's visual tokens."""
        if self.deepstack_form == "rows":
            shown = mx.array(mask[None, start:stop])
            return {"visual_pos_masks": shown, "deepstack_visual_embeds": list(parts)}
        whole = self.deepstack_form == "prompt"
        tokens = mask if whole else mask[start:stop]
        dense = mx.zeros((len(parts), len(tokens), parts[0].shape[1]), parts[0].dtype)
        dense[:, mx.array(np.flatnonzero(tokens))] = mx.stack(list(parts))
        dense = dense if whole else dense.swapaxes(0, 1)[None]
        return {"visual_pos_masks": mx.array(tokens[None]), "deepstack_visual_embeds": dense}

    def embed_text(self, prompt: Sequence[int], media: Mapping[str, Any]) -> PromptInputs:
        """The same inputs without the vision tower, so without embeddings and deepstack features of image and
        video tokens."""
        ids = mx.array([list(prompt)])
        mask = mx.ones_like(ids)
        features = self.model.get_input_embeddings(ids, None, mask=mask)
        position_ids, delta = features.position_ids, features.rope_deltas
        has_grid = not media.keys().isdisjoint(_GRIDS)
        if (has_grid or position_ids is None) and hasattr(self._language, "get_rope_index"):
            position_ids, delta = self._compute_positions(ids, media)
        positions, shift = self.read_positions(position_ids, delta, len(prompt))
        return PromptInputs(features.inputs_embeds, positions, shift, per_layer=features.per_layer_inputs)

    def _compute_positions(self, ids: mx.array, media: Media) -> tuple[mx.array, Any]:
        """Positions [3, 1, L] or [1, L], and the offset of later ones. Images without a grid have those of
        text; not every language model then has what its `get_rope_index` reads."""
        if media.keys().isdisjoint(_GRIDS):
            return mx.arange(ids.shape[1])[None], None
        return self._call_rope_index(ids, *(mx.array(media[k]) if k in media else None for k in _GRIDS))

    def _call_rope_index(
        self, ids: mx.array, images: mx.array | None = None, videos: mx.array | None = None
    ) -> tuple[mx.array, Any]:
        """What the library's function returns, which does not take the same in every family."""
        call = self._language.get_rope_index
        given = dict(zip((*_GRIDS, "attention_mask"), (images, videos, mx.ones_like(ids)), strict=True))
        taken = inspect.signature(call).parameters
        positions, delta = call(ids, **{name: value for name, value in given.items() if name in taken})
        return mx.moveaxis(positions, -1, 0) if self.axes_last else positions, delta

    def _has_axes(self, ids: mx.array) -> bool:
        """Whether the positions of a text have several axes: a config may switch them off."""
        if not hasattr(self._language, "get_rope_index"):
            return False
        try:
            shape = self._call_rope_index(ids)[0].shape
            self.axes_last = shape == (*ids.shape, 3)
            return len(shape) > 2
        except Exception:  # of the library, for a text; the checks at load find out
            log.debug("the positions of a text are not known", exc_info=True)
            return True

    def read_positions(self, positions: Any, delta: Any, length: int) -> tuple[mx.array | None, int]:
        """Positions [3, 1, L] if the model uses mRoPE, and the offset of later tokens' positions."""
        if not self.mrope:
            positions = None
        elif positions.ndim == 2:
            positions = mx.broadcast_to(positions[None], (3, 1, length))
        return positions, 0 if delta is None else int(delta.item())


def _choose_rows(chosen: mx.array, some: mx.array | None, others: mx.array | None) -> mx.array | None:
    """Of two arrays [1, L, ...], the first one's rows where `chosen` [L]; None if they are."""
    if some is None or others is None:
        return None
    return mx.where(chosen.reshape(1, -1, *[1] * (some.ndim - 2)), some, others)
