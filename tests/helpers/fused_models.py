"""Tiny models with fused layers, and rows that decode from pages, on a CPU."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map_with_path

from benchmarks.tiny.text_configs import make_text_config
from mlxrun.model.fused.fused_blocks import hook_layers
from mlxrun.model.fused.operations import ARRAYS, LayerOperations
from mlxrun.model.hooks import quantized_layers, skinny_gemm
from mlxrun.model.hooks.attention import hook_attention
from mlxrun.model.hooks.derived_layers import transpose_weights
from mlxrun.model.hooks.quantized_layers import MethodTable, dequantize_weight, hook_products, list_routed
from mlxrun.model.kv.paged.paged_batch import PagedDecodeBatch
from mlxrun.model.kv.ragged.decode_batch import JoiningRow
from mlxrun.model.kv.ragged.layer_caches import list_all_arrays
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prompt_inputs import TEXT_ONLY
from tests.helpers import text_models

PROMPTS = text_models.prompts(3, (5, 40, 12))
STEPS = 4


def make_caller(
    family: str,
    dtype: mx.Dtype = mx.float32,
    bits: int | None = None,
    fused: bool = True,
    changes: Mapping[str, Any] | None = None,
) -> ModelCaller:
    """A tiny model of a text family with random weights. `changes`: of its config."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    config = dict(make_text_config(family)) | dict(changes or {})
    model = module.Model(module.ModelArgs.from_dict(config))

    def fill(path: str, array: mx.array) -> mx.array:
        numbers = mx.random.normal(array.shape, key=mx.random.key(len(path) + array.size + hash_path(path)))
        return (1 + 0.3 * numbers if array.ndim == 1 else numbers * array.shape[-1] ** -0.5).astype(dtype)

    model.update(tree_map_with_path(fill, model.parameters()))
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        hook_products(model, MethodTable())
    transpose_weights(model)
    hook_attention(model)
    if fused:
        assert hook_layers(model)
    model.eval()
    return ModelCaller(model)


def count_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the kernel of products by arrays; returns the rows of each of its products."""
    found: list[int] = []

    def multiply(layer: Any, x: mx.array, gated: bool = False, added: mx.array | None = None) -> mx.array:
        found.append(x.shape[0])
        return multiply_rows(layer, x, gated, added)

    monkeypatch.setattr(skinny_gemm, "multiply_few_rows", multiply)
    return found


def use_packed_products(model: nn.Module, multiply: Any, patch: pytest.MonkeyPatch) -> None:
    """Multiply rows by quantized weights by `multiply`, in place of the kernel."""
    for module in (quantized_layers, skinny_gemm):
        patch.setattr(module, "multiply_few_rows", multiply)
    patch.setattr(quantized_layers, "can_multiply_packed", lambda layer, dtype: True)
    table = MethodTable(((skinny_gemm.MOST_ROWS, "packed"), (65, "library")))
    hook_products(model, table)
    for layer in list_routed(model):
        layer.table = table


def hash_path(path: str) -> int:
    """The same number in every process."""
    return sum(i * ord(letter) for i, letter in enumerate(path))


def prefill_rows(caller: ModelCaller, rows: int = 1) -> list[mx.array]:
    """Logits [rows, V] behind each of three chunks, the last of one token, and what the caches then hold."""
    cache, start, found = caller.make_cache(), 0, list[mx.array]()
    for size in (24, 7, 1):
        tokens = mx.array(
            [[(11 * i + 5 * row) % 90 + 4 for i in range(start, start + size)] for row in range(rows)]
        )
        with caller.use_attention():
            found.append(caller.prefill(tokens, cache, start, TEXT_ONLY)[:, -1])
        mx.eval(found[-1], list_all_arrays(cache))
        start += size
    return [*found, *list_all_arrays(cache)]


def decode_rows(
    caller: ModelCaller,
    operations: LayerOperations | None = ARRAYS,
    compiled: bool = False,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> mx.array:
    """Logits [steps, rows, V] of rows that follow these prompts."""
    batch = PagedDecodeBatch(
        caller.make_cache(), compiled=compiled, compiled_at_once=compiled, operations=operations
    )
    rows = []
    for i, prompt in enumerate(prompts):
        cache = caller.make_cache()
        caller.prefill(mx.array([list(prompt)]), cache, 0, TEXT_ONLY)
        mx.eval(list_all_arrays(cache))
        rows.append(JoiningRow(str(i), len(prompt), cache))
    batch.update(set(), rows)
    steps = []
    for step in range(STEPS):
        tokens = mx.array([(7 * step + 3 * i) % 90 + 4 for i in range(len(prompts))])
        steps.append(batch.forward(caller.decode, tokens, batch.lengths))
        mx.eval(steps[-1])
    return mx.stack(steps)


def multiply_rows(layer: Any, x: mx.array, gated: bool = False, added: mx.array | None = None) -> mx.array:
    """What the kernel of `multiply_few_rows` computes, by the library, and each row by itself."""
    weight = dequantize_weight(layer, x.dtype) if "scales" in layer else layer["weight"]
    rows = x.reshape(-1, weight.shape[1])
    product = mx.concatenate([row[None] @ weight.T for row in rows])
    found = ARRAYS.gate(product) if gated else product
    between = x.shape[1:-1] if x.shape[-1] == weight.shape[1] else (1,)
    found = found.reshape(-1, *between, found.shape[-1])
    return found if added is None else added + found
