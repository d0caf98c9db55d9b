"""Decoder layers whose forwards take few kernels.

`hook_layers` derives the classes of layers of the layout of layouts.py. Such a layer is computed here while
rows decode from pages and the cache has `operations`. So it is in prompts for which `use_engine_attention`
has some. Else it is computed by the library's own code. The sum at the end of a layer is made together with
the norm that follows. If that norm is called with this very sum, it returns what was prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.fused.joined_layers import JoinedProduct
from mlxrun.model.fused.layouts import BlockLayout, find_layout, read_norm
from mlxrun.model.fused.operations import HeadRule, LayerOperations, NormRule
from mlxrun.model.hooks.attention import RowKeysCache
from mlxrun.model.hooks.derived_layers import mix_in
from mlxrun.model.hooks.engine_attention import attend_prompt, find_positions, get_prompt_operations
from mlxrun.model.hooks.even_products import multiply_and_add, takes_heads
from mlxrun.model.hooks.product_timing import StepProduct
from mlxrun.model.hooks.quantized_layers import list_modules
from mlxrun.model.kv.ragged.layer_caches import KEYED, get_kind


class _PreparedNorm(nn.Module):
    """Mixed into the classes of norms. `prepared`: an array, and the norm of it."""

    prepared: tuple[mx.array, mx.array] | None

    def __call__(self, x: mx.array) -> mx.array:
        prepared, found = self.prepared, None
        if prepared is not None:
            found = prepared[1] if prepared[0] is x else None
            self.prepared = None
        normed: mx.array = super().__call__(x) if found is None else found
        return normed


def prepare_norm(norm: nn.Module, prepared: tuple[mx.array, mx.array] | None) -> None:
    """Give the norm an array and its norm. A module would take them for parameters."""
    vars(norm)["prepared"] = prepared


@dataclass(slots=True)
class FusedLayer:
    """The parts of a layer. `follower`: the norm behind it, if there is one, and how it is computed."""

    norm: nn.Module
    product: JoinedProduct
    heads: HeadRule
    scale: float
    output: Callable[[mx.array], mx.array]
    second: NormRule
    middle: Callable[[mx.array], mx.array]
    gated: JoinedProduct | None
    follower: tuple[nn.Module, NormRule] | None = None

    def compute(self, x: mx.array, mask: Any, cache: Any, operations: LayerOperations) -> mx.array:
        """The layer's output [rows, n, D]: for one token of each row with a PagedCache, or for a chunk."""
        product = self.product(self.norm(x))
        if x.shape[1] == 1:
            queries, written = operations.make_heads(product, self.heads, cache.offset)
            attended = cache.update_joined(written).attend(queries, self.scale, mask)
            if not takes_heads(self.output):
                attended = attended.reshape(x.shape[0], 1, -1)
        else:
            attended = self._attend_chunk(product, mask, cache, operations)
        summed, normed = _add_product(self.output, attended, x, self.second, operations)
        middle = normed if self.gated is None else self.gated.gate(normed, operations.gate)
        if self.follower is None:
            return summed + self.middle(middle)
        norm, rule = self.follower
        prepared = _add_product(self.middle, middle, summed, rule, operations)
        prepare_norm(norm, prepared)
        return prepared[0]

    def _attend_chunk(
        self, product: mx.array, mask: Any, cache: Any, operations: LayerOperations
    ) -> mx.array:
        """Attention of a chunk [rows, n, heads * size], whose keys and values go into the library's cache."""
        rows, tokens, _ = product.shape
        positions = find_positions(cache.offset, tokens, rows)
        queries, written = operations.make_heads(product, self.heads, positions)
        keys, values = cache.update_and_fetch(written[:rows], written[rows:])
        attended = attend_prompt(queries, keys, values, self.scale, mask)
        return attended.transpose(0, 2, 1, 3).reshape(rows, tokens, -1)

    def list_products(self, operations: LayerOperations) -> Iterator[StepProduct]:
        """The products of plain weights in `compute`. `operations`: of the gate, if no product makes it."""
        if not takes_heads(self.output):
            return
        size, heads = self.second.weight.size, self.heads
        yield StepProduct(self.product, (1, size))
        yield StepProduct(self.output, (heads.heads, 1, heads.size))
        if self.gated is not None:
            yield StepProduct(partial(self.gated.gate, gate=operations.gate), (1, size))
            yield StepProduct(self.middle, (1, self.gated.outputs // 2))


def _add_product(
    product: Callable[[mx.array], mx.array],
    x: mx.array,
    before: mx.array,
    norm: NormRule,
    operations: LayerOperations,
) -> tuple[mx.array, mx.array]:
    """The sum of `before` and the product of x, and its norm: by the product's kernel and the library's norm,
    which take less of the host's time, or by `operations`."""
    summed = multiply_and_add(product, x, before)
    if summed is None:
        return operations.add_norm(before, product(x), norm)
    return summed, mx.fast.rms_norm(summed, norm.weight, norm.eps)


class _FusedBlock(nn.Module):
    """Mixed into the classes of layers."""

    fused: FusedLayer

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None, *more: Any, **named: Any) -> Any:
        operations = _find_operations(x, cache)
        if operations is None or any(value is not None for value in (*more, *named.values())):
            return super().__call__(x, mask, cache, *more, **named)
        return self.fused.compute(x, mask, cache, operations)


def _find_operations(x: mx.array, cache: Any) -> LayerOperations | None:
    """By what operations a layer computes these tokens; None: by the library's code."""
    if isinstance(cache, RowKeysCache):
        return cache.operations
    is_chunk = x.shape[1] > 1 and isinstance(getattr(cache, "offset", None), int)
    return get_prompt_operations() if is_chunk and get_kind(cache) in KEYED else None


def list_fused(model: nn.Module) -> list[FusedLayer]:
    """The layers of `hook_layers`."""
    return [module.fused for module in list_modules(model) if isinstance(module, _FusedBlock)]


def hook_layers(model: nn.Module) -> int:
    """Make the model's layers of the usual layout compute decode steps with few kernels, where the cache says
    so, and join their weights, lazily. Returns how many there are."""
    count = 0
    for parent in list_modules(model):
        for layers in [value for value in parent.values() if isinstance(value, list)]:
            count += _hook_row(parent, layers)
    return count


def _hook_row(parent: nn.Module, layers: Sequence[Any]) -> int:
    """Hook layers that follow each other."""
    fresh = [isinstance(layer, nn.Module) and not isinstance(layer, _FusedBlock) for layer in layers]
    if not all(fresh) or len({id(layer) for layer in layers}) < len(layers):
        return 0
    layouts = [find_layout(layer) for layer in layers]
    followers = [*(_find_first(*pair) for pair in zip(layers, layouts, strict=True)), _find_last(parent)][1:]
    for layer, layout, follower in zip(layers, layouts, followers, strict=True):
        if layout is not None:
            layer.fused = _make_layer(layer, layout)
            layer.fused.follower = follower
            mix_in(layer, _FusedBlock, "Fused")
            for norm in (layer[layout.norms[0]], *(() if follower is None else follower[:1])):
                if not isinstance(norm, _PreparedNorm):
                    prepare_norm(norm, None)
                    mix_in(norm, _PreparedNorm, "Prepared")
    return sum(layout is not None for layout in layouts)


def _find_first(layer: Any, layout: BlockLayout | None) -> tuple[nn.Module, NormRule] | None:
    """The norm at the beginning of a layer."""
    return None if layout is None else (layer[layout.norms[0]], layout.rules[0])


def _find_last(parent: nn.Module) -> tuple[nn.Module, NormRule] | None:
    """The norm behind the last layer, if it is clear which one that is."""
    parts = [part for part in parent.values() if isinstance(part, nn.Module)]
    norms = [(part, rule) for part in parts if (rule := read_norm(part)) is not None]
    return norms[0] if len(norms) == 1 else None


def _make_layer(layer: Any, layout: BlockLayout) -> FusedLayer:
    attention, middle = layer[layout.attention], layer[layout.middle]
    own, mlp = layout.attention_layout, layout.mlp
    return FusedLayer(
        layer[layout.norms[0]],
        JoinedProduct([attention[name] for name in own.inputs]),
        own.heads,
        own.scale,
        attention[own.output],
        layout.rules[1],
        middle if mlp is None else middle[mlp.output],
        None if mlp is None else JoinedProduct([middle[name] for name in mlp.inputs]),
    )
