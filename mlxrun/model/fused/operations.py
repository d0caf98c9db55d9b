"""What a decoder layer computes between its products: by kernels, or by the library's operations.

`KernelOperations` launches the kernels of `kernels/`, on CUDA and Metal. `ArrayOperations` computes the
same with the library, for comparisons and for tests on machines without a GPU.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

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

    @property
    def form(self) -> HeadForm:
        """What a kernel is compiled for."""
        eps = None if self.norms is None else (self.norms[0].eps, self.norms[1].eps)
        rotary = self.rotary
        turn = (
            None if rotary is None else TurnForm(rotary.turned, rotary.traditional, rotary.base, rotary.scale)
        )
        return HeadForm(self.heads, self.kv_heads, self.size, eps, turn)


class TurnForm(NamedTuple):
    """A RotaryRule without its array."""

    turned: int
    traditional: bool
    base: float | None
    scale: float


class HeadForm(NamedTuple):
    """A HeadRule without its arrays."""

    heads: int
    kv_heads: int
    size: int
    eps: tuple[float, float] | None
    turn: TurnForm | None


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
        launch = plan_launch(_plan_add_norm, get_backend(), x.dtype, x.shape, norm.eps)
        summed, normed = launch(inputs=[x, change, norm.weight])
        return summed, normed

    def make_heads(self, product: mx.array, rule: HeadRule, offsets: mx.array) -> tuple[mx.array, mx.array]:
        arrays = [product, *(norm.weight for norm in rule.norms or ())]
        if rule.rotary is not None:
            arrays.append(offsets)
            if rule.rotary.frequencies is not None:
                arrays.append(rule.rotary.frequencies)
        launch = plan_launch(_plan_heads, get_backend(), product.dtype, product.shape, rule.form)
        queries, written = launch(inputs=arrays)
        return queries, written

    def gate(self, product: mx.array) -> mx.array:
        launch = plan_launch(_plan_gate, get_backend(), product.dtype, product.shape)
        return launch(inputs=[product])[0]


Launch = Callable[..., list[mx.array]]  # of `inputs`


@lru_cache(maxsize=256)
def plan_launch(plan: Callable[..., Launch], backend: str, dtype: mx.Dtype, *form: Any) -> Launch:
    """What `plan` makes of these values. All layers of a forward launch the same: planned for each of them,
    it takes the host longer than the launch."""
    return plan(backend, dtype, *form)


def _plan_add_norm(backend: str, dtype: mx.Dtype, shape: tuple[int, ...], eps: float) -> Launch:
    size = shape[-1]
    wide = 1 if size % WIDE else WIDE
    threads = min(_round_up(size // wide, 32), MAX_THREADS[backend])
    turns = -(-size // (wide * threads))
    numbers = {"SIZE": size, "WIDE": wide, "THREADS": threads, "TURNS": turns}
    macros = {"EPS": _write_float(eps)}
    return partial(
        _compile(backend, "add_norm", ("x", "change", "weight"), ("summed", "normed"), macros),
        template=[("T", dtype), *numbers.items()],
        grid=(math.prod(shape[:-1]) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape] * 2,
        output_dtypes=[dtype] * 2,
    )


def _plan_heads(backend: str, dtype: mx.Dtype, shape: tuple[int, ...], form: HeadForm) -> Launch:
    (rows, tokens, _), turn = shape, form.turn
    inputs = ("product", *(("query_weight", "key_weight") if form.eps else ()))
    if turn is not None:
        inputs += ("offsets", *(("frequencies",) if turn.base is None else ()))
    numbers = {
        "HEADS": form.heads,
        "KV_HEADS": form.kv_heads,
        "SIZE": form.size,
        "PAIRS": -(-form.size // 64),
        "TURNED": 0 if turn is None else turn.turned,
        "TRADITIONAL": int(turn is not None and turn.traditional),
        "TEAMS": TEAMS,
    }
    return partial(
        _compile(backend, "turn", inputs, ("queries", "written"), _list_macros(form)),
        template=[("T", dtype), *numbers.items()],
        grid=(rows * tokens * TEAMS * 32, -(-(form.heads + 2 * form.kv_heads) // TEAMS), 1),
        threadgroup=(TEAMS * 32, 1, 1),
        output_shapes=[
            (rows, form.heads, tokens, form.size),
            (2 * rows, form.kv_heads, *([] if tokens == 1 else [tokens]), form.size),
        ],
        output_dtypes=[dtype] * 2,
    )


def _plan_gate(backend: str, dtype: mx.Dtype, shape: tuple[int, ...]) -> Launch:
    size = shape[-1] // 2
    wide = 1 if size % WIDE else WIDE
    numbers = {"SIZE": size, "THREADS": GATE_THREADS, "WIDE": wide}
    blocks = -(-size // (GATE_THREADS * wide))
    return partial(
        _compile(backend, "gate", ("product",), ("gated",), {}),
        template=[("T", dtype), *numbers.items()],
        grid=(math.prod(shape[:-1]) * GATE_THREADS, blocks, 1),
        threadgroup=(GATE_THREADS, 1, 1),
        output_shapes=[(*shape[:-1], size)],
        output_dtypes=[dtype],
    )


def _list_macros(form: HeadForm) -> dict[str, str]:
    """What the kernel of heads is compiled for, besides numbers."""
    macros = {"NORMED": str(int(form.eps is not None)), "ROTATED": str(int(form.turn is not None))}
    if form.eps is not None:
        query, key = form.eps
        macros |= {"QUERY_EPS": _write_float(query), "KEY_EPS": _write_float(key)}
    if form.turn is not None:
        listed, scale = form.turn.base is None, form.turn.scale
        macros |= {"LISTED": str(int(listed)), "POSITION_SCALE": _write_float(scale)}
        if form.turn.base is not None:
            macros["LOG_BASE"] = _write_float(math.log2(form.turn.base))
    return macros


def _write_float(number: float) -> str:
    return f"{float(number)!r}f"


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _compile(
    backend: str, name: str, inputs: Sequence[str], outputs: Sequence[str], macros: Mapping[str, str]
) -> Any:
    return compile_kernel(backend, name, tuple(inputs), tuple(outputs), tuple(macros.items()))


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
