"""`python -m benchmarks decode-layers`: decode steps with the library's layers and with fused ones, in turns.

Models are presets of `mlxrun bench` with random weights, made in memory. All rows have one prompt. A step
samples the likeliest token, and is launched before the tokens of the last one are read, as in the engine.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxrun.cli.bench.models import PRESETS
from mlxrun.cli.bench.report import make_console, make_table
from mlxrun.core.errors import ConfigError
from mlxrun.model.fused.fused_blocks import hook_layers
from mlxrun.model.hooks.attention import hook_attention
from mlxrun.model.hooks.derived_layers import transpose_weights
from mlxrun.model.kv.ragged.decode_batch import JoiningRow
from mlxrun.model.kv.ragged.layer_caches import list_all_arrays
from mlxrun.model.load_check.layer_checks import check_layers
from mlxrun.model.machine.device import read_peak, start_measuring
from mlxrun.model.run.compute_methods import AnyDecodeBatch, ComputeMethods, make_decode_batch
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prompt_inputs import TEXT_ONLY

METHODS = (ComputeMethods("compiled"), ComputeMethods("fused"))
WARM_STEPS = 6
STD = 0.02  # of random weights


def run_layers_bench(
    name: str,
    rows: Sequence[int],
    context: int,
    steps: int,
    turns: int,
    say: Callable[[str], None],
    layers: int | None = None,
) -> dict[str, Any]:
    """Milliseconds of a step by number of rows: the medians over turns, and their ratio. `spare`: bytes that
    steps take besides weights and pages. `context`: tokens of each row; `layers`: fewer than the preset has.
    ConfigError for an unknown preset."""
    caller = make_random_caller(name, layers)
    found, (prompt, cache) = [], _prefill(caller, context)
    check = check_layers(caller.model)
    say(f"{name}: {check.describe()}")
    for count in rows:
        batches = [_start_batch(caller, methods, count, prompt, cache) for methods in METHODS]
        times: list[list[float]] = [[], []]
        spare = [0, 0]  # bytes beyond those that stay: pages that a step copies would count here
        for _ in range(turns):
            for i, batch in enumerate(batches):
                active = start_measuring(drop_pool=False)
                times[i].append(_time_steps(caller, batch, steps))
                spare[i] = max(spare[i], read_peak() - active)
        library, fused = map(statistics.median, times)
        say(f"{name}, {count} rows: {library:.2f} ms a step, fused {fused:.2f}: {library / fused:.2f} x")
        row = {"rows": count, "library_ms": library, "fused_ms": fused, "gain": library / fused}
        found.append(row | {"library_spare": spare[0], "fused_spare": spare[1]})
        del batches
    return {"model": name, "context": context, "check": check.passed, "rows": found}


def make_random_caller(name: str, layers: int | None = None) -> ModelCaller:
    """A preset with random weights in its type, and all hooks of layers."""
    if name not in PRESETS:
        raise ConfigError(f"--model {name}: no preset ({', '.join(PRESETS)})")
    config = PRESETS[name] | ({} if layers is None else {"num_hidden_layers": layers})
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    if quantization := config.get("quantization"):
        nn.quantize(model, **quantization)
    dtype = getattr(mx, config["dtype"])
    parameters = enumerate(tree_flatten(model.parameters()))
    model.update(tree_unflatten([(path, _fill(array, dtype, seed)) for seed, (path, array) in parameters]))
    for hook in (transpose_weights, hook_attention, hook_layers):
        hook(model)
    for _, array in tree_flatten(model.parameters()):
        mx.eval(array)
    model.eval()
    return ModelCaller(model)


def _fill(array: mx.array, dtype: mx.Dtype, seed: int) -> mx.array:
    key = mx.random.key(seed)
    if array.dtype == mx.uint32:
        return mx.random.bits(array.shape, key=key)
    if array.ndim == 1:
        return mx.ones(array.shape, dtype)
    return (STD * mx.random.normal(array.shape, dtype, key=key)).astype(dtype)


def _prefill(caller: ModelCaller, tokens: int) -> tuple[list[int], list[Any]]:
    prompt = np.random.default_rng(3).integers(2, 1000, tokens + 1).tolist()
    cache = caller.make_cache()
    caller.prefill(mx.array([prompt[:-1]]), cache, 0, TEXT_ONLY)
    mx.eval(list_all_arrays(cache))
    return prompt, cache


def _start_batch(
    caller: ModelCaller, methods: ComputeMethods, count: int, prompt: Sequence[int], cache: list[Any]
) -> AnyDecodeBatch:
    batch = make_decode_batch(caller.make_cache(), methods, compiled_at_once=True)
    length = len(prompt) - 1
    batch.update(set(), [JoiningRow(str(i), length, cache) for i in range(count)])
    _time_steps(caller, batch, WARM_STEPS)
    return batch


def _time_steps(caller: ModelCaller, batch: AnyDecodeBatch, steps: int) -> float:
    """Milliseconds of a step."""
    tokens = mx.zeros(len(batch.ids), dtype=mx.int32)
    mx.eval(tokens)
    started = time.perf_counter()
    for _ in range(steps):
        before = tokens
        with caller.use_attention():
            logits = batch.forward(caller.decode, tokens, batch.lengths)
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        mx.async_eval(tokens)
        mx.eval(before)
    mx.eval(tokens)
    return 1e3 * (time.perf_counter() - started) / steps


def print_layers_report(report: dict[str, Any]) -> None:
    """A row for each number of rows."""
    console, columns = (
        make_console(None),
        ("rows", "library, ms", "fused, ms", "gain", "library, MB", "fused, MB"),
    )
    cells = [
        (
            str(row["rows"]),
            *(f"{row[key]:.2f}" for key in ("library_ms", "fused_ms", "gain")),
            *(f"{row[key] / 1e6:.0f}" for key in ("library_spare", "fused_spare")),
        )
        for row in report["rows"]
    ]
    console.print(make_table(columns, 0, cells, console.is_terminal))
