"""What a model sees of a ragged batch, and how its attention is routed."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.core.errors import ModelLoadError
from mlxrun.model.hooks import attention, engine_attention
from mlxrun.model.hooks.attention import GroupCache, NotRaggedError, RaggedCache, RaggedKeys, RaggedMask
from mlxrun.model.hooks.engine_attention import is_engine_attention, use_engine_attention
from mlxrun.model.hooks.logit_rule import PositionLogits
from mlxrun.model.kv.ragged.row_group import RowGroup
from tests.helpers import engine_driver, text_models
from tests.helpers.model_fixtures import Zoo
from tests.parity.test_upstream_contracts import need

HEADS, SIZE = 2, 8


def test_each_thread_says_for_itself_whose_forwards_it_computes() -> None:
    """Each engine of a process has a thread."""

    def compute() -> bool:
        before = is_engine_attention()
        with use_engine_attention():
            return before

    with ThreadPoolExecutor(1) as other, use_engine_attention():
        assert not other.submit(compute).result()
        assert is_engine_attention()


def test_ragged_objects_refuse_what_only_arrays_support() -> None:
    """A use that only a plain array supports is an error, never a wrong result."""
    cache = RaggedCache(0, None)
    with pytest.raises(NotRaggedError):
        cache.make_mask(2)
    with pytest.raises(NotRaggedError):
        cache.make_mask(1, return_array=True, window_size=4)
    with pytest.raises(NotRaggedError):
        _ = cache.state
    with pytest.raises(NotRaggedError):
        cache.update_and_fetch(mx.zeros((1, HEADS, 2, SIZE)), mx.zeros((1, HEADS, 2, SIZE)))
    keys = RaggedKeys([], [], 0)
    with pytest.raises(NotRaggedError):
        keys.attend(mx.zeros((1, HEADS, 1, SIZE)), 1.0, mx.zeros((1, 1)))
    with pytest.raises(NotRaggedError):
        keys.attend(mx.zeros((1, HEADS, 1, SIZE)), 1.0, "causal")
    with pytest.raises(NotRaggedError):
        keys.swapaxes(1, 2)
    rotary = keys.swapaxes(-1, -2)
    with pytest.raises(ValueError):
        mx.matmul(mx.zeros((1, HEADS, 1, SIZE)), rotary)
    scores: Any = mx.zeros((1, HEADS, 1, SIZE)) @ rotary
    assert isinstance(scores, PositionLogits)
    for more in ({"sinks": mx.zeros(HEADS)}, {"cap": 2.0}):
        with pytest.raises(NotRaggedError, match="sinks or a soft cap"):
            keys.attend(mx.zeros((1, HEADS, 1, SIZE)), 1.0, scores, **more)
    assert cache.make_mask(1, return_array=True) is None  # as the libraries' caches
    assert isinstance(cache.make_mask(1, window_size=4), RaggedMask)


@pytest.mark.parametrize("cache_class", [RaggedCache, GroupCache])
def test_offsets_are_an_array_and_an_int(cache_class: type) -> None:
    """Models that need a Python int find `_offset`, so that no step waits for the device."""
    group = RowGroup(9, [None])
    group.ids, group.lengths = ["a", "b"], [3, 5]
    cache = cache_class(0, None)
    cache.begin_step([group], mx.array([2, 4], dtype=mx.int32), 4)
    assert cache.offset.dtype == mx.int32
    assert type(cache._offset) is int and cache._offset == 4


NO_SEAM = ("mamba2", "gemma2")  # no attention; scores with a soft cap, see soft_caps.py


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if f in text_models.CORE else [pytest.mark.slow]) for f in text_models.TEXT],
)
def test_models_attend_through_the_routed_function(zoo: Zoo, family: str) -> None:
    """Each family's module binds the name, unless it has no attention; installing twice is once."""
    caller = engine_driver.get_runner(
        engine_driver.make_real_engine(zoo.text(family), load_check=False)
    )._caller
    bound = attention.hook_attention(caller.model)
    need(
        (bound > 0) is (family not in NO_SEAM),
        "mlx_lm",
        f"{family} binds {attention.ATTENTION_FUNCTION} {bound} times",
    )
    assert attention.hook_attention(caller.model) == bound
    for module in attention._find_modules(caller.model):
        assert vars(module)[attention.ATTENTION_FUNCTION].routes_ragged_keys
        inner = inspect.getclosurevars(vars(module)[attention.ATTENTION_FUNCTION]).nonlocals["original"]
        assert not hasattr(inner, "routes_ragged_keys")


def test_a_name_that_is_no_function_is_refused(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = engine_driver.get_runner(
        engine_driver.make_real_engine(zoo.text("llama"), load_check=False)
    )._caller
    module = next(iter(attention._find_modules(caller.model)))
    monkeypatch.setattr(module, attention.ATTENTION_FUNCTION, "gone")
    with pytest.raises(ModelLoadError, match="untested mlx-lm or mlx-vlm"):
        attention.hook_attention(caller.model)


def test_a_prompt_can_be_launched_in_parts(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where launches take time, a few layers are launched while the next are built: the same logits."""
    from mlx_lm import load

    model, _ = load(str(zoo.text("llama")))
    attention.hook_attention(model)
    ids = mx.array([[1, 2, 3, 4, 5]])
    with engine_attention.use_engine_attention():
        at_once = model(ids)
    launched: list[int] = []
    original = mx.async_eval

    def count(*arrays: Any) -> None:
        launched.append(len(arrays))
        original(*arrays)

    monkeypatch.setattr(engine_attention.mx, "async_eval", count)
    with engine_attention.use_engine_attention():
        model(ids)
    own = len(launched)  # on a CPU attention launches what it computes
    with engine_attention.use_engine_attention(1):
        launched_in_parts = model(ids)
    assert len(launched) - 2 * own == len(model.layers) > 1
    assert mx.array_equal(at_once, launched_in_parts).item()
    model(ids)
    assert len(launched) - 2 * own == len(model.layers)
