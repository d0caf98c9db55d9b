"""What is prepared for prompts on CUDA are the shapes that their attention has."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxrun.config.settings import SchedulerSettings
from mlxrun.model.hooks import device_attention
from mlxrun.model.hooks.device_attention import STEP, attend_causally
from mlxrun.model.run import attention_plans
from mlxrun.model.run.attention_plans import (
    LONGEST,
    PromptAttention,
    Shape,
    find_layouts,
    list_shapes,
    prepare_attention,
)
from mlxrun.model.run.chunk_grouping import PrefillSharing
from tests.helpers.fused_models import make_caller

SETTINGS = SchedulerSettings(chunk=4096)
SHARING = PrefillSharing(max_rows=16, max_shared=1024)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> set[Shape]:
    """The shapes of all calls of the library's attention."""
    shapes: set[Shape] = set()

    def attend(queries: mx.array, keys: mx.array, *args: Any, **more: Any) -> mx.array:
        shapes.add((queries.shape[0], queries.shape[2], keys.shape[2]))
        return queries

    monkeypatch.setattr(device_attention.mx.fast, "scaled_dot_product_attention", attend)
    return shapes


def attend_chunk(rows: int, start: int, tokens: int) -> None:
    queries, keys = mx.zeros((rows, 2, tokens, 8)), mx.zeros((rows, 1, start + tokens, 8))
    attend_causally(queries, keys, keys, 1.0)


def test_chunks_have_the_shapes_that_are_listed(computed: set[Shape]) -> None:
    for tokens in (2, 255, 256, 300, 700, 1000, 1900, 2048, 3000, 4096):
        attend_chunk(1, 0, tokens)
        for start in (512, 1536, 2048, 6144, 8192, 12288):
            attend_chunk(1, start, tokens)
    for rows, tokens in ((2, 1024), (3, 900), (5, 256), (7, 450), (13, 200), (16, 2)):
        attend_chunk(rows, 0, tokens)
    listed = set(list_shapes(SETTINGS, SHARING, 40960))
    assert computed <= listed and len(computed) > 50
    attend_chunk(1, STEP, 512)
    attend_chunk(2, 512, 512)
    attend_chunk(1, LONGEST + 2048, 512)
    assert len(computed - listed) == 3, "others are planned when they come"


def test_each_shape_comes_once_and_short_ones_first() -> None:
    shapes = list(list_shapes(SETTINGS, SHARING, 40960))
    assert len(set(shapes)) == len(shapes) < 300, "a few seconds"
    assert shapes[0] == (1, STEP, STEP)
    firsts = [shape for shape in shapes if shape[1] == shape[2]]
    assert shapes[: len(firsts)] == firsts
    assert max(rows * queries for rows, queries, _ in shapes) == SETTINGS.prefill_budget


def test_a_short_context_and_small_chunks_need_few() -> None:
    few = list(list_shapes(SchedulerSettings(chunk=512), PrefillSharing(), 1024))
    assert few == [(1, 256, 256), (1, 512, 512), (1, 256, 768), (1, 512, 1024)]


def test_layouts_are_those_of_the_model() -> None:
    caller = make_caller("llama", mx.bfloat16)
    (layout,) = find_layouts(caller)
    args: Any = caller.model.args
    assert (layout.heads, layout.kv_heads) == (args.num_attention_heads, args.num_key_value_heads)
    assert layout.dtype == mx.bfloat16
    assert find_layouts(make_caller("llama")) == set(), "cuDNN does not compute float32"
    caller.attention = "library"
    assert find_layouts(caller) == set(), "the library does not pad"


def test_each_is_computed_for_each_layout(computed: set[Shape], monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = {PromptAttention(4, 2, 8, 8, mx.bfloat16), PromptAttention(4, 4, 8, 16, mx.float16)}
    monkeypatch.setattr(attention_plans, "find_layouts", lambda caller: layouts)
    settings, caller = SchedulerSettings(chunk=512), make_caller("llama")
    sharing = PrefillSharing(max_rows=2)
    shapes = list(list_shapes(settings, sharing, 1024))
    steps = prepare_attention(caller, settings, sharing, 1024)
    for count in range(1, len(shapes) + 1):
        next(steps)
        assert computed == set(shapes[:count])
    assert list(steps) == []
    monkeypatch.setattr(attention_plans, "find_layouts", lambda caller: set())
    assert list(prepare_attention(caller, settings, sharing, 1024)) == []
