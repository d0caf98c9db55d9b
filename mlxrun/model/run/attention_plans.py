"""Prepares the attention of prompts on CUDA, before prompts come: cuDNN plans each shape when it is first
used (hooks/device_attention.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxrun.config.settings import SchedulerSettings
from mlxrun.model.hooks.device_attention import CUDNN_TYPES, STEP, attend_causally, round_length
from mlxrun.model.run.chunk_grouping import PrefillSharing
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prompt_inputs import TEXT_ONLY

LONGEST = 16384  # tokens of a prompt whose attention is prepared
# Where its chunks begin: at multiples of the first number, and then of the second. Few begin elsewhere, since
# all but the last one of a prompt are powers of two.
STARTS = (2048, 512)
MAX_DIM = 128  # numbers of a head whose attention cuDNN computes

Shape = tuple[int, int, int]  # rows, queries and keys


@dataclass(frozen=True, slots=True)
class PromptAttention:
    """What the attention of a layer's prompts has besides a shape."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype

    def compute(self, shape: Shape) -> mx.array:
        """The attention of zeros, lazy."""
        rows, queries, keys = shape
        made = [
            mx.zeros((rows, heads, tokens, dim), self.dtype)
            for heads, tokens, dim in (
                (self.heads, queries, self.key_dim),
                (self.kv_heads, keys, self.key_dim),
                (self.kv_heads, keys, self.value_dim),
            )
        ]
        return attend_causally(made[0], made[1], made[2], 1.0)


def prepare_attention(
    caller: ModelCaller, settings: SchedulerSettings, sharing: PrefillSharing, context: int
) -> Iterator[None]:
    """Prepare one shape after the other, the most usual ones first. `sharing`: of first chunks; `context`:
    most tokens of a prompt."""
    layouts = find_layouts(caller)
    for shape in list_shapes(settings, sharing, context) if layouts else ():
        mx.eval([layout.compute(shape) for layout in layouts])
        yield


def find_layouts(caller: ModelCaller) -> set[PromptAttention]:
    """Those of the model's layers that cuDNN computes. Nothing is computed."""
    found: set[PromptAttention] = set()

    def record(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any, **more: Any) -> None:
        layout = PromptAttention(q.shape[1], k.shape[1], k.shape[-1], v.shape[-1], q.dtype)
        fits = max(layout.key_dim, layout.value_dim) <= MAX_DIM and layout.dtype in CUDNN_TYPES
        if fits and mask == "causal" and not more:
            found.add(layout)

    with caller.use_attention(check=record):
        caller.prefill(mx.array([[1, 1]]), caller.make_cache(), 0, TEXT_ONLY)
    return found


def list_shapes(settings: SchedulerSettings, sharing: PrefillSharing, context: int) -> Iterable[Shape]:
    """Rows, queries and keys of chunks, each once: those of first chunks, then those of long prompts."""
    chunk = min(settings.chunk or settings.prefill_budget, settings.prefill_budget)
    longest = min(LONGEST, context)
    lengths = dict.fromkeys(round_length(n) for n in range(STEP, min(chunk, longest) + 1, STEP))
    shapes: dict[Shape, None] = {(1, length, length): None for length in lengths}
    rows = 2
    while rows <= sharing.max_rows:
        fitting = [n for n in lengths if n <= sharing.max_shared and rows * n <= settings.prefill_budget]
        shapes |= {(rows, n, n): None for n in fitting}
        rows *= 2
    for step in STARTS:
        for start in range(step, longest, step):
            shapes |= {(1, n, start + n): None for n in lengths if start + n <= longest + STEP}
    return shapes
