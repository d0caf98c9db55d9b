"""How many tokens a model has embeddings for.

A tokenizer may have more: special tokens that were added to it alone. MLX reads beyond the end of an array
without an error, so such a token would be answered with whatever lies there.
"""

from __future__ import annotations

import mlx.nn as nn
from mlx.utils import tree_flatten

NAMES = (
    *("embed_tokens", "tok_embeddings", "token_embeddings", "word_embeddings", "wte", "embed_in"),
    *("embedding", "embeddings", "embed"),
)


def count_token_embeddings(model: nn.Module, logits: int = 0) -> int:
    """Rows of the largest table of token embeddings, plain or quantized; at least `logits`, the width of the
    model's logits."""
    tables = {
        name: array.shape[0]
        for name, array in tree_flatten(model.parameters())
        if array.ndim == 2 and name.endswith(".weight") and name.split(".")[-2] in NAMES
    }
    return max(logits, *tables.values(), 0) if tables else 0
