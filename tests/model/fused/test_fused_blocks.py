"""Fused layers give the library's results bit by bit, where the operations are the library's own."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import BatchKVCache

from mlxrun.model.fused.fused_blocks import hook_layers, list_fused
from mlxrun.model.fused.operations import ARRAYS, ArrayOperations, HeadRule, NormRule
from mlxrun.model.run import model_caller
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prompt_inputs import TEXT_ONLY
from tests.helpers.fused_models import (
    STEPS,
    decode_rows,
    make_caller,
    multiply_rows,
    prefill_rows,
    use_packed_products,
)
from tests.helpers.model_fixtures import mark_sweep

FAMILIES = ("llama", "qwen2", "qwen3", "mistral3", "smollm3", "phi3", "glm", "gemma", "granite", "qwen3_moe")


class Counter(ArrayOperations):
    """Counts its operations."""

    def __init__(self) -> None:
        self.norms = self.heads = self.gates = 0

    def add_norm(self, *given: Any) -> tuple[mx.array, mx.array]:
        self.norms += 1
        return super().add_norm(*given)

    def make_heads(self, *given: Any) -> tuple[mx.array, mx.array]:
        self.heads += 1
        return super().make_heads(*given)

    def gate(self, product: mx.array) -> mx.array:
        self.gates += 1
        return super().gate(product)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", mark_sweep(FAMILIES, ("llama", "qwen3", "phi3", "gemma")))
def test_rows_decode_bit_by_bit_as_with_the_librarys_layers(family: str, compiled: bool) -> None:
    expected = decode_rows(make_caller(family, fused=False), None)
    caller = make_caller(family)
    assert mx.array_equal(decode_rows(caller, ARRAYS, compiled), expected).item()
    assert mx.array_equal(decode_rows(caller, None, compiled), expected).item()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", mark_sweep(FAMILIES, ("llama", "qwen3", "phi3", "gemma")))
def test_prompts_are_computed_bit_by_bit_as_with_the_librarys_layers(family: str, rows: int) -> None:
    expected = prefill_rows(make_caller(family, fused=False), rows)
    caller = make_caller(family)
    caller.fused_prompts = True
    found = prefill_rows(caller, rows)
    assert all(mx.array_equal(*pair).item() for pair in zip(found, expected, strict=True))


def test_only_chunks_of_the_engines_own_forwards_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of one token, and what the library computes by itself, take no operations of ours."""
    counter = Counter()
    monkeypatch.setattr(model_caller, "choose_operations", lambda: counter)
    caller = make_caller("llama")
    layers = len(caller.model.layers)
    prefill_rows(caller)
    caller.fused_prompts = True
    caller.prefill(mx.array([[1, 2, 3]]), caller.make_cache(), 0, TEXT_ONLY)
    caller.call_library([1, 2, 3], caller.make_cache(), 0)
    assert counter.heads == 0
    prefill_rows(caller)
    assert (counter.heads, counter.norms, counter.gates) == (2 * layers, 4 * layers, 2 * layers)


def test_a_cache_of_many_positions_is_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's batch cache has a position for each row."""
    counter = Counter()
    monkeypatch.setattr(model_caller, "choose_operations", lambda: counter)
    caller = make_caller("llama")
    caller.fused_prompts = True
    cache = [BatchKVCache([0, 0]) for _ in caller.model.layers]
    with caller.use_attention():
        mx.eval(caller.model(mx.array([[1, 2, 3], [4, 5, 6]]), cache=cache))
    assert counter.heads == 0


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision(dtype: mx.Dtype) -> None:
    expected = decode_rows(make_caller("qwen3", dtype, fused=False), None)
    assert mx.array_equal(decode_rows(make_caller("qwen3", dtype)), expected).item()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_quantized_weights(family: str, bits: int) -> None:
    expected = decode_rows(make_caller(family, bits=bits, fused=False), None)
    assert mx.array_equal(decode_rows(make_caller(family, bits=bits)), expected).item()


def test_what_follows_a_quantized_product_is_made_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate, and both sums of a layer."""
    expected = decode_rows(make_caller("llama", bits=4, fused=False), None)
    caller, counter, made = make_caller("llama", bits=4), Counter(), [0, 0]

    def multiply(layer: Any, x: mx.array, gated: bool = False, added: mx.array | None = None) -> mx.array:
        made[0] += gated
        made[1] += added is not None
        return multiply_rows(layer, x, gated, added)

    use_packed_products(caller.model, multiply, monkeypatch)
    found, layers = decode_rows(caller, counter), len(caller.model.layers)
    assert mx.allclose(found, expected, atol=1e-4).item()
    assert made == [layers * STEPS, 2 * layers * STEPS]
    assert (counter.norms, counter.gates) == (0, 0) and counter.heads == layers * STEPS


def test_the_operations_of_a_step() -> None:
    """The sums of a layer are each made with the norm behind, the last one with the model's own."""
    caller, counter = make_caller("llama"), Counter()
    layers = len(caller.model.layers)
    decode_rows(caller, counter)
    steps = counter.heads // layers
    assert steps == 4 and (counter.norms, counter.gates) == (2 * layers * steps, layers * steps)


