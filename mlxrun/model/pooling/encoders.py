"""Encoders, which mlx-lm does not have: BERT and RoBERTa's relatives, and ModernBERT.

Parameters have the names of the checkpoints after `rename_weight`. All encoders take joined tokens: `ids` and
`types` [N], and give states [N, D]. Their `TextBlocks` says where texts begin and end.

On MLX's CPU backend `erf` and `exp` are scalar. The library's GELU takes almost half of the processor time of
an encoder of MiniLM's shape. NumPy computes the same in an eighth of it, in blocks that stay in the
processor's cache. Other devices and dtypes use the library's GELU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxrun.core.errors import ModelLoadError
from mlxrun.model.hooks.device_attention import compute_attention
from mlxrun.model.machine.numpy_blocks import Block, iterate_blocks, open_rows
from mlxrun.model.pooling.pooled_model import get_first_position

BLOCK_NUMBERS = 1 << 15  # that are computed together: three arrays of 128 KB
Masks: TypeAlias = Sequence[mx.array | None]
# P(X > u) of the normal distribution is exp(c0 + c1 * u + ... + c6 * u**6), for all u of 0 and more: a fit by
# which the tail u * P(X > u) is within 5e-8. The numbers are from c6 to c0.
FACTORS = (2.2938251e-05, -0.00053318311, 0.0056011281, -0.037022453, -0.31799582, -0.79795223, -0.69314235)
LAST_TAIL = 9.0  # the tail of larger numbers is below 1e-18, and their powers may overflow


def compute_gelu(x: mx.array) -> mx.array:
    """x * P(X <= x) of the normal distribution, within 3e-7, of any shape. On a CPU, float32 is evaluated at
    once and may be written into `x`, which nothing else may use."""
    if x.dtype != mx.float32 or mx.default_device() != mx.cpu:
        return nn.gelu(x)
    rows = open_rows(x)
    if rows is None:  # its numbers lie apart
        return compute_gelu(mx.contiguous(x))
    for block, size, tail in iterate_blocks(rows, BLOCK_NUMBERS, scratch=2):
        _subtract_tail(block, size, tail)
    return x


def _subtract_tail(block: Block, size: Block, tail: Block) -> None:
    """Turn numbers into their GELU: max(x, 0) - |x| * P(X > |x|). The others are scratch."""
    np.abs(block, out=size)
    np.minimum(size, LAST_TAIL, out=size)
    np.multiply(size, FACTORS[0], out=tail)
    for factor in FACTORS[1:-1]:
        tail += factor
        tail *= size
    tail += FACTORS[-1]
    np.exp(tail, out=tail)
    tail *= size
    np.maximum(block, 0, out=block)
    block -= tail


def group_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """The lengths of texts, split into blocks. On a CPU those beside each other that are equal are a block,
    so that nothing is padding. Elsewhere, where each kernel costs time, all are one."""
    if mx.default_device() != mx.cpu:
        return [list(lengths)]
    return [list(same) for _, same in groupby(lengths)]


class TextBlocks:
    """Texts as joined tokens [N, ...]: blocks beside each other, whose texts are padded to one size."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = group_lengths(lengths)
        self._shapes = [(len(block), max(block)) for block in self._lengths]
        self._stops = list(accumulate(texts * size for texts, size in self._shapes))

    def join(self, rows: Sequence[Sequence[int]]) -> mx.array:
        """Numbers [N] of rows [texts, longest text]."""
        sizes = (size for texts, size in self._shapes for _ in range(texts))
        return mx.array([number for row, size in zip(rows, sizes, strict=True) for number in row[:size]])

    def make_positions(self) -> mx.array:
        """The places [N] of tokens in their texts."""
        return mx.array([at for texts, size in self._shapes for _ in range(texts) for at in range(size)])

    def split(self, joined: mx.array) -> list[mx.array]:
        """The blocks [texts, size, ...] of joined tokens [N, ...]."""
        blocks = zip(mx.split(joined, self._stops[:-1]), self._shapes, strict=True)
        return [part.reshape(*shape, *part.shape[1:]) for part, shape in blocks]

    def pad(self, joined: mx.array) -> mx.array:
        """States [texts, longest text, D] of joined ones [N, D]."""
        longest = max(size for _, size in self._shapes)
        parts = self.split(joined)
        return mx.concatenate([mx.pad(x, [(0, 0), (0, longest - x.shape[1]), (0, 0)]) for x in parts])

    def make_masks(self, window: int = 0) -> list[mx.array | None]:
        """For each block an additive mask [texts or 1, 1, 1 or size, size], None where all is seen. `window`:
        tokens seen on either side, 0: all."""
        blocks = zip(self._lengths, self._shapes, strict=True)
        return [_make_mask(lengths, size, window) for lengths, (_, size) in blocks]


