"""The twins of test_paged_attention.py: a mistake that is planted into a kernel is found, and named."""

from __future__ import annotations

import re
from dataclasses import dataclass

import mlx.core as mx
import pytest

from mlxrun.model.kernels import kernel_source
from mlxrun.model.kernels.kernel_source import PAGE
from mlxrun.model.kv.paged import attention_kernel
from tests.metal.attention_cases import Case, find_problem, make_attention
from tests.metal.emulator.emulated_kernel import ORDERS, Emulator
from tests.metal.emulator.errors import EmulatorError

LENGTHS = (0, 5, 2 * PAGE + 40)
CASES = {
    "plain": Case(4, 2, 64, 64, mx.bfloat16),
    "float32": Case(4, 2, 64, 64, mx.float32),
    "window": Case(4, 2, 64, 64, mx.bfloat16, window=3),
    "wide window": Case(4, 2, 64, 64, mx.bfloat16, window=PAGE + 7),
    "sinks": Case(4, 2, 64, 64, mx.bfloat16, sinks=True),
    "cap": Case(4, 2, 64, 64, mx.bfloat16, cap=0.5),
    "wide group": Case(16, 2, 64, 64, mx.bfloat16),
    "latent": Case(4, 1, 64, 64, mx.bfloat16, turn_dim=8),
    "joined": Case(4, 2, 64, 64, mx.bfloat16, joined=True),
}


@dataclass(frozen=True)
class Mistake:
    """`old` becomes `new` in SPLIT or JOIN of kernel_source.py; `found` is in what is said about it."""

    kernel: str
    old: str
    new: str
    found: str = "differs by"
    case: str = "plain"


