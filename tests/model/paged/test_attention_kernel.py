"""The stand-in of the kernel against attention over plain arrays; the kernel itself needs a GPU."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest

from mlxrun.model.paged import kernel_source
from mlxrun.model.paged.attention_kernel import PagedRows, attend_gathered, can_attend
from mlxrun.model.paged.kernel_source import DIALECTS, PAGE
from mlxrun.model.paged.page_table import PageTable

LENGTHS = (1, PAGE, 3 * PAGE - 5, PAGE + 1)


@pytest.mark.parametrize("window", [None, 3, PAGE + 7])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_rows_attend_to_their_own_tokens(window: int | None, has_sinks: bool) -> None:
    heads, kv_heads, width = 4, 2, 32
    table = PageTable(None)
    table.add_capacity(12)
    for row, length in enumerate(LENGTHS):
        table.add_row(str(row), length)
    keys, values = (mx.random.normal((13 * PAGE, kv_heads, width), key=mx.random.key(i)) for i in (1, 2))
    queries = mx.random.normal((len(LENGTHS) + 1, heads, 1, width), key=mx.random.key(3))
    sinks = mx.random.normal((heads,), key=mx.random.key(4)) if has_sinks else None
    tables = table.list_columns([str(row) for row in range(len(LENGTHS))])
    tables.append([0] * len(tables[0]))  # a dummy row
    rows = PagedRows(mx.array(tables), mx.array([*LENGTHS, 0]))
    found = attend_gathered(queries, keys, values, rows, 0.3, window, sinks)
    extra = {} if sinks is None else {"sinks": sinks}
    for row, length in enumerate(LENGTHS):
        first = 0 if window is None else max(length - window, 0)
        slots = mx.array(table.list_slots(str(row), first, length))
        own = (a[slots].transpose(1, 0, 2)[None] for a in (keys, values))
        expected = mx.fast.scaled_dot_product_attention(queries[row : row + 1], *own, scale=0.3, **extra)
        assert mx.allclose(found[row], expected[0], atol=1e-5).item()
    assert not mx.any(found[-1]).item()


def test_shapes_that_the_kernel_does_not_cover_are_known() -> None:
    assert can_attend(32, 8, 128, 128) and can_attend(32, 32, 80, 80) and can_attend(16, 4, 192, 128)
    assert not can_attend(8, 2, 30, 30)  # no four threads can share a key
    assert not can_attend(8, 1, 576, 512)  # latent attention: too wide
    assert not can_attend(6, 4, 64, 64)


@pytest.mark.parametrize("backend", DIALECTS)
def test_nothing_is_left_to_spell_in_either_language(backend: str) -> None:
    for source in (kernel_source.render_split(backend), kernel_source.render_join(backend)):
        assert "$" not in source
        assert source.count("{") == source.count("}")
        names = set(re.findall(r"\b[A-Z][A-Z_]{2,}\b", source))
        macros = set(re.findall(r"#define ([A-Z_]+)", DIALECTS[backend].header)) | {"SCALE"}
        constants = {
            *("KV_HEADS", "NUM_HEADS", "PARTS", "HEADS", "KEY_DIM", "VALUE_DIM", "LANES", "KEY_PART"),
            *("VALUE_PART", "KEYS_A_WARP", "WARPS", "TEAMS", "UNROLL", "PAGE_TOKENS", "WINDOW", "SINKS"),
        }
        assert names <= macros | constants
