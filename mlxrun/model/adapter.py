"""The only fork between text and vision: how a model is called. Everything above this is one path.

TextAdapter calls an mlx-lm model, VisionAdapter an mlx-vlm model's language part. What an image needs
(embeddings, positions, visual masks, deepstack features) is request state: it is computed once, sliced by
chunk and passed explicitly each time; nothing is read from or left on the shared module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxrun.errors import ModelLoadError, RequestError
from mlxrun.model.leaves import all_arrays

# Fields of mlx-vlm's InputEmbeddingsFeatures that we do not pass on; its 4-D mask is never used.
_UNSUPPORTED = ("cross_attention_states", "decoder_inputs_embeds", "pos_hw")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one request's prompt is made of, beyond its token ids; all arrays are evaluated.

    `embeds` [1, L, D] or None for plain text; `positions` [3, 1, L] for mRoPE models with images; `delta` is
    what to add to a later token's index for its position; `visual` bool [L] marks the tokens that the
    `deepstack` features, each [visual tokens, D], belong to.
    """

    embeds: mx.array | None = None
    positions: mx.array | None = None
    delta: int = 0
    visual: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    deepstack: tuple[mx.array, ...] = ()
    per_layer: mx.array | None = None


PLAIN = Inputs()


class Adapter(Protocol):
    """A loaded model, as the runner uses it."""

    model: nn.Module

    def new_cache(self) -> list[Any]:
        """Empty single-row caches, one a layer."""
        ...

    def inputs(self, prompt: Sequence[int], media: Any) -> Inputs:
        """What the request needs beyond token ids. RequestError if the model cannot use `media`."""
        ...

    def prefill(self, ids: mx.array, cache: list[Any], start: int, inputs: Inputs) -> mx.array:
        """Logits [B, n, V], lazy, of tokens `ids` [B, n] at positions start..start+n; fills `cache`."""
        ...

    def decode(self, ids: mx.array, cache: list[Any], positions: Sequence[int]) -> mx.array:
        """Logits [B, 1, V] of one new token a row, `ids` [B, 1], at these rotary positions."""
        ...


def first_look(adapter: Adapter) -> tuple[list[Any], int]:
    """Caches that hold two tokens, for their shapes; the width of the logits. ModelLoadError for NaN."""
    cache = adapter.new_cache()
    logits = adapter.prefill(mx.array([[1, 1]]), cache, 0, PLAIN)
    mx.eval(all_arrays(cache))
    if mx.any(mx.isnan(logits)).item():
        raise ModelLoadError("the model computes NaN: its weights are damaged, or need another model.dtype")
    return cache, int(logits.shape[-1])


class TextAdapter:
    """A model of mlx-lm."""

    def __init__(self, model: nn.Module) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        self.model = model
        self._make = make_prompt_cache

    def new_cache(self) -> list[Any]:
        return self._make(self.model)

    def inputs(self, prompt: Sequence[int], media: Any) -> Inputs:
        if media is not None:
            raise RequestError("this model takes no images")
        return PLAIN

    def prefill(self, ids: mx.array, cache: list[Any], start: int, inputs: Inputs) -> mx.array:
        logits: mx.array = self.model(ids, cache=cache)
        return logits

    def decode(self, ids: mx.array, cache: list[Any], positions: Sequence[int]) -> mx.array:
        logits: mx.array = self.model(ids, cache=cache)
        return logits