DECLARED = "float q[HEADS][KEY_PART], sum[HEADS][VALUE_PART], top"
MISTAKES = {
    # What Metal's compiler refuses.
    "a pointer without an address space": Mistake(
        "JOIN", "const DEVICE float* part =", "const float* part =", "cannot initialize a variable"
    ),
    "a cast to another address space": Mistake(
        "SPLIT",
        "*(const DEVICE Numbers<T, KEY_PART>*)",
        "*(const constant Numbers<T, KEY_PART>*)",
        "reinterpret_cast",
    ),
    "a cast without an address space": Mistake(
        "SPLIT", "*(const DEVICE Numbers<T, KEY_PART>*)", "*(const Numbers<T, KEY_PART>*)", "reinterpret_cast"
    ),
    "float becomes bfloat by itself": Mistake(
        "JOIN",
        "= T(weights > 0 ? total / weights : 0.0f)",
        "= weights > 0 ? total / weights : 0.0f",
        "no viable",
    ),
    "a double": Mistake("JOIN", "float highest = -1e30f", "double highest = -1e30f", "poisoned identifier"),
    "a number that is double on CUDA": Mistake(
        "JOIN", "highest = -1e30f", "highest = -1e30", "without the suffix"
    ),
    "a name of CUDA": Mistake("SPLIT", "EXP(top[h] - highest)", "__expf(top[h] - highest)", "__expf"),
    # What a GPU does not survive.
    "40 kB of threadgroup memory": Mistake(
        "SPLIT",
        "SHARED float all_tops",
        "SHARED float big[10240]; big[0] = 0; SHARED float all_tops",
        "bytes of threadgroup",
    ),
    "a key of no page": Mistake(
        "SPLIT", "(seen[u] ? token : start)", "(token + PAGE_TOKENS * 40)", "outside of a buffer"
    ),
    "a vector that is not aligned": Mistake(
        "SPLIT", "(keys + own * KEY_PART)", "(keys + own * KEY_PART + 1)", "misaligned"
    ),
    "a barrier after a thread has returned": Mistake(
        "JOIN", "  BARRIER;\n  if (team > 0) return;", "  if (team > 0) return;\n  BARRIER;", "has returned"
    ),
    "an exchange of some threads only": Mistake(
        "SPLIT",
        "other = SHUFFLE_XOR(top[h], o)",
        "other = lane < 16 ? SHUFFLE_XOR(top[h], o) : top[h]",
        "exchange|deadlock",
    ),
    # What is computed wrongly.
    "no barrier before the join of warps": Mistake("SPLIT", "  BARRIER;\n", ""),
    "no barrier before the join of parts": Mistake("JOIN", "  BARRIER;\n", ""),
    "the next page": Mistake("SPLIT", "page_index % columns]", "(page_index + 1) % columns]"),
    "the page of a row without a window": Mistake(
        "SPLIT", "page_index % columns]", "BLOCK_X]", case="wide window"
    ),
    "one token too many": Mistake("SPLIT", "token < stop;", "token <= stop;"),
    "one token too few": Mistake("SPLIT", "token < stop;", "token < stop - 1;"),
    "a window of one more": Mistake("SPLIT", "? length - WINDOW", "? length - WINDOW - 1", case="window"),
    "a window of one less": Mistake("SPLIT", "? length - WINDOW", "? length - WINDOW + 1", case="window"),
    "no scale": Mistake("SPLIT", "float(queries[at + i]) * SCALE", "float(queries[at + i])"),
    "sums of 16 bits": Mistake(
        "SPLIT", DECLARED, "float q[HEADS][KEY_PART]; half sum[HEADS][VALUE_PART]; float top", case="float32"
    ),
    "another KV head": Mistake("SPLIT", "BLOCK_Y / PARTS;", "BLOCK_Y % KV_HEADS;", case="wide group"),
    "a soft cap of the wrong width": Mistake("SPLIT", "TANH(s[u] / CAP)", "TANH(s[u])", case="cap"),
    "no rotary parts": Mistake("SPLIT", "s[u] += turned[h][i]", "s[u] += 0.0f * turned[h][i]", case="latent"),
    "keys for values": Mistake("SPLIT", "keys + (long)(keys_shape[0] / 2)", "keys + 0", case="joined"),
    "values of another half": Mistake("SPLIT", "keys_shape[0] / 2", "keys_shape[0] / 4", case="joined"),
    "values behind the array": Mistake(
        "SPLIT", "(keys_shape[0] / 2)", "keys_shape[0]", "outside of a buffer", case="joined"
    ),
    "weights of another highest logit": Mistake("SPLIT", "weight[h] *= shrink;", ""),
    "a number that nobody has set": Mistake("SPLIT", "weight[h] = 0;", ""),
    "parts that nobody has written": Mistake(
        "JOIN", "s < splits; s += TEAMS) {", "s <= splits; s += TEAMS) {"
    ),
    "the last team's parts": Mistake(
        "JOIN", "for (int t = 0; t < TEAMS; t++)", "for (int t = 0; t < TEAMS - 2; t++)"
    ),
    "no sink": Mistake("JOIN", "SINKS ? EXP(float(sinks[head]) - highest) : 0.0f", "0.0f", case="sinks"),
    "the first head's sink": Mistake(
        "JOIN", "float(sinks[head]) - highest", "float(sinks[0]) - highest", case="sinks"
    ),
    "a row of no tokens divided by zero": Mistake(
        "JOIN", "weights > 0 ? total / weights : 0.0f", "total / weights"
    ),
}


def find_mistake(case: Case, emulator: Emulator) -> str | None:
    """What is wrong with the kernels, in any order of threads; None if nothing is."""
    given = make_attention(case, LENGTHS)
    for order in ORDERS:
        emulator.order = order
        try:
            problem = find_problem(case, given, given.compute())
        except EmulatorError as error:
            return str(error)
        if problem:
            return problem
    return None


@pytest.mark.parametrize("case", CASES)
def test_kernels_without_a_mistake_pass(case: str, emulator: Emulator) -> None:
    assert find_mistake(CASES[case], emulator) is None


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(name: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake = MISTAKES[name]
    text = getattr(kernel_source, mistake.kernel)
    assert mistake.old in text
    monkeypatch.setattr(kernel_source, mistake.kernel, text.replace(mistake.old, mistake.new, 1))
    found = find_mistake(CASES[mistake.case], emulator)
    assert found is not None and re.search(mistake.found, found), found


def test_a_join_of_too_many_threads_is_found(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention_kernel.JOIN_THREADS, "metal", 1024)
    found = find_mistake(Case(2, 1, 256, 256, mx.bfloat16), emulator)
    assert found is not None and "1024 threads" in found
