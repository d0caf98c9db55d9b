"""Layers are recognised by what they compute. Twins with one difference are not taken for usual ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama, qwen3

from benchmarks.tiny.text_configs import make_text_config
from mlxrun.model.fused.layouts import find_layout, read_mlp, read_norm
from mlxrun.model.hooks.attention import hook_attention

# The names of the joined projections of attention and of the MLP, where it is one.
COVERED = {
    "llama": (3, 2),
    "qwen2": (3, 2),
    "qwen3": (3, 2),
    "mistral3": (3, 2),
    "smollm3": (3, 2),
    "phi3": (1, 1),
    "glm": (3, 1),
    "gemma": (3, 0),  # another activation
    "qwen3_moe": (3, 0),  # experts
    "mixtral": (3, 0),
}
OTHERS = (
    "gemma2",
    "gemma3_text",
    "olmo2",
    "cohere",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_next",
    "mamba2",
    "gpt2",
)


def make_model(family: str, **changes: Any) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(dict(make_text_config(family)) | changes))
    hook_attention(model)
    return model


@pytest.mark.parametrize("family", COVERED)
def test_usual_layers(family: str) -> None:
    layouts = [find_layout(layer) for layer in make_model(family).layers]
    for layout in layouts:
        assert layout is not None
        joined = len(layout.attention_layout.inputs), len(layout.mlp.inputs if layout.mlp else ())
        assert joined == COVERED[family]


@pytest.mark.parametrize("family", OTHERS)
def test_other_layers(family: str) -> None:
    assert [find_layout(layer) for layer in make_model(family).layers if find_layout(layer)] == []


def test_what_a_layout_says() -> None:
    layout, config = find_layout(make_model("qwen3").layers[0]), make_text_config("qwen3")
    assert layout is not None
    heads = layout.attention_layout.heads
    assert layout.norms == ("input_layernorm", "post_attention_layernorm")
    assert (heads.heads, heads.kv_heads) == (config["num_attention_heads"], config["num_key_value_heads"])
    assert heads.size == config["head_dim"] and layout.attention_layout.scale == heads.size**-0.5
    assert heads.rotary is not None and heads.rotary.turned == heads.size and not heads.rotary.traditional
    assert heads.rotary.base == config["rope_theta"] and heads.rotary.frequencies is None
    assert heads.norms is not None and heads.norms[0].eps == config["rms_norm_eps"]


def test_norms_of_queries_and_keys_are_told_apart() -> None:
    layer = make_model("qwen3").layers[0]
    own = layer.self_attn
    own.q_norm.weight, own.k_norm.weight = (1 + mx.arange(16) / n for n in (8, 4))
    layout = find_layout(layer)
    assert layout is not None and layout.attention_layout.heads.norms is not None
    query, key = layout.attention_layout.heads.norms
    assert query.weight is own.q_norm.weight and key.weight is own.k_norm.weight


def test_a_norm_says_how_it_is_computed() -> None:
    gemma = make_model("gemma").layers[0].input_layernorm
    rule = read_norm(gemma)
    assert rule is not None and mx.array_equal(rule.weight, 1 + gemma.weight).item()
    assert read_norm(nn.LayerNorm(8)) is None and read_norm(nn.Linear(8, 8)) is None


# -- twins ----------------------------------------------------------------------------------------------


class ScaledBlock(llama.TransformerBlock):
    """A scaled residual, as Granite's."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        h = x + 0.5 * self.self_attn(self.input_layernorm(x), mask, cache)
        return h + 0.5 * self.mlp(self.post_attention_layernorm(h))  # type: ignore[no-any-return]


class ParallelBlock(llama.TransformerBlock):
    """Attention and MLP beside each other, as Cohere's."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        attended = self.self_attn(self.input_layernorm(x), mask, cache)
        return x + attended + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class PostNormBlock(llama.TransformerBlock):
    """Norms behind, as OLMo 2's."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        h = x + self.input_layernorm(self.self_attn(x, mask, cache))
        return h + self.post_attention_layernorm(self.mlp(h))  # type: ignore[no-any-return]


class ReorderedBlock(llama.TransformerBlock):
    """Other arguments in other places."""

    def __call__(self, x: mx.array, cache: Any = None, mask: Any = None) -> mx.array:
        return super().__call__(x, mask, cache)  # type: ignore[no-any-return]