def test_a_norm_is_made_again_for_what_came_between_layers() -> None:
    """As mlx-vlm adds features of images behind the first layers."""
    outputs = []
    for fused in (False, True):
        caller = make_caller("llama", fused=fused)
        trunk: Any = caller.model.model

        class Shifted(type(trunk.layers[1])):  # type: ignore[misc]
            def __call__(self, x: mx.array, *given: Any, **named: Any) -> mx.array:
                return super().__call__(x + 1, *given, **named)  # type: ignore[no-any-return]

        trunk.layers[1].__class__ = Shifted
        outputs.append(decode_rows(caller, ARRAYS if fused else None))
    assert mx.array_equal(*outputs).item()


def test_a_layer_with_further_arguments_is_the_librarys() -> None:
    caller = make_caller("llama")
    layer = caller.model.layers[0]
    kind = type(layer).__mro__[2]
    seen: list[Any] = []

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None, extra: Any = None) -> mx.array:
        seen.append(extra)
        return x

    original = kind.__call__
    try:
        kind.__call__ = call
        cache = type("Cache", (), {})()
        layer(mx.zeros((1, 1, 64)), None, cache, "extra")
    finally:
        kind.__call__ = original
    assert seen == ["extra"]


def test_no_weight_is_held_twice() -> None:
    gc.collect()
    before = mx.get_active_memory()  # what other tests keep
    caller = make_caller("qwen3", fused=False)
    model = caller.model
    parameters = dict(tree_flatten(model.parameters()))
    mx.eval(parameters)
    expected, size = (
        {name: mx.array(a) for name, a in parameters.items()},
        sum(a.nbytes for a in parameters.values()),
    )
    del parameters
    hook_layers(model)
    mx.eval(model.parameters())
    found = dict(tree_flatten(model.parameters()))
    assert found.keys() == expected.keys() and sum(a.nbytes for a in found.values()) == size
    assert all(mx.array_equal(found[name], expected[name]).item() for name in expected)
    del expected, found
    mx.clear_cache()
    gc.collect()
    assert mx.get_active_memory() - before < 1.3 * size


def test_a_second_hook_changes_nothing() -> None:
    caller = make_caller("llama")
    layers = list_fused(caller.model)
    assert hook_layers(caller.model) == 0 and list_fused(caller.model) == layers


def test_layers_that_a_model_uses_twice_are_the_librarys() -> None:
    model = make_caller("llama", fused=False).model
    model.model.layers = [model.model.layers[0]] * 2
    assert hook_layers(model) == 0


def test_a_model_without_such_layers() -> None:
    assert hook_layers(nn.Sequential(nn.Linear(4, 4))) == 0


# -- twins: a step with a fault differs -----------------------------------------------------------------


def swap_weights(caller: ModelCaller) -> None:
    for layer in list_fused(caller.model):
        first, second = layer.second, layer.second.weight
        layer.second = NormRule(second[::-1], first.eps)


def lose_follower(caller: ModelCaller) -> None:
    """The norm behind a layer is that of another."""
    layers = list_fused(caller.model)
    for layer in layers[:-1]:
        assert layer.follower is not None and layers[0].follower is not None
        layer.follower = layer.follower[0], NormRule(layer.follower[1].weight + 0.1, 1e-6)


def change_heads(caller: ModelCaller) -> None:
    for layer in list_fused(caller.model):
        own = layer.heads
        layer.heads = HeadRule(own.heads, own.kv_heads, own.size, own.norms)


def change_scale(caller: ModelCaller) -> None:
    for layer in list_fused(caller.model):
        layer.scale *= 1.02


@pytest.mark.parametrize("plant", [swap_weights, lose_follower, change_heads, change_scale])
def test_a_planted_fault_changes_the_logits(plant: Any) -> None:
    expected = decode_rows(make_caller("qwen3", fused=False), None)
    caller = make_caller("qwen3")
    plant(caller)
    assert not mx.allclose(decode_rows(caller), expected, rtol=1e-3, atol=1e-3).item()
    assert mx.array_equal(decode_rows(caller, None), expected).item()


@pytest.mark.parametrize("plant", [swap_weights, lose_follower, change_heads, change_scale])
def test_a_planted_fault_changes_prompts(plant: Any) -> None:
    expected = prefill_rows(make_caller("qwen3", fused=False))
    caller = make_caller("qwen3")
    plant(caller)
    assert mx.array_equal(prefill_rows(caller)[0], expected[0]).item()
    caller.fused_prompts = True
    assert not mx.allclose(prefill_rows(caller)[0], expected[0], rtol=1e-3, atol=1e-3).item()
