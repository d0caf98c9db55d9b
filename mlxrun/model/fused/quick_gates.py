"""Gated MLPs whose SiLU takes little time on CPUs.

There MLX computes exponentials number by number: 15 ns each on a server of 2024, a tenth of a forward. Here
exp(x) = exp(r) * 2^n with |r| <= ln(2) / 2. exp(r) is a polynomial, and n is found by rounding (W. J. Cody
and W. Waite, Software Manual for the Elementary Functions, 1980). A compiler makes vector instructions of all
this: 2 ns. Results differ from the library's by rounding only.

NumPy computes the numbers of many tokens in place: they take no memory besides. Those of a decode step stay
in the graph. The bits of 2^n are an integer, which a view reads as a float. A view cannot be within a
function that is compiled for any shape, so there are two. MLPs are recognized by what they compute, as in
layouts.py.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxrun.model.fused.layouts import MLPLayout, read_mlp, try_to_read
from mlxrun.model.hooks.derived_layers import mix_in
from mlxrun.model.hooks.quantized_layers import list_modules
from mlxrun.model.machine.numpy_blocks import iterate_blocks, open_rows

log = logging.getLogger(__name__)
BOUND = 87.0  # a float32 has no exponentials of much larger and smaller numbers, which have that of this one
TOLERANCE = 1e-5
NUMPY_NUMBERS = 1 << 15  # of a prompt's tokens, whatever shares its forward
BLOCK_NUMBERS = 1 << 15  # that are computed together: two arrays of 128 KB
_HIGH, _LOW = 0.693145751953125, 1.428606765330187e-06  # ln(2): n * _HIGH is exact
_FACTORS = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)
_BIAS, _MANTISSA = 127, 23  # of the exponent of a float32, and its bits


@partial(mx.compile, shapeless=True)
def _split_exponential(gate: mx.array) -> tuple[mx.array, mx.array]:
    """exp(r), and the bits of 2^n, for exp(-gate)."""
    bounded = mx.clip(-gate, -BOUND, BOUND)
    biased = (bounded * math.log2(math.e) + (_BIAS + 0.5)).astype(mx.int32)
    power = biased.astype(mx.float32) - float(_BIAS)
    rest = bounded - power * _HIGH - power * _LOW
    found = rest * _FACTORS[0] + _FACTORS[1]
    for factor in _FACTORS[2:]:
        found = found * rest + factor
    return found, mx.left_shift(biased, mx.array(_MANTISSA, mx.int32))


@partial(mx.compile, shapeless=True)
def _join(gate: mx.array, up: mx.array, found: mx.array, power: mx.array) -> mx.array:
    return gate * up / (1.0 + found * power)


def multiply_gate(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) * up, of arrays [..., tokens, D] of float32. Of many tokens, `gate` is written over."""
    if gate.ndim > 1 and gate.shape[-2] * gate.shape[-1] >= NUMPY_NUMBERS and _apply_silu(gate):
        return gate * up
    found, bits = _split_exponential(gate)
    return _join(gate, up, found, bits.view(mx.float32))


def _apply_silu(gate: mx.array) -> bool:
    """Turn numbers into their SiLU in place. False if they lie apart in memory, and are left as they are."""
    rows = open_rows(gate)
    if rows is None:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        for block, found in iterate_blocks(rows, BLOCK_NUMBERS, scratch=1):
            np.exp(np.negative(block, out=found), out=found)
            found += 1
            block /= found
    return True


class _QuickMLP(nn.Module):
    """Mixed into the classes of gated MLPs."""

    layout: MLPLayout

    def __call__(self, x: mx.array, *more: Any, **named: Any) -> mx.array:
        if x.dtype != mx.float32 or more or named:
            own: mx.array = super().__call__(x, *more, **named)
            return own
        gate, up = (getattr(self, name)(x) for name in self.layout.inputs)
        output: mx.array = getattr(self, self.layout.output)(multiply_gate(gate, up))
        return output


def hook_gates(model: nn.Module) -> int:
    """Make the model's gated MLPs compute their SiLU quickly. Returns how many do. Idempotent."""
    if not _is_right():
        log.warning("SiLU is computed by the library: the quick one differs on this machine")
        return 0
    count = 0
    for module in list_modules(model):
        layout = None if isinstance(module, _QuickMLP) else try_to_read(read_mlp, module)
        if layout is not None and len(layout.inputs) == 2:
            module.layout = layout
            mix_in(module, _QuickMLP, "Quick")
            count += 1
    return count


def _is_right() -> bool:
    gate, written = (mx.linspace(-BOUND, BOUND, 2001) for _ in range(2))
    wanted = nn.silu(gate)
    found = multiply_gate(gate, mx.ones_like(gate))
    pairs = (found, wanted), (written, wanted)
    return _apply_silu(written) and all(
        bool(mx.allclose(*pair, rtol=TOLERANCE, atol=TOLERANCE).item()) for pair in pairs
    )