def _make_mask(lengths: Sequence[int], size: int, window: int) -> mx.array | None:
    mask = make_padding_mask(mx.array(lengths), size) if min(lengths) < size else None
    if not window or size <= window + 1:
        return mask
    places = mx.arange(size)
    distance = mx.abs(places[:, None] - places[None])[None, None]
    local = mx.where(distance <= window, 0.0 if mask is None else mask, -mx.inf)
    # The token itself is never hidden: a row of padding would be NaN, which a mask does not end.
    return mx.where(distance == 0, 0.0, local)


def attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    blocks: TextBlocks,
    masks: Masks,
    rotate: Callable[[mx.array], mx.array] = lambda x: x,
) -> mx.array:
    """Attention [N, H * D] of queries, keys and values [N, H, D] of each text to itself. Masks are added to
    the logits, and may not hide all keys of a query. `rotate`: of queries and keys [texts, H, size, D]."""
    on_cpu = mx.default_device() == mx.cpu
    compute = compute_attention if on_cpu else mx.fast.scaled_dot_product_attention
    scale, found = q.shape[-1] ** -0.5, []
    for *block, mask in zip(*map(blocks.split, (q, k, v)), masks, strict=True):
        queries, keys, values = (x.swapaxes(1, 2) for x in block)
        mask = None if mask is None else mask.astype(q.dtype)
        out = compute(rotate(queries), rotate(keys), values, scale=scale, mask=mask)
        found.append(out.swapaxes(1, 2).reshape(-1, q.shape[1] * q.shape[2]))
    return mx.concatenate(found)


_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": compute_gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
}
_BERT_NAMES = (  # of checkpoints, and here
    (r"\.attention\.self\.", ".attention."),
    (r"\.attention\.output\.dense\.", ".attention.output."),
    (r"\.attention\.output\.LayerNorm\.", ".attention_norm."),
    (r"\.intermediate\.dense\.", ".intermediate."),
    (r"\.output\.dense\.", ".output."),
    (r"\.output\.LayerNorm\.", ".output_norm."),
    (r"\.LayerNorm\.(?:gamma|weight)$", ".LayerNorm.weight"),
    (r"\.LayerNorm\.(?:beta|bias)$", ".LayerNorm.bias"),
    (r"^encoder\.layer\.", "layers."),
)


def get_activation(name: str) -> Callable[[mx.array], mx.array]:
    """A function that may write into its argument. ModelLoadError for an unsupported activation."""
    if name not in _ACTIVATIONS:
        raise ModelLoadError(f"the activation {name!r} is not supported in encoders")
    return _ACTIVATIONS[name]


def make_padding_mask(lengths: mx.array, size: int) -> mx.array:
    """An additive mask [B, 1, 1, size] that hides the positions after each row's end."""
    inside = mx.arange(size)[None] < lengths[:, None]
    return mx.where(inside, 0.0, -mx.inf)[:, None, None]


class EncoderAttention(nn.Module):
    """The attention of BERT: every token sees all tokens of its row."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.output = nn.Linear(size, size)

    def __call__(self, x: mx.array, blocks: TextBlocks, masks: Masks) -> mx.array:
        split = (len(x), self._heads, -1)
        q, k, v = (project(x).reshape(split) for project in (self.query, self.key, self.value))
        return self.output(attend(q, k, v, blocks, masks))


class BertLayer(nn.Module):
    """A layer of BERT, with a norm after each part."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        size, inner, eps = config["hidden_size"], config["intermediate_size"], config["layer_norm_eps"]
        self.attention = EncoderAttention(size, config["num_attention_heads"])
        self.attention_norm = nn.LayerNorm(size, eps=eps)
        self.intermediate, self.output = nn.Linear(size, inner), nn.Linear(inner, size)
        self.output_norm = nn.LayerNorm(size, eps=eps)
        self._activate = get_activation(config["hidden_act"])

    def __call__(self, x: mx.array, blocks: TextBlocks, masks: Masks) -> mx.array:
        x = self.attention_norm(x + self.attention(x, blocks, masks))
        return self.output_norm(x + self.output(self._activate(self.intermediate(x))))


class BertEmbeddings(nn.Module):
    """Embeddings of tokens, positions and token types."""

    def __init__(self, config: Mapping[str, Any], first_position: int) -> None:
        super().__init__()
        size = config["hidden_size"]
        self.word_embeddings = nn.Embedding(config["vocab_size"], size)
        self.position_embeddings = nn.Embedding(config["max_position_embeddings"], size)
        self.token_type_embeddings = nn.Embedding(config["type_vocab_size"], size)
        self.LayerNorm = nn.LayerNorm(size, eps=config["layer_norm_eps"])
        self._first_position = first_position

    def __call__(self, ids: mx.array, types: mx.array, positions: mx.array) -> mx.array:
        states = self.word_embeddings(ids) + self.token_type_embeddings(types)
        return self.LayerNorm(states + self.position_embeddings(positions + self._first_position))


