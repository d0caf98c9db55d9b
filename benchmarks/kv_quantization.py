"""`python -m benchmarks kv-quantization`: what quantized keys and values change for rows that decode a text.

Each row is a stretch of a text: the first tokens are its prompt, and the next ones are decoded whatever the
model would say, so that all conditions decode the same tokens. Their logits are compared with those of full
precision, and with the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxrun.cli.bench.report import make_console, make_table
from mlxrun.config.settings import Config
from mlxrun.core.errors import ConfigError
from mlxrun.model.hooks.engine_attention import use_engine_attention
from mlxrun.model.kv.ragged.decode_batch import JoiningRow
from mlxrun.model.kv.ragged.quantized_buffer import GROUP_SIZES, KVQuantization
from mlxrun.model.load.footprint import PADDING_FACTOR, measure_footprint
from mlxrun.model.load.loader import load_caller
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.run.compute_methods import ComputeMethods, make_decode_batch
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prompt_inputs import TEXT_ONLY

CHUNK = 256  # tokens of a prompt that are computed together
Form = KVQuantization | None


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens of one row, and its caches with the prompt, which all conditions read."""

    tokens: Sequence[int]
    cache: list[Any]


def run_kv_bench(
    config: Config, text: Path, rows: int, prompt: int, steps: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Bytes of a token, perplexity, and how far the logits of each condition are from full precision."""
    info = load_model_info(config.model, weights=True)
    ids = info.tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False)
    size = prompt + steps + 1
    if len(ids) < rows * size:
        raise ConfigError(f"{text} has {len(ids)} tokens, and {rows} rows take {rows * size}")
    caller = load_caller(config, info)
    stretches = []
    for row in range(rows):
        say(f"prompt {row + 1} of {rows}")
        stretches.append(_prefill(caller, ids[row * size : (row + 1) * size], prompt))
    head = min(_list_heads(stretches[0].cache))
    group = next(size for size in GROUP_SIZES if head % size == 0)
    forms: dict[str, Form] = {
        "full": None,
        **{f"{bits} bits": KVQuantization(bits, group, 0) for bits in (8, 4)},
    }
    found: dict[str, dict[str, Any]] = {}
    full = mx.zeros(0)
    for name, form in forms.items():
        say(name)
        logprobs, seconds = _decode(caller, stretches, prompt, steps, form)
        full = full if name != "full" else logprobs
        found[name] = _compare(logprobs, full, stretches, prompt) | {
            "bytes_per_token": _count_bytes(stretches[0].cache, form),
            "step_ms": round(1000 * seconds / steps, 1),
        }
    shape = {"rows": rows, "prompt_tokens": prompt, "steps": steps, "group_size": group, "text": text.name}
    return {"model": config.model.path, "shape": shape, "workloads": found}


def _prefill(caller: ModelCaller, tokens: Sequence[int], prompt: int) -> Stretch:
    cache = caller.make_cache()
    for start in range(0, prompt, CHUNK):
        ids = mx.array([tokens[start : min(start + CHUNK, prompt)]])
        mx.eval(caller.prefill(ids, cache, start, TEXT_ONLY)[:, -1])
    return Stretch(tokens, cache)


def _decode(
    caller: ModelCaller, stretches: Sequence[Stretch], prompt: int, steps: int, form: Form
) -> tuple[mx.array, float]:
    """Log-probabilities [steps, rows, vocabulary] in float32, and the seconds that the steps took."""
    names = [str(at) for at in range(len(stretches))]
    batch = make_decode_batch(caller.make_cache(), ComputeMethods("ragged", quantization=form))
    joining = [JoiningRow(rid, prompt, row.cache) for rid, row in zip(names, stretches, strict=True)]
    batch.update(names, joining)
    found, started = [], 0.0
    for step in range(steps + 1):  # the first one quantizes the prompts, and is not timed
        started = started or (time.perf_counter() if step else 0.0)
        tokens = mx.array([stretches[int(rid)].tokens[prompt + step] for rid in batch.ids])
        order = mx.array([batch.ids.index(rid) for rid in names])
        with use_engine_attention():
            logits = batch.forward(caller.make_decode([0] * len(names)), tokens, batch.lengths)
        logits = logits.astype(mx.float32)[order]
        found.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(found[-1], batch.list_state_arrays())
        batch.update(names, [])
    return mx.stack(found[:steps]), time.perf_counter() - started


def _compare(
    logprobs: mx.array, full: mx.array, stretches: Sequence[Stretch], prompt: int
) -> dict[str, float]:
    steps = logprobs.shape[0]
    due = mx.array([row.tokens[prompt + 1 : prompt + 1 + steps] for row in stretches]).T[..., None]
    loss = -mx.take_along_axis(logprobs, due, axis=-1).mean()
    divergence = (mx.exp(full) * (full - logprobs)).sum(axis=-1).mean()
    same = (full.argmax(axis=-1) == logprobs.argmax(axis=-1)).mean()
    return {
        "perplexity": round(mx.exp(loss).item(), 3),
        "kl_divergence": round(divergence.item(), 5),
        "same_token": round(same.item(), 4),
    }


def _list_heads(cache: Sequence[Any]) -> list[int]:
    return [array.shape[-1] for layer in cache for array in (layer.keys, layer.values)]


def _count_bytes(cache: Sequence[Any], form: Form) -> int:
    """Bytes of a token in all layers, without what buffers have to spare."""
    footprint = measure_footprint(cache, form)
    packed = footprint.packed_per_token
    return round((footprint.per_token if packed is None else packed) / PADDING_FACTOR)


def print_kv_report(report: dict[str, Any]) -> None:
    """A column for each condition."""
    found, console = report["workloads"], make_console(None)
    keys = next(iter(found.values()))
    cells = [(key.replace("_", " "), *(f"{case[key]:,}" for case in found.values())) for key in keys]
    console.print(make_table(("", *found), 1, cells, console.is_terminal))
