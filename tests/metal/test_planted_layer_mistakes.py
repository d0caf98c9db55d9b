"""The twins of test_fused_layers.py: a mistake planted into a kernel of layers is found, and named."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import pytest

from mlxrun.model.fused.operations import KERNELS, LayerOperations, NormRule
from mlxrun.model.kernels import kernel_source
from tests.helpers.custom_kernels import forget_kernels
from tests.metal.emulator.emulated_kernel import ORDERS, Emulator
from tests.metal.emulator.errors import EmulatorError
from tests.metal.layer_cases import HEADS, OFFSETS, GPUOperations, find_problem, make_random, split_heads

BF16, F32 = mx.bfloat16, mx.float32


def compute(kernel: str, case: str, by: LayerOperations, dtype: mx.Dtype) -> Sequence[mx.array]:
    if kernel == "ADD_NORM":
        norm = NormRule((1 + 0.5 * make_random((200,), 3)).astype(dtype), 0.1)
        return by.add_norm(*(make_random((3, 1, 200), seed, dtype) for seed in (1, 2)), norm)
    if kernel == "GATE":
        return [by.gate((4 * make_random((3, 1, 600), 1)).astype(dtype))]
    if case == "chunk":
        heads = HEADS["normed"]
        product = make_random((2, 3, (heads.heads + 2 * heads.kv_heads) * heads.size), 1, dtype)
        return split_heads(by, product, heads.make_rule(dtype), mx.array([7, 8, 9, 40, 41, 42]))
    heads = HEADS[case]
    product = make_random((5, 1, (heads.heads + 2 * heads.kv_heads) * heads.size), 1, dtype)
    return split_heads(by, product, heads.make_rule(dtype), OFFSETS)


@dataclass(frozen=True)
class Mistake:
    """`old` becomes `new` in a kernel of a layer; `found` is in what is said about it."""

    kernel: str
    old: str
    new: str
    found: str = "differs"
    case: str = "normed"
    dtype: mx.Dtype = BF16


MISTAKES = {
    # What Metal's compiler or a GPU refuses.
    "float becomes bfloat by itself": Mistake(
        "GATE", "= T(float(T(gate * sigmoid)) * up)", "= float(T(gate * sigmoid)) * up", "no viable"
    ),
    "a name of CUDA": Mistake("GATE", "PRECISE_EXP(", "expf(", "expf"),
    "a number that is double on CUDA": Mistake(
        "GATE", "T(1.0f / grown)", "T(1.0 / grown)", "without the suffix"
    ),
    "beyond the row": Mistake("GATE", "if (at >= SIZE) return;", "", "outside of a buffer"),
    "beyond the weight": Mistake(
        "ADD_NORM",
        "if (at >= SIZE) continue;\n    const Numbers<T, WIDE> factors",
        "const Numbers<T, WIDE> factors",
        "outside of a buffer",
    ),
    "an exchange of some threads only": Mistake(
        "ADD_NORM",
        "total += SHUFFLE_XOR(total, o);\n  SHARED",
        "if (THREAD < 40) total += SHUFFLE_XOR(total, o);\n  SHARED",
        "exchange|deadlock|differs",
    ),
    # What is computed wrongly.
    "no barrier before the join": Mistake("ADD_NORM", "  BARRIER;\n", ""),
    "one part of the sum": Mistake("ADD_NORM", "w < THREADS / 32; w++", "w < 1; w++"),
    "no sum": Mistake("ADD_NORM", "float(one.x[i]) + float(two.x[i])", "float(one.x[i])"),
    "another row": Mistake("ADD_NORM", "(long)BLOCK_X * SIZE", "0"),
    "no eps": Mistake("ADD_NORM", "total / SIZE + EPS", "total / SIZE"),
    "no mean": Mistake("ADD_NORM", "RSQRT(total / SIZE", "RSQRT(total / (SIZE - 8)"),
    "the norm rounded once": Mistake(
        "ADD_NORM",
        "float(T(float(kept[turn].x[i]) * scale))",
        "float(kept[turn].x[i]) * scale",
        "of the numbers",
    ),
    "the norm of a sum that is not rounded": Mistake(
        "ADD_NORM",
        "const float value = float(kept[turn].x[i]);",
        "const float value = 1.01f * (float(one.x[i]) + float(two.x[i]));",
    ),
    "silu of the other half": Mistake("GATE", "row * 2 * SIZE + at)", "row * 2 * SIZE + (at + WIDE) % SIZE)"),
    "up of another row": Mistake("GATE", "row * 2 * SIZE + SIZE + at)", "SIZE + at)"),
    "one number of several": Mistake("GATE", "float(ups.x[i])", "float(ups.x[0])"),
    "heads that there are not": Mistake(
        "TURN", "if (head >= HEADS + 2 * KV_HEADS) return;", "", "outside of a buffer", "traditional"
    ),
    "heads of the first block": Mistake("TURN", "BLOCK_Y * TEAMS + THREAD / 32", "THREAD / 32", "differs"),
    "the sign of the gate": Mistake("GATE", "gate < 0 ? part", "gate > 0 ? part"),
    "silu rounded once": Mistake(
        "GATE", "T(float(T(gate * sigmoid)) * up)", "T(gate * sigmoid * up)", "of the"
    ),
    "the next position": Mistake("TURN", "float(offsets[token])", "float(offsets[token] + 1)"),
    "the position of the first row": Mistake("TURN", "offsets[token]", "offsets[0]"),
    "turned the other way": Mistake("TURN", "a * cosine - b * sine", "a * cosine + b * sine"),
    "values turned too": Mistake("TURN", "if (!is_value && pair < TURNED / 2)", "if (pair < TURNED / 2)"),
    "values normed too": Mistake("TURN", "#if NORMED\n    if (!is_value) {", "#if NORMED\n    {"),
    "the norm of queries for keys": Mistake("TURN", ": key_weight[at]", ": query_weight[at]"),
    "the eps of queries for keys": Mistake("TURN", "QUERY_EPS : KEY_EPS", "QUERY_EPS : QUERY_EPS"),
    "the norm before its rounding": Mistake(
        "TURN", "float(T(w * float(T(first[n] * scale))))", "w * first[n] * scale", "of the numbers"
    ),
    "pairs of neighbours": Mistake(
        "TURN", "const bool halves = !TRADITIONAL && pair < TURNED / 2;", "const bool halves = false;"
    ),
    "halves": Mistake("TURN", "!TRADITIONAL && pair", "pair", case="traditional"),
    "all of a head turned": Mistake(
        "TURN", "if (!is_value && pair < TURNED / 2)", "if (!is_value)", case="a part of a head"
    ),
    "frequencies of the next pair": Mistake(
        "TURN", "frequencies[pair]", "frequencies[pair ^ 1]", case="listed frequencies"
    ),
    "positions that are not scaled": Mistake("TURN", "POSITION_SCALE * ", "", case="a part of a head"),
    "the base of another width": Mistake(
        "TURN", "float(TURNED / 2)) * LOG_BASE", "float(TURNED)) * LOG_BASE"
    ),
    "values before keys": Mistake("TURN", "row + (is_value ? rows : 0)", "row + (is_value ? 0 : rows)"),
    "another head": Mistake(
        "TURN", "(long)row * HEADS + head) * tokens", "(long)row * HEADS + HEADS - 1 - head) * tokens"
    ),
    "tokens of a chunk as its rows": Mistake(
        "TURN",
        "row = token / tokens, place = token % tokens",
        "row = token % rows, place = token / rows",
        case="chunk",
    ),
    "keys of a chunk in reverse": Mistake(
        "TURN",
        "* KV_HEADS + kv) * tokens + place",
        "* KV_HEADS + kv) * tokens + tokens - 1 - place",
        case="chunk",
    ),
    "the position of the row's first token": Mistake(
        "TURN", "offsets[token]", "offsets[row * tokens]", case="chunk"
    ),
    "half of the sum": Mistake("TURN", "int o = 16; o > 0", "int o = 8; o > 0"),
}


def find_mistake(mistake: Mistake, emulator: Emulator) -> str | None:
    """What is wrong with the kernel, in any order of threads; None if nothing is."""
    expected = compute(mistake.kernel, mistake.case, GPUOperations(), mistake.dtype)
    for order in ORDERS:
        emulator.order = order
        try:
            found = compute(mistake.kernel, mistake.case, KERNELS, mistake.dtype)
        except EmulatorError as error:
            return str(error)
        if problem := find_problem(found, expected, mistake.dtype):
            return problem
    return None


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(name: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake = MISTAKES[name]
    assert find_mistake(mistake, emulator) is None
    text = getattr(kernel_source, mistake.kernel)
    assert mistake.old in text
    monkeypatch.setattr(kernel_source, mistake.kernel, text.replace(mistake.old, mistake.new, 1))
    forget_kernels()
    found = find_mistake(mistake, emulator)
    assert found is not None and re.search(mistake.found, found), found
