"""A model without its weights: the library builds it from its files, and no weight is read or computed.

Its parameters are lazy arrays, with the shapes and types that they would have in the engine. So weights,
caches and forwards have their sizes by the same code that loads and runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlxrun.config.settings import Config
from mlxrun.core.errors import ModelLoadError
from mlxrun.core.request import ProcessedPrompt
from mlxrun.model.fit.traced_memory import TracedFunction, trace_function
from mlxrun.model.hooks.adapted_layers import RowAdapters
from mlxrun.model.hooks.attention import hook_attention
from mlxrun.model.hooks.device_attention import BLOCK_LOGITS
from mlxrun.model.hooks.engine_attention import use_engine_attention
from mlxrun.model.hooks.quantized_layers import describe_quantization, hold_dequantized, hook_products
from mlxrun.model.hooks.weight_form import FIXED_TABLES, PLAIN_WEIGHTS, plan_weights
from mlxrun.model.kv.ragged.layer_caches import list_all_arrays, reserve_capacity
from mlxrun.model.load.footprint import count_weight_bytes
from mlxrun.model.load.loader import find_dtype, load_lazily, make_caller
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.machine.decisions import Decision, WeightsInMemory
from mlxrun.model.machine.device import get_backend
from mlxrun.model.run.model_caller import ModelCaller, VisionModelCaller
from mlxrun.model.run.prompt_inputs import TEXT_ONLY

TRIAL_TOKENS = 2


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """A model whose weights are not read. `weights`: the most bytes that they take in memory; `least`: fewer,
    if a measurement at load decides their form; `form`: how that is decided; `kinds`: of quantized weights;
    `cache`: caches [1, ...] that hold a few tokens; `vocab`: width of its logits."""

    info: LoadedModelInfo
    caller: ModelCaller
    weights: int
    least: int
    form: Decision[WeightsInMemory]
    kinds: tuple[str, ...]
    cache: Sequence[Any]
    vocab: int


def load_outline(config: Config, info: LoadedModelInfo) -> ModelOutline:
    """Build the model of a config. ModelLoadError or ConfigError as when it is loaded."""
    model, _, dtype = load_lazily(config.model, info)
    kinds, quantized = tuple(describe_quantization(model)), count_weight_bytes(model)
    dtype = dtype or find_dtype(model)
    layers, form = plan_weights(model, config, dtype)
    if form.value in ("held", "timed"):
        hold_dequantized(layers, dtype, lazy=True)
    elif kinds:
        hook_products(model, FIXED_TABLES[get_backend()])
    hook_attention(model)
    caller = make_caller(config, info, model, PLAIN_WEIGHTS, RowAdapters())
    weights = count_weight_bytes(model)
    least = quantized if form.value == "timed" else weights
    outline = ModelOutline(info, caller, weights, least, form, kinds, (), 0)
    _, cache, vocab = trace_prefill(outline, 1, TRIAL_TOKENS)
    return replace(outline, cache=cache, vocab=vocab)


def trace_prefill(outline: ModelOutline, rows: int, tokens: int) -> tuple[TracedFunction, list[Any], int]:
    """The forward that fills empty caches with `tokens` tokens of each row; these caches, whose arrays have
    shapes only; and the width of the logits. ModelLoadError if the model reads values while it is built."""
    caller, seen = outline.caller, dict[str, Any]()

    def fill(ids: mx.array) -> list[mx.array]:
        cache = reserve_capacity(caller.make_cache(), tokens)
        with use_engine_attention(on_cpu=outline_attention):
            logits = caller.prefill(ids, cache, 0, TEXT_ONLY)
        seen.update(cache=cache, vocab=logits.shape[-1])
        return list_all_arrays(cache)

    traced = _trace_model(outline, fill, mx.ones((rows, tokens), mx.int32))
    return traced, seen["cache"], seen["vocab"]


def trace_encoding(outline: ModelOutline, prompt: ProcessedPrompt) -> TracedFunction:
    """The forward that makes the embeddings of a prompt with images. Its tokens, and the shapes of its
    images, are values that the model may read. ModelLoadError if it reads others."""
    assert isinstance(outline.caller, VisionModelCaller)
    embedder, media = outline.caller.embedder, dict(prompt.media)

    def embed(pixels: mx.array) -> list[mx.array]:
        made = embedder.embed_prompt(prompt.ids, media | {"pixel_values": pixels})
        return [made.embeds, *made.deepstack]

    return _trace_model(outline, embed, mx.array(media["pixel_values"]))


def _trace_model(
    outline: ModelOutline, function: Callable[[mx.array], list[mx.array]], given: mx.array
) -> TracedFunction:
    """Trace a function of an array and of the model's parameters. ModelLoadError if it reads their values."""
    model = outline.caller.model
    own = dict(tree_flatten(model.parameters()))

    def call(given: mx.array, **parameters: mx.array) -> list[mx.array]:
        model.update(tree_unflatten(list(parameters.items())))
        return function(given)

    try:
        return trace_function(call, {"given": given, **own})
    except (ValueError, RuntimeError) as error:
        raise ModelLoadError(
            f"{outline.info.name}: its size cannot be known before it is loaded: {error}"
        ) from error
    finally:
        model.update(tree_unflatten(list(own.items())))


def outline_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, **_: Any
) -> mx.array:
    """An array like that of `compute_attention`, made by as large arrays. It waits where that evaluates."""
    rows, heads, length, _ = queries.shape
    logits = mx.zeros(min(BLOCK_LOGITS, rows * heads * length * keys.shape[2]))
    scaled = (queries * scale).sum(axis=-1, keepdims=True)
    (scaled,) = mx.depends([scaled], [keys])
    read = scaled + keys.sum() + values.sum() + logits.sum()
    shape = (rows, heads, length, values.shape[-1])
    return mx.broadcast_to(read, shape) * mx.ones(shape, queries.dtype)
