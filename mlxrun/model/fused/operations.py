"""What a decoder layer computes between its products: by kernels, or by the library's operations.

`KernelOperations` launches the kernels of `kernels/`, on CUDA and Metal. `ArrayOperations` computes the
same with the library, for comparisons and for tests on machines without a GPU.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.kernels import kernel_source
from mlxrun.model.kernels.kernel_source import make_kernel
from mlxrun.model.machine.device import get_backend, uses_gpu

MAX_THREADS = {"cuda": 1024, "metal": 512}  # of a block
WIDE = 4  # numbers that a thread reads at once
GATE_THREADS = 256
TEAMS = 4  # heads of a block: many small blocks would wait for their turn


@dataclass(frozen=True, slots=True)
class NormRule:
    """An RMS norm. `weight` [D]: its factors as the library's operation takes them."""

    weight: mx.array
    eps: float


@dataclass(frozen=True, slots=True)
class RotaryRule:
    """The arguments of `mx.fast.rope` besides arrays of a step. `turned`: numbers of a head that are rotated.
    `base`: None if there are `frequencies` float32 [turned / 2]."""

    turned: int
    traditional: bool
    base: float | None
    scale: float
    frequencies: mx.array | None = None


@dataclass(frozen=True, slots=True)
class HeadRule:
    """How the product of queries, keys and values becomes heads of `size` numbers. `norms`: of queries and of
    keys. `rotary`: None if heads have no positions."""

    heads: int
    kv_heads: int
    size: int
    norms: tuple[NormRule, NormRule] | None = None
    rotary: RotaryRule | None = None


class LayerOperations(Protocol):
    """What a layer computes for n tokens of each row: one of a decode step, or those of a chunk."""

    def add_norm(self, x: mx.array, change: mx.array, norm: NormRule) -> tuple[mx.array, mx.array]:
        """The sum of two arrays [rows, n, D], and its norm."""

    def make_heads(self, product: mx.array, rule: HeadRule, offsets: mx.array) -> tuple[mx.array, mx.array]:
        """Queries [rows, heads, n, size], and keys and values [2 * rows, KV heads, n, size], keys before
        values, without the axis of a single token. `product` [rows, n, (heads + 2 * KV heads) * size];
        `offsets` int32 [rows * n]: positions, those of a row one after the other."""

    def gate(self, product: mx.array) -> mx.array:
        """silu(gate) * up [rows, n, D] of the product [rows, n, 2 * D] of gate and up."""


class ArrayOperations:
    """LayerOperations by the library."""

    def add_norm(self, x: mx.array, change: mx.array, norm: NormRule) -> tuple[mx.array, mx.array]:
        summed = x + change
        return summed, mx.fast.rms_norm(summed, norm.weight, norm.eps)

    def make_heads(self, product: mx.array, rule: HeadRule, offsets: mx.array) -> tuple[mx.array, mx.array]:
        rows, tokens, _ = product.shape
        heads = product.reshape(rows, tokens, -1, rule.size).transpose(0, 2, 1, 3)
        ends = [rule.heads, rule.heads + rule.kv_heads]
        queries, keys, values = mx.split(heads, ends, axis=1)
        if rule.norms is not None:
            parts = zip((queries, keys), rule.norms, strict=True)
            queries, keys = (mx.fast.rms_norm(part, norm.weight, norm.eps) for part, norm in parts)
        if rule.rotary is not None:
            firsts = offsets if tokens == 1 else offsets[::tokens]
            queries, keys = (_rotate(part, rule.rotary, firsts) for part in (queries, keys))
        written = mx.concatenate([keys, values])
        return queries, written[:, :, 0] if tokens == 1 else written

    def gate(self, product: mx.array) -> mx.array:
        gate, up = mx.split(product, 2, axis=-1)
        return nn.silu(gate) * up


def _rotate(heads: mx.array, rule: RotaryRule, offsets: mx.array) -> mx.array:
    return mx.fast.rope(
        heads,
        rule.turned,
        traditional=rule.traditional,
        base=rule.base,
        scale=rule.scale,
        offset=offsets,
        freqs=rule.frequencies,
    )


