"""Faults of every kind times number formats times families: the load check finds each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxrun.model.hooks import attention, engine_attention
from mlxrun.model.kv.ragged import recurrent_states, row_group
from mlxrun.model.load.loader import load_caller
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.load_check.choose import choose_methods
from mlxrun.model.load_check.text_ladder import RefusedModelError
from mlxrun.model.machine.device import resolve_config
from mlxrun.model.run.model_caller import ModelCaller, run_trial_forward
from tests.helpers.engine_driver import make_config
from tests.helpers.load_check_driver import list_failed
from tests.helpers.model_fixtures import Zoo, mark_sweep

Patch = pytest.MonkeyPatch
Count = Callable[[], None]  # is called whenever a fault changes something

FAMILIES = (
    *("llama", "qwen3", "phi3", "olmo2", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3"),
    *("qwen3_next", "mamba2", "falcon_h1", "lfm2"),
)
EXPERTS = {"gpt_oss", "deepseek_v3", "qwen3_next"}  # a CPU multiplies experts in float32 only
FORMATS: Mapping[str, Mapping[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "8 bit": {"dtype": "float32", "bits": 8},
    "4 bit": {"dtype": "float32", "bits": 4},
}


def change_attention(change: Callable[..., tuple[Any, ...]]) -> Callable[[Patch, Count], None]:
    """A fault in the engine's attention over plain arrays. `change` gives other arguments."""

    def plant(patch: Patch, count: Count) -> None:
        original = engine_attention.attend_plain

        def attend(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any, **more: Any) -> mx.array:
            count()
            return original(*change(q, k, v, scale), mask, **more)

        patch.setattr(engine_attention, "attend_plain", attend)

    return plant


def scale_by(factor: float) -> Callable[[Patch, Count], None]:
    return change_attention(lambda q, k, v, scale: (q, k, v, factor * scale))


def shift_positions(patch: Patch, count: Count) -> None:
    """Rows that decode get the rotary position of the token before."""
    for stand_in in (attention.RaggedCache, attention.GroupCache):

        def begin(self: Any, groups: Any, offsets: mx.array, longest: int, own: Any = stand_in.begin_step):  # type: ignore[no-untyped-def]
            count()
            own(self, groups, offsets - 1, longest)

        patch.setattr(stand_in, "begin_step", begin)


def lose_last_key(patch: Patch, count: Count) -> None:
    """Attention sees no newest key."""

    def drop(q: mx.array, k: mx.array, v: mx.array, scale: float) -> tuple[Any, ...]:
        newest = mx.arange(k.shape[2])[None, None, :, None] == k.shape[2] - 1
        return q, mx.where(newest, 0, k), mx.where(newest, 0, v), scale

    change_attention(drop)(patch, count)


def keep_states(patch: Patch, count: Count) -> None:
    """A row goes on from the state of the row that was in its place."""

    def reorder(parts: Any, order: mx.array) -> mx.array | None:
        count()
        filled = [part for part in parts if part is not None]
        return mx.concatenate(filled, axis=0)[: order.size] if filled else None

    patch.setattr(recurrent_states, "reorder_state", reorder)


def shorten_windows(patch: Patch, count: Count) -> None:
    original = row_group.RowGroup.get_width

    def get_width(self: Any, window: int | None) -> int:
        if window is None:
            return original(self, None)
        count()
        return original(self, window - 1)

    patch.setattr(row_group.RowGroup, "get_width", get_width)


def change_cap(factor: float) -> Callable[[Patch, Count], None]:
    def plant(patch: Patch, count: Count) -> None:
        original = attention.RowKeys.attend

        def attend(
            self: Any, q: mx.array, scale: float, mask: Any, sinks: Any = None, cap: float = 0.0
        ) -> Any:
            if cap:
                count()
            return original(self, q, scale, mask, sinks, cap * factor)

        patch.setattr(attention.RowKeys, "attend", attend)

    return plant


FAULTS: Mapping[str, Callable[[Patch, Count], None]] = {
    "scale 1.02": scale_by(1.02),
    "scale 1.2": scale_by(1.2),
    "position": shift_positions,
    "last key": lose_last_key,
    "heads": change_attention(lambda q, k, v, scale: (q, k[:, ::-1], v[:, ::-1], scale)),
    "state": keep_states,
    "window": shorten_windows,
    "cap 0.1": change_cap(0.1),
}
# What changes something in a family: where attention is not called, its faults do nothing.
EXPECTED: Mapping[str, set[str]] = {
    "gemma2": {"cap 0.1", "position"},  # plain arrays are attended by the library's own layers
    "gemma3_text": {"scale 1.02", "scale 1.2", "position", "last key", "heads", "window"},
    "gpt_oss": {"scale 1.02", "scale 1.2", "position", "last key", "heads", "window"},
    "mamba2": {"state"},
    "qwen3_next": {"scale 1.02", "scale 1.2", "last key", "heads", "state"},
    "falcon_h1": {"scale 1.02", "last key", "heads", "state"},
    "lfm2": {"scale 1.02", "last key", "heads", "state"},
}


def find_failed(folder: Path, dtype: str, bits: int | None = None) -> list[str]:
    config = resolve_config(make_config(folder, dtype=dtype))
    info = load_model_info(config.model, weights=True)
    caller: ModelCaller = load_caller(config, info)
    if bits is not None:
        nn.quantize(caller.model, group_size=32, bits=bits, class_predicate=can_quantize)
    _, vocab = run_trial_forward(caller)
    try:
        return list_failed(choose_methods(caller, vocab, config, info))
    except RefusedModelError as error:
        return [check.name for check in error.checks if not check.passed]


def can_quantize(path: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


# Every format of one family, and every kind of layer in one format.
KEPT = [
    *(("llama", form) for form in FORMATS),
    *((family, "float32") for family in ("gemma3_text", "gpt_oss", "qwen3_next")),
]


@pytest.mark.parametrize(("family", "form"), mark_sweep(itertools.product(FAMILIES, FORMATS), KEPT))
def test_every_fault_is_found(zoo: Zoo, family: str, form: str, monkeypatch: Patch) -> None:
    if family in EXPERTS and form in ("bfloat16", "float16"):
        pytest.skip("the library multiplies experts in float32 only on a CPU")
    folder = zoo.text(family)
    assert find_failed(folder, **FORMATS[form]) == []
    missed, changed = set(), set()
    for name, plant in FAULTS.items():
        calls: list[int] = []
        with monkeypatch.context() as patch:
            plant(patch, lambda seen=calls: seen.append(1))
            failed = find_failed(folder, **FORMATS[form])
        if calls:
            changed.add(name)
            missed |= set() if failed else {name}
    assert missed == set()
    assert changed >= EXPECTED.get(family, {"scale 1.02", "scale 1.2", "position", "last key", "heads"})
