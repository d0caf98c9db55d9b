"""The attention kernel and its join, as Metal would run them, against attention in float64.

A few shapes run always. The sweep has every size of head with every size of group and every form.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxrun.model.kernels.kernel_source import PAGE
from mlxrun.model.kv.paged.attention_kernel import can_attend
from tests.metal.attention_cases import LENGTHS, Case, find_problem, make_attention
from tests.metal.emulator.emulated_kernel import MAX_MEMORY, MAX_THREADS, ORDERS, Emulator

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
FEW = [
    Case(8, 2, 128, 128, BF16),
    Case(8, 2, 128, 128, BF16, joined=True),
    Case(14, 2, 64, 64, F16, window=PAGE + 7),
    Case(8, 1, 64, 64, BF16, window=3, sinks=True),
    Case(4, 2, 80, 80, F32, cap=0.5),
    Case(4, 2, 192, 128, F16, sinks=True),
    Case(4, 4, 256, 256, BF16, window=PAGE + 7, cap=50.0),
    Case(4, 1, 512, 512, F32),
    Case(8, 1, 512, 512, BF16, turn_dim=64),
]
DIMS = [
    *((n, n, 0) for n in (32, 36, 40, 48, 64, 72, 80, 96, 100, 112, 128, 160, 192, 224, 256, 320, 384, 512)),
    *((64, 32, 0), (192, 128, 0), (128, 192, 0), (64, 64, 8), (256, 256, 32), (512, 512, 64)),
]
FORMS: list[dict[str, Any]] = [
    {},
    {"window": 3},
    {"window": PAGE + 7},
    {"sinks": True},
    {"cap": 0.5},
    {"joined": True},
    {"window": 128, "sinks": True},
    {"window": PAGE, "cap": 50.0},
]


def list_wide() -> list[Case]:
    """All sizes of heads, dtypes and groups; the forms take turns."""
    cases: list[Case] = []
    for key_dim, value_dim, turn_dim in DIMS:
        for dtype in (F32, F16, BF16):
            for group in range(1, 17):
                kv_heads = 1 if turn_dim or group > 8 else 2
                sizes = (group * kv_heads, kv_heads, key_dim, value_dim)
                form = {} if turn_dim else FORMS[len(cases) % len(FORMS)]
                form = {} if "joined" in form and key_dim != value_dim else form
                cases.append(Case(*sizes, dtype, turn_dim, **form))
    return cases


def check(case: Case, emulator: Emulator) -> None:
    assert can_attend(case.heads, case.kv_heads, case.key_dim, case.value_dim, case.turn_dim)
    given = make_attention(case)
    found = given.compute()
    assert find_problem(case, given, found) is None
    assert not mx.any(found[LENGTHS.index(0)]).item()
    for emulator.order in ORDERS[1:]:
        emulator.guard = "begin" if emulator.order == "backward" else "end"
        assert mx.array_equal(given.compute(), found).item(), "depends on the order of threads"
    for row in (3, 4):  # tables and lengths of few rows are in Metal's `constant` memory
        alone = given.select(row).compute()
        assert mx.array_equal(alone[0], found[row]).item(), "depends on other rows"
    assert {launch.name.rsplit("_", 1)[0] for launch in emulator.launches} == {"paged_split", "paged_join"}
    assert all(launch.barriers and launch.memory <= MAX_MEMORY for launch in emulator.launches)
    assert all(launch.threads <= MAX_THREADS for launch in emulator.launches)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_attention_to_pages(case: Case, emulator: Emulator) -> None:
    check(case, emulator)


@pytest.mark.sweep
@pytest.mark.parametrize("case", list_wide(), ids=str)
def test_attention_to_pages_of_every_shape(case: Case, emulator: Emulator) -> None:
    check(case, emulator)
