"""Falcon OCR with explicit positions: of each token in the text, and of image tokens in their image too.

mlx-vlm's language model reads the shift of positions that the last prompt with an image left on it. It cuts
the positions and the mask of a whole prompt by the length of one row's cache. Here both come with each call,
as for other models. The tokens of an image, with those that begin it, see each other.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.hooks.derived_layers import mix_in

_LANGUAGE = "mlx_vlm.models.falcon_ocr.language"


class _GivenPositions:
    """Before the methods of the library's language model."""

    config: Any
    model: Any
    lm_head: Any
    _rope_deltas: mx.array | None

    def __call__(
        self,
        inputs: mx.array,
        inputs_embeds: mx.array | None = None,
        mask: mx.array | None = None,
        cache: Sequence[Any] | None = None,
        position_ids: mx.array | None = None,
        **given: Any,
    ) -> Any:
        """Logits of a chunk `inputs` [B, n]. `position_ids` [3, B, n]: integers for text. With an image in a
        prompt they are floats, the last two axes being places in it. Other positions are the library's."""
        if position_ids is None or position_ids.ndim < 3:
            if cache is not None and "rope_deltas" not in given and _is_empty(cache[0]):
                self._rope_deltas = None  # of a prompt before
            call = super().__call__  # type: ignore[misc]
            return call(inputs, inputs_embeds, mask, cache, position_ids=position_ids, **given)
        from mlx_vlm.models.base import LanguageModelOutput

        steps, places = position_ids[0].astype(mx.int32), None
        if mx.issubdtype(position_ids.dtype, mx.floating):
            places, mask = mx.moveaxis(position_ids[1:], 0, -1), self._make_mask(inputs, cache)
        out = self.model(
            inputs, cache=cache, inputs_embeds=inputs_embeds, mask=mask, position_ids=steps, pos_hw=places
        )
        embedding = self.model.embed_tokens
        logits = self.lm_head(out) if "lm_head" in self else embedding.as_linear(out)  # type: ignore[operator]
        return LanguageModelOutput(logits=logits.astype(embedding.weight.dtype))

    def _make_mask(self, inputs: mx.array, cache: Any) -> mx.array:
        """Bool [1, 1, n, cached + n]: what each token of a chunk sees. An image must lie in one chunk."""
        library = importlib.import_module(_LANGUAGE)
        own = library.create_falcon_ocr_mask(inputs, self.config.image_cls_token_id, self.config.img_end_id)
        before = mx.ones((1, 1, inputs.shape[1], cache[0].offset), mx.bool_)
        return mx.concatenate([before, own], axis=-1)


def _is_empty(cache: Any) -> bool:
    return isinstance(cache.offset, int) and cache.offset == 0


def hook_positions(model: nn.Module) -> int:
    """Let the language model of Falcon OCR take positions with each call. Returns 1 if it is this model."""
    language = getattr(model, "language_model", None)
    if type(language).__module__ != _LANGUAGE:
        return 0
    mix_in(language, _GivenPositions, "Positioned")
    return 1
