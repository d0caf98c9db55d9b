"""Language models that leave out the embeddings which they are given, and so see no image.

mlx-vlm's language model of DeepSeek V3, which Mistral Large 3 has beside a vision tower, takes
`inputs_embeds` and embeds the token ids all the same. Here embeddings go through its embedding layer
unchanged.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.hooks.derived_layers import mix_in

_LANGUAGE = "mlx_vlm.models.deepseek_v3.language"


class _TakesEmbeddings:
    """Before the methods of the library's language model."""

    def __call__(
        self, inputs: Any = None, cache: Any = None, inputs_embeds: mx.array | None = None, **given: Any
    ) -> Any:
        """Logits of token ids [B, L], or of embeddings [B, L, D] in their place."""
        call = super().__call__  # type: ignore[misc]
        return call(inputs if inputs_embeds is None else inputs_embeds, cache, **given)


class _PassesEmbeddings:
    """Before the methods of an embedding layer."""

    def __call__(self, x: mx.array) -> mx.array:
        """The embeddings of token ids. Floats are embeddings."""
        embed = super().__call__  # type: ignore[misc]
        return x if mx.issubdtype(x.dtype, mx.floating) else embed(x)


def hook_embeddings(model: nn.Module) -> int:
    """Let a language model beside a vision tower take embeddings. Returns 1 if it is one that does not."""
    language = getattr(model, "language_model", None)
    if type(language).__module__ != _LANGUAGE:
        return 0
    mix_in(language, _TakesEmbeddings, "Seeing")
    mix_in(language.model.embed_tokens, _PassesEmbeddings, "Passing")  # type: ignore[union-attr]
    return 1
