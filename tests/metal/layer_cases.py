"""The operations of fused layers: forms of heads, and what must come out in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlxrun.model.fused.operations import HeadRule, LayerOperations, NormRule, RotaryRule
from tests.metal.attention_cases import ROUNDING, to_float64

OFFSETS = mx.array([0, 1, 17, 300, 5])
LEAST = 5e-5  # of float32: angles are products of float32
MOST_ROUNDED = 0.02  # of the numbers that lie between two of a type
HALVES = RotaryRule(64, traditional=False, base=1e4, scale=1.0)
LISTED = RotaryRule(64, False, None, 1.0, mx.array(1e4) ** (mx.arange(32) / 32))


@dataclass(frozen=True)
class Heads:
    """`turned`: 0: no positions."""

    heads: int
    kv_heads: int
    size: int
    rotary: RotaryRule | None = HALVES
    normed: bool = False

    def make_rule(self, dtype: mx.Dtype) -> HeadRule:
        norms = None
        if self.normed:
            query, key = (
                NormRule((1 + 0.5 * make_random((self.size,), seed)).astype(dtype), eps)
                for seed, eps in ((5, 1e-6), (6, 1e-2))
            )
            norms = query, key
        return HeadRule(self.heads, self.kv_heads, self.size, norms, self.rotary)


HEADS = {
    "halves": Heads(4, 2, 64),
    "normed": Heads(4, 2, 128, replace(HALVES, turned=128), normed=True),
    "large": Heads(2, 1, 256, replace(HALVES, turned=256, base=1e6), normed=True),
    "traditional": Heads(3, 3, 64, replace(HALVES, traditional=True)),
    "a part of a head": Heads(4, 4, 80, replace(HALVES, turned=32, scale=0.25), normed=True),
    "a traditional part": Heads(2, 1, 96, replace(HALVES, turned=48, traditional=True)),
    "listed frequencies": Heads(2, 2, 64, LISTED),
    "no positions": Heads(2, 1, 64, None, normed=True),
    "nothing": Heads(2, 1, 64, None),
}


def make_random(shape: Sequence[int], seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def round_to(numbers: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Numbers as a GPU rounds them to this type, in float64."""
    return to_float64(mx.array(numbers.astype(np.float32)).astype(dtype))


class GPUOperations:
    """LayerOperations in float64, rounded where the library's kernels for GPUs round. Those for CPUs round
    sines, and the parts of SiLU, elsewhere."""

    def add_norm(self, x: mx.array, change: mx.array, norm: NormRule) -> tuple[mx.array, mx.array]:
        summed = round_to(to_float64(x) + to_float64(change), x.dtype)
        return tuple(mx.array(part).astype(x.dtype) for part in (summed, normalise(summed, norm, x.dtype)))  # type: ignore[return-value]

    def make_heads(self, product: mx.array, rule: HeadRule, offsets: mx.array) -> tuple[mx.array, mx.array]:
        (rows, tokens, _), positions = product.shape, to_float64(offsets)
        heads = to_float64(product).reshape(rows, tokens, -1, rule.size).transpose(0, 2, 1, 3)
        parts = np.split(heads, [rule.heads, rule.heads + rule.kv_heads], axis=1)
        for i, norm in enumerate(rule.norms or ()):
            parts[i] = normalise(parts[i], norm, product.dtype)
        if rule.rotary is not None:
            parts[:2] = [rotate(part, rule.rotary, positions.reshape(rows, tokens)) for part in parts[:2]]
        queries, keys, values = (mx.array(part).astype(product.dtype) for part in parts)
        written = mx.concatenate([keys, values])
        return queries, written[:, :, 0] if tokens == 1 else written

    def gate(self, product: mx.array) -> mx.array:
        gate, up = mx.split(product, 2, axis=-1)
        part = 1 / (1 + mx.exp(mx.abs(gate)))  # one operation after the other rounds to the type
        return gate * mx.where(gate < 0, part, 1 - part) * up


def normalise(x: np.ndarray, norm: NormRule, dtype: mx.Dtype) -> np.ndarray:
    scaled = round_to(x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + norm.eps), dtype)
    return round_to(scaled * to_float64(norm.weight), dtype)


def rotate(heads: np.ndarray, rule: RotaryRule, offsets: np.ndarray) -> np.ndarray:
    half = rule.turned // 2
    frequencies = rule.base ** (np.arange(half) / half) if rule.base else to_float64(rule.frequencies)  # type: ignore[arg-type]
    angles = (rule.scale * offsets)[:, None, :, None] / frequencies
    first = slice(0, rule.turned, 2) if rule.traditional else slice(half)
    second = slice(1, rule.turned, 2) if rule.traditional else slice(half, rule.turned)
    turned, a, b = heads.copy(), heads[..., first], heads[..., second]
    turned[..., first] = a * np.cos(angles) - b * np.sin(angles)
    turned[..., second] = a * np.sin(angles) + b * np.cos(angles)
    return turned


def find_problem(found: Sequence[mx.array], expected: Sequence[mx.array], dtype: mx.Dtype) -> str | None:
    """How results differ by more than the last digit of a few numbers."""
    for one, other in zip(found, expected, strict=True):
        own, wanted = to_float64(one), to_float64(other)
        error = np.abs(own - wanted) / (np.abs(wanted) + np.abs(wanted).mean())
        if one.shape != other.shape or not error.max() <= max(3 * ROUNDING[dtype], LEAST):
            return f"differs by {error.max():.2g}"
        if dtype != mx.float32 and (own != wanted).mean() > MOST_ROUNDED:
            return f"differs in {(own != wanted).mean():.1%} of the numbers"
    return None


def split_heads(by: LayerOperations, product: mx.array, rule: HeadRule, offsets: mx.array) -> list[mx.array]:
    """Queries, keys and values, each with the rows on the first axis."""
    queries, written = by.make_heads(product, rule, offsets)
    return [queries, *mx.split(written, 2)]