def change_attention(change: Callable[..., Any]) -> type:
    """Qwen 3's attention, whose queries, keys and values `change` makes others."""

    class Attention(qwen3.Attention):
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            def project(layer: Any, norm: Any, heads: int) -> mx.array:
                own = layer(x).reshape(*x.shape[:2], heads, -1)
                return (norm(own) if norm else own).transpose(0, 2, 1, 3)

            q, k = (
                project(self.q_proj, self.q_norm, self.n_heads),
                project(self.k_proj, self.k_norm, self.n_kv_heads),
            )
            v = project(self.v_proj, None, self.n_kv_heads)
            q, k = (self.rope(part, offset=cache.offset) for part in (q, k))
            q, k, v = change(q, k, v, cache.offset)
            keys, values = cache.update_and_fetch(k, v)
            out = qwen3.scaled_dot_product_attention(
                q, keys, values, cache=cache, scale=self.scale, mask=mask
            )
            return self.o_proj(out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))  # type: ignore[no-any-return]

    return Attention


def cool(q: mx.array, k: mx.array, v: mx.array, offset: mx.array) -> Any:
    """As Llama 4's, from some position on."""
    return q * mx.where(offset > 8192, 1.1, 1.0)[:, None, None, None], k, v


ATTENTIONS = {
    "cooled queries": cool,
    "clipped values": lambda q, k, v, _: (q, k, mx.clip(v, -8, 8)),
    "normed values": lambda q, k, v, _: (q, k, mx.fast.rms_norm(v, None, 1e-6)),
    "scaled keys": lambda q, k, v, _: (q, k * 1.01, v),
    "keys and values": lambda q, k, v, _: (q, v, k),
}


@pytest.mark.parametrize("twin", [ScaledBlock, ParallelBlock, PostNormBlock, ReorderedBlock])
def test_a_layer_of_another_order_is_not_usual(twin: type) -> None:
    layer = make_model("llama").layers[0]
    assert find_layout(layer) is not None
    layer.__class__ = twin
    assert find_layout(layer) is None


def test_attention_of_the_twins_without_a_difference_is_usual() -> None:
    layer = make_model("qwen3").layers[0]
    layer.self_attn.__class__ = change_attention(lambda q, k, v, _: (q, k, v))
    assert find_layout(layer) is not None


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_with_a_difference_is_not_usual(name: str) -> None:
    layer = make_model("qwen3").layers[0]
    layer.self_attn.__class__ = change_attention(ATTENTIONS[name])
    assert find_layout(layer) is None


class GatedAttention(qwen3.Attention):
    """With a gate behind, as Qwen3-Next's."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return super().__call__(x, mask, cache) * 0.5  # type: ignore[no-any-return]


class GeluMLP(llama.MLP):
    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.gelu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class ClippedMLP(llama.MLP):
    def __call__(self, x: mx.array) -> mx.array:
        gate = mx.minimum(self.gate_proj(x), 7.0)
        return self.down_proj(nn.silu(gate) * self.up_proj(x))  # type: ignore[no-any-return]


class SwappedMLP(llama.MLP):
    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self.gate_proj(x) * nn.silu(self.up_proj(x)))  # type: ignore[no-any-return]


def test_attention_with_a_gate_is_not_usual() -> None:
    layer = make_model("qwen3").layers[0]
    layer.self_attn.__class__ = GatedAttention
    assert find_layout(layer) is None


@pytest.mark.parametrize("twin", [GeluMLP, ClippedMLP, SwappedMLP])
def test_another_mlp_keeps_its_own_module(twin: type) -> None:
    layer = make_model("llama").layers[0]
    assert read_mlp(layer.mlp) is not None
    layer.mlp.__class__ = twin
    layout = find_layout(layer)
    assert layout is not None and layout.mlp is None


@pytest.mark.parametrize("scaling", ["yarn", "llama3", "linear", "dynamic"])
def test_scaled_positions(scaling: str) -> None:
    """Where a rotary module scales its input too, or its base by the longest row, the library computes it."""
    changes = {"rope_scaling": {"type": scaling, "factor": 4.0, "original_max_position_embeddings": 64}}
    layout = find_layout(make_model("llama", **changes).layers[0])
    assert (layout is not None) is (scaling in ("llama3", "linear"))
    if layout is not None:
        rotary = layout.attention_layout.heads.rotary
        assert rotary is not None
        assert (rotary.frequencies is not None) is (scaling == "llama3")
        assert rotary.scale == (0.25 if scaling == "linear" else 1.0)
