"""Measures the attention kernel beside the library's attention, for reports from machines nobody has seen.

Each shape is that of a family that many use. Errors are those of rows of several lengths against the same
attention in float32. Times are of one call over TIMED_ROWS rows; the library finds their keys in order.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from mlxrun.model.hooks.attention import NotRaggedError
from mlxrun.model.hooks.logit_rule import LogitRule
from mlxrun.model.kv.paged.attention_kernel import attend_pages
from mlxrun.model.kv.paged.paged_cache import Attend
from mlxrun.model.load_check.attention_checks import (
    LENGTHS,
    TIMED_ROWS,
    TIMED_TOKENS,
    RandomRows,
    measure_rms,
    measure_seconds,
)
from mlxrun.model.machine.device import get_backend

DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16}


@dataclass(frozen=True, slots=True)
class KernelShape:
    """The heads of one layer's attention. `family`: one that has them."""

    family: str
    heads: int
    kv_heads: int
    width: int
    cap: float = 0.0


SHAPES = (
    KernelShape("qwen3 8B", 32, 8, 128),
    KernelShape("llama 3.2 1B", 32, 8, 64),
    KernelShape("gemma3 4B", 8, 4, 256),
    KernelShape("gemma2 9B", 16, 8, 256, cap=50.0),
    KernelShape("gpt_oss 20B", 64, 8, 64),
    KernelShape("qwen3_next 80B", 16, 2, 256),
)


def measure_kernel() -> list[dict[str, Any]]:
    """A record of each shape and type: errors in units of the result's root mean square, microseconds of the
    kernel and of the library. Empty on a CPU, where there is no kernel; an `error` where it fails."""
    if get_backend() == "cpu":
        return []
    return [measure_shape(shape, dtype, attend_pages) for shape in SHAPES for dtype in DTYPES]


def measure_shape(shape: KernelShape, dtype: str, attend: Attend) -> dict[str, Any]:
    """The record of one shape and type."""
    found: dict[str, Any] = {**asdict(shape), "dtype": dtype, "rows": TIMED_ROWS, "tokens": TIMED_TOKENS}
    try:
        return found | _measure(shape, DTYPES[dtype], attend)
    except (RuntimeError, ValueError, NotRaggedError) as error:  # a kernel that does not compile, too
        return found | {"error": f"{type(error).__name__}: {error}"}


def _measure(shape: KernelShape, dtype: mx.Dtype, attend: Attend) -> dict[str, float]:
    rule = LogitRule(shape.width**-0.5, cap=shape.cap)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    like = [mx.zeros((1, number, shape.width), dtype=dtype) for number in heads]
    queries = like[0][:, :, None]
    rows = RandomRows((queries, like[1], like[2]), rule, LENGTHS)
    exact = rows.attend_by_library(wide=True)
    kernel = attend(*rows.arrays, rows.rows, rows.rule)[:-1]  # without the dummy row
    many = RandomRows((queries, like[1], like[2]), rule, (TIMED_TOKENS,) * TIMED_ROWS)
    attend_plain = many.arrange_for_library()
    return {
        "kernel_error": measure_rms(kernel, exact),
        "library_error": measure_rms(rows.attend_by_library(), exact),
        "kernel_us": 1e6 * measure_seconds(lambda: attend(*many.arrays, many.rows, many.rule)),
        "library_us": 1e6 * measure_seconds(attend_plain),
    }