class VisionAdapter:
    """A model of mlx-vlm. Text-only requests take the same way without embeddings."""

    def __init__(self, model: nn.Module) -> None:
        from mlx_vlm.models.cache import make_prompt_cache

        self.model = model
        self._make = make_prompt_cache
        self._language = model.language_model
        self._mrope = self._uses_mrope()

    def _uses_mrope(self) -> bool:
        ids = mx.array([[1, 1]])
        features = self.model.get_input_embeddings(ids, None, mask=mx.ones_like(ids))
        return features.rope_deltas is not None

    def new_cache(self) -> list[Any]:
        return self._make(self._language)

    def inputs(self, prompt: Sequence[int], media: Any) -> Inputs:
        if media is None:
            return PLAIN
        ids = mx.array([list(prompt)])
        given = {key: mx.array(value) for key, value in media.items()}
        pixels = given.pop("pixel_values")
        features = self.model.get_input_embeddings(ids, pixels, mask=mx.ones_like(ids), **given)
        for name in _UNSUPPORTED:
            if getattr(features, name) is not None:
                raise RequestError(f"models that need {name} are not supported yet")
        inputs = self._collect(features, len(prompt))
        held = (inputs.embeds, inputs.positions, inputs.per_layer, *inputs.deepstack)
        mx.eval([a for a in held if a is not None])
        return inputs

    def _collect(self, features: Any, length: int) -> Inputs:
        positions, delta = features.position_ids, features.rope_deltas
        if not self._mrope:
            positions = None
        elif positions.ndim == 2:
            positions = mx.broadcast_to(positions[None], (3, 1, length))
        visual = features.visual_pos_masks
        deepstack = features.deepstack_visual_embeds
        return Inputs(
            embeds=features.inputs_embeds,
            positions=positions,
            delta=0 if delta is None else int(delta.item()),
            visual=None if visual is None else np.array(visual).reshape(-1)[:length],
            deepstack=() if deepstack is None else tuple(deepstack),
            per_layer=features.per_layer_inputs,
        )

    def prefill(self, ids: mx.array, cache: list[Any], start: int, inputs: Inputs) -> mx.array:
        stop = start + ids.shape[1]
        prompt = 0 if inputs.embeds is None else inputs.embeds.shape[1]
        if start < prompt < stop:  # a preempted row: its answer so far has token ids alone
            self.prefill(ids[:, : prompt - start], cache, start, inputs)
            return self.prefill(ids[:, prompt - start :], cache, prompt, inputs)
        extra = self._media(inputs, start, stop) if start < prompt else {}
        if self._mrope and "position_ids" not in extra:
            places = mx.arange(start + inputs.delta, stop + inputs.delta)
            extra["position_ids"] = mx.broadcast_to(places, (3, *ids.shape))
        logits: mx.array = self._language(ids, cache=cache, **extra).logits
        return logits

    def _media(self, inputs: Inputs, start: int, stop: int) -> dict[str, Any]:
        """A chunk of what replaces or goes with the token ids of a prompt with images."""
        extra: dict[str, Any] = {}
        if inputs.embeds is not None:
            extra["inputs_embeds"] = inputs.embeds[:, start:stop]
        if inputs.per_layer is not None:
            extra["per_layer_inputs"] = inputs.per_layer[:, start:stop]
        if inputs.deepstack and inputs.visual is not None:
            extra |= self._deepstack(inputs, inputs.visual, start, stop)
        if inputs.positions is not None:
            extra["position_ids"] = inputs.positions[..., start:stop]
        return extra

    def _deepstack(
        self, inputs: Inputs, visual: np.ndarray[Any, np.dtype[np.bool_]], start: int, stop: int
    ) -> dict[str, Any]:
        """Mask and features of the visual tokens in the chunk, cut together; nothing if it has none."""
        first, last = int(visual[:start].sum()), int(visual[:stop].sum())
        if first == last:
            return {}
        return {
            "visual_pos_masks": mx.array(visual[None, start:stop]),
            "deepstack_visual_embeds": [d[first:last] for d in inputs.deepstack],
        }

    def decode(self, ids: mx.array, cache: list[Any], positions: Sequence[int]) -> mx.array:
        extra: dict[str, Any] = {}
        if self._mrope:  # always explicit: left out, the model would use the last prefill's state
            rows = mx.array(list(positions), dtype=mx.int32)[None, :, None]
            extra["position_ids"] = mx.broadcast_to(rows, (3, len(positions), 1))
        logits: mx.array = self._language(ids, cache=cache, **extra).logits
        return logits