class BertEncoder(nn.Module):
    """BERT, RoBERTa, XLM-RoBERTa, CamemBERT."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise ModelLoadError(
                f"position_embedding_type {config['position_embedding_type']} is not supported"
            )
        config = {"layer_norm_eps": 1e-12, "hidden_act": "gelu", "type_vocab_size": 2, **config}
        self.embeddings = BertEmbeddings(config, get_first_position(config))
        self.layers = [BertLayer(config) for _ in range(config["num_hidden_layers"])]

    def __call__(self, ids: mx.array, types: mx.array, blocks: TextBlocks) -> mx.array:
        x = self.embeddings(ids, types, blocks.make_positions())
        masks = blocks.make_masks()
        for layer in self.layers:
            x = layer(x, blocks, masks)
        return x


class ModernBertLayer(nn.Module):
    """A layer of ModernBERT, with a norm before each part. `window`: tokens seen on either side, 0: all."""

    def __init__(self, config: Mapping[str, Any], index: int) -> None:
        super().__init__()
        size, eps, bias = config["hidden_size"], config["norm_eps"], config["norm_bias"]
        is_local = index % config["global_attn_every_n_layers"] != 0
        self.window = config["local_attention"] // 2 if is_local else 0
        self._heads = config["num_attention_heads"]
        self._base = config["local_rope_theta" if is_local else "global_rope_theta"]
        self.attn_norm = nn.Identity() if index == 0 else nn.LayerNorm(size, eps=eps, bias=bias)
        self.Wqkv = nn.Linear(size, 3 * size, bias=config["attention_bias"])
        self.Wo = nn.Linear(size, size, bias=config["attention_bias"])
        self.mlp_norm = nn.LayerNorm(size, eps=eps, bias=bias)
        inner = config["intermediate_size"]
        self.mlp_in = nn.Linear(size, 2 * inner, bias=config["mlp_bias"])
        self.mlp_out = nn.Linear(inner, size, bias=config["mlp_bias"])
        self._activate = get_activation(config["hidden_activation"])

    def __call__(self, x: mx.array, blocks: TextBlocks, masks: Masks) -> mx.array:
        q, k, v = (
            part.reshape(len(x), self._heads, -1)
            for part in mx.split(self.Wqkv(self.attn_norm(x)), 3, axis=-1)
        )
        x = x + self.Wo(attend(q, k, v, blocks, masks, self._rotate))
        value, gate = mx.split(self.mlp_in(self.mlp_norm(x)), 2, axis=-1)
        return x + self.mlp_out(self._activate(value) * gate)

    def _rotate(self, x: mx.array) -> mx.array:
        return mx.fast.rope(x, x.shape[-1], traditional=False, base=self._base, scale=1.0, offset=0)


class ModernBertEncoder(nn.Module):
    """ModernBERT: rotary positions, and attention of two kinds."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        config = read_modernbert_config(config)
        size, bias = config["hidden_size"], config["norm_bias"]
        self.tok_embeddings = nn.Embedding(config["vocab_size"], size)
        self.norm = nn.LayerNorm(size, eps=config["norm_eps"], bias=bias)
        self.layers = [ModernBertLayer(config, i) for i in range(config["num_hidden_layers"])]
        self.final_norm = nn.LayerNorm(size, eps=config["norm_eps"], bias=bias)

    def __call__(self, ids: mx.array, types: mx.array, blocks: TextBlocks) -> mx.array:
        x = self.norm(self.tok_embeddings(ids))
        masks = {window: blocks.make_masks(window) for window in {layer.window for layer in self.layers}}
        for layer in self.layers:
            x = layer(x, blocks, masks[layer.window])
        return self.final_norm(x)


def read_modernbert_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with defaults, and in its first form where the library wrote a newer one."""
    found = {
        **{"norm_eps": 1e-5, "norm_bias": False, "attention_bias": False, "mlp_bias": False},
        **{"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "local_attention": 128},
        **{"global_attn_every_n_layers": 3, "hidden_activation": "gelu"},
        **config,
    }
    for key, kind in (("global_rope_theta", "full_attention"), ("local_rope_theta", "sliding_attention")):
        rope = (config.get("rope_parameters") or {}).get(kind) or {}
        if rope.get("rope_type", "default") != "default":
            raise ModelLoadError(f"rope_type {rope['rope_type']} is not supported in ModernBERT")
        found[key] = rope.get("rope_theta", found[key])
    step, count = found["global_attn_every_n_layers"], found["num_hidden_layers"]
    kinds = ["sliding_attention" if i % step else "full_attention" for i in range(count)]
    if config.get("layer_types", kinds) != kinds:
        raise ModelLoadError("layer_types other than one full_attention every n layers are not supported")
    return found


def rename_weight(name: str) -> str:
    """The name here of a checkpoint's tensor, without the name of the model around the encoder."""
    name = re.sub(r"^(bert|roberta|model)\.", "", name)
    if re.match(r"layers\.\d+\.(attn|mlp)\.|embeddings\.(tok_embeddings|norm)\.", name):
        name = name.removeprefix("embeddings.").replace(".attn.", ".")
        return name.replace(".mlp.Wi.", ".mlp_in.").replace(".mlp.Wo.", ".mlp_out.")
    for pattern, here in _BERT_NAMES:
        name = re.sub(pattern, here, name)
    return name