class KernelOperations:
    """LayerOperations by kernels, each of which is one launch."""

    def add_norm(self, x: mx.array, change: mx.array, norm: NormRule) -> tuple[mx.array, mx.array]:
        size, rows = x.shape[-1], x.size // x.shape[-1]
        wide = 1 if size % WIDE else WIDE
        threads = min(_round_up(size // wide, 32), MAX_THREADS[get_backend()])
        turns = -(-size // (wide * threads))
        numbers = {"SIZE": size, "WIDE": wide, "THREADS": threads, "TURNS": turns}
        macros = {"EPS": _write_float(norm.eps)}
        kernel = _compile("add_norm", ("x", "change", "weight"), ("summed", "normed"), macros)
        summed, normed = kernel(
            inputs=[x, change, norm.weight],
            template=[("T", x.dtype), *numbers.items()],
            grid=(rows * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[x.shape] * 2,
            output_dtypes=[x.dtype] * 2,
        )
        return summed, normed

    def make_heads(self, product: mx.array, rule: HeadRule, offsets: mx.array) -> tuple[mx.array, mx.array]:
        (rows, tokens, _), rotary, norms = product.shape, rule.rotary, rule.norms
        listed = rotary is not None and rotary.frequencies is not None
        inputs = ("product", *(("query_weight", "key_weight") if norms else ()))
        arrays = [product, *(norm.weight for norm in norms or ())]
        if rotary is not None:
            inputs, arrays = (*inputs, "offsets"), [*arrays, offsets]
            if rotary.frequencies is not None:
                inputs, arrays = (*inputs, "frequencies"), [*arrays, rotary.frequencies]
        kernel = _compile("turn", inputs, ("queries", "written"), _list_macros(rule, listed))
        numbers = {
            "HEADS": rule.heads,
            "KV_HEADS": rule.kv_heads,
            "SIZE": rule.size,
            "PAIRS": -(-rule.size // 64),
            "TURNED": 0 if rotary is None else rotary.turned,
            "TRADITIONAL": int(rotary is not None and rotary.traditional),
            "TEAMS": TEAMS,
        }
        queries, written = kernel(
            inputs=arrays,
            template=[("T", product.dtype), *numbers.items()],
            grid=(rows * tokens * TEAMS * 32, -(-(rule.heads + 2 * rule.kv_heads) // TEAMS), 1),
            threadgroup=(TEAMS * 32, 1, 1),
            output_shapes=[
                (rows, rule.heads, tokens, rule.size),
                (2 * rows, rule.kv_heads, *([] if tokens == 1 else [tokens]), rule.size),
            ],
            output_dtypes=[product.dtype] * 2,
        )
        return queries, written

    def gate(self, product: mx.array) -> mx.array:
        size, rows = product.shape[-1] // 2, product.size // product.shape[-1]
        wide = 1 if size % WIDE else WIDE
        numbers = {"SIZE": size, "THREADS": GATE_THREADS, "WIDE": wide}
        gated: mx.array = _compile("gate", ("product",), ("gated",), {})(
            inputs=[product],
            template=[("T", product.dtype), *numbers.items()],
            grid=(rows * GATE_THREADS, -(-size // (GATE_THREADS * wide)), 1),
            threadgroup=(GATE_THREADS, 1, 1),
            output_shapes=[(*product.shape[:-1], size)],
            output_dtypes=[product.dtype],
        )[0]
        return gated


def _list_macros(rule: HeadRule, listed: bool) -> dict[str, str]:
    """What the kernel of heads is compiled for, besides numbers."""
    macros = {"NORMED": str(int(rule.norms is not None)), "ROTATED": str(int(rule.rotary is not None))}
    if rule.norms is not None:
        query, key = rule.norms
        macros |= {"QUERY_EPS": _write_float(query.eps), "KEY_EPS": _write_float(key.eps)}
    if rule.rotary is not None:
        macros |= {"LISTED": str(int(listed)), "POSITION_SCALE": _write_float(rule.rotary.scale)}
        if rule.rotary.base is not None:
            macros["LOG_BASE"] = _write_float(math.log2(rule.rotary.base))
    return macros


def _write_float(number: float) -> str:
    return f"{float(number)!r}f"


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _compile(name: str, inputs: Sequence[str], outputs: Sequence[str], macros: Mapping[str, str]) -> Any:
    return compile_kernel(get_backend(), name, tuple(inputs), tuple(outputs), tuple(macros.items()))


@lru_cache(maxsize=256)
def compile_kernel(
    backend: str, name: str, inputs: Sequence[str], outputs: Sequence[str], macros: Sequence[tuple[str, str]]
) -> Any:
    """A kernel of a layer with these macros."""
    defined = "".join(f"#define {macro} {value}\n" for macro, value in macros)
    digest = hashlib.blake2b(repr((inputs, macros)).encode(), digest_size=6).hexdigest()
    source = getattr(kernel_source, name.upper())
    header = f"{kernel_source.LAYER_HEADERS[backend]}\n{defined}"
    return make_kernel(backend, f"layer_{name}_{digest}", inputs, outputs, source, header)


KERNELS: LayerOperations = KernelOperations()
ARRAYS: LayerOperations = ArrayOperations()


def choose_operations() -> LayerOperations:
    """The kernels on a GPU."""
    return KERNELS if uses_gpu() else ARRAYS
