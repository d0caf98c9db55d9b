"""The memory that a model takes at most: while it is loaded, and while rows run.

These are the sizes that MLX's own counter reaches, for rows of equal length that arrive together. What
admission reserves for rows is more, since rows of other lengths need padding (memory_budget.py).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mlxrun.config.settings import Config
from mlxrun.core.errors import ModelLoadError
from mlxrun.model.fit.outline import ModelOutline, trace_encoding, trace_prefill
from mlxrun.model.fit.traced_memory import TracedBytes, measure_traced
from mlxrun.model.kv.ragged.layer_caches import flatten_caches
from mlxrun.model.kv.ragged.row_group import BUFFER_STEP, choose_buffer_tokens, count_spare_rows
from mlxrun.model.load.footprint import (
    ACTIVATION_FACTOR,
    list_tensor_bytes,
    measure_footprint,
    read_hidden_size,
)
from mlxrun.model.load.loader import choose_dtype
from mlxrun.model.load_check.attention_checks import LONG
from mlxrun.model.load_check.media_prompts import make_image_prompt
from mlxrun.model.run.model_caller import VisionModelCaller

log = logging.getLogger(__name__)

CHECK_ROWS = 28  # of BUFFER_STEP tokens, that the load check has in memory: measured
CONVERTED_AHEAD = 5  # tensors that are read before the first of them is converted: measured
IMAGE_SIDE = 1024  # pixels of the image whose encoding is predicted
TRACED_TOKENS = 512  # of a row: arrays of longer chunks are larger in proportion


@dataclass(frozen=True, slots=True)
class PredictedMemory:
    """Bytes. `weights`: in memory; `load`: the most while the model is loaded and checked; `run`: the most
    while rows run, weights included."""

    weights: int
    load: int
    run: int


def predict_encoding(outline: ModelOutline, side: int = IMAGE_SIDE) -> int | None:
    """The most bytes, beside the weights, while an image of `side` x `side` pixels is encoded. 0 if the model
    takes no images, None if it cannot be known before the model is loaded."""
    if not isinstance(outline.caller, VisionModelCaller):
        return 0
    try:
        return measure_traced(trace_encoding(outline, make_image_prompt(outline.info, side))).peak
    except Exception:  # a library may raise anything
        log.debug("the memory of an image cannot be predicted", exc_info=True)
        return None


def predict_memory(
    config: Config, outline: ModelOutline, rows: int, prompt: int, output: int
) -> PredictedMemory:
    """The memory of `rows` rows with a prompt and an answer of so many tokens. `config`: with the values that
    depend on the device."""
    load = outline.weights + max(_predict_conversion(config, outline), _predict_check(config, outline))
    run = outline.weights + _predict_rows(config, outline, rows, prompt, output)
    return PredictedMemory(outline.weights, load, run)


def _predict_conversion(config: Config, outline: ModelOutline) -> int:
    """Bytes of weights that are in memory in the files' form while they are converted."""
    dtype = choose_dtype(config.model)
    sizes = list(list_tensor_bytes(outline.info, None if dtype is None else dtype.size))
    converted = [own if own != loaded else 0 for own, loaded in sizes]
    ahead = CONVERTED_AHEAD
    return max((sum(converted[at : at + ahead]) for at in range(len(converted))), default=0)


def _predict_check(config: Config, outline: ModelOutline) -> int:
    """Bytes of the rows and arrays that the load check compares."""
    if not config.engine.load_check:
        return 0
    layers = [measure_footprint([layer], padding=1) for layer in flatten_caches(outline.cache)]
    token = max(max([layer.per_token, *(size for _, size in layer.windows)]) for layer in layers)
    rows = CHECK_ROWS * sum(layer.compute_row_bytes(BUFFER_STEP) for layer in layers)
    return rows + max(keys for _, keys in LONG) * token


def _predict_rows(config: Config, outline: ModelOutline, rows: int, prompt: int, output: int) -> int:
    """The most bytes beside the weights."""
    scheduler, row = config.scheduler, measure_footprint(outline.cache, padding=1)
    assert scheduler.chunk is not None
    first = min(prompt, scheduler.chunk)
    filled = min(rows, -(-scheduler.prefill_budget // prompt))  # rows whose prompts the first step computes
    own = filled * row.compute_row_bytes(prompt + min(output, BUFFER_STEP))
    forward = measure_forward(outline, min(filled, scheduler.prefill_rows), first)
    if prompt > first:  # the caches that the rows' first chunks had together
        own += forward.results
    prefill = own + forward.peak - forward.results
    if rows == 1:  # it keeps its own caches
        return prefill
    tokens = choose_buffer_tokens(prompt + output)
    batch = max(rows, filled + count_spare_rows(filled, tokens)) * row.compute_row_bytes(tokens)
    later = [
        measure_forward(outline, rows, 1),
        *([measure_forward(outline, 1, first)] if filled < rows else []),
    ]
    return max(prefill, own + batch + max(each.peak - each.results for each in later))


def measure_forward(outline: ModelOutline, rows: int, tokens: int) -> TracedBytes:
    """Bytes of a forward of so many prompt tokens of each row; `results` are the caches that it fills."""
    traced_tokens = min(tokens, TRACED_TOKENS)
    try:
        traced, _, _ = trace_prefill(outline, rows, traced_tokens)
    except ModelLoadError:
        caches = rows * measure_footprint(outline.cache, padding=1).compute_row_bytes(tokens)
        arrays = rows * tokens * read_hidden_size(outline.info.config) * 4 * ACTIVATION_FACTOR
        return TracedBytes(caches + arrays, caches)
    found = measure_traced(traced)
    return TracedBytes(found.peak * tokens // traced_tokens, found.results * tokens // traced_tokens)
