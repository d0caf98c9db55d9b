"""Rotary positions that share their angles compute what the library's do, by fewer nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.rope_utils import Llama3RoPE, YarnRoPE

from mlxrun.model.hooks import rotary_angles
from mlxrun.model.hooks.rotary_angles import StepPositions, share_angles
from tests.model.hooks.test_derived_layers import count_nodes

LLAMA3 = {"factor": 8.0, "original_max_position_embeddings": 64}
ROTARY: dict[str, Callable[[], nn.Module]] = {
    "whole heads": lambda: nn.RoPE(32, base=1e6),
    "half of each head": lambda: nn.RoPE(16, scale=0.25),
    "other frequencies": lambda: Llama3RoPE(32, scaling_config=LLAMA3),
}


def rotate_heads(layers: Sequence[Any], dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    """What the layers make of queries and keys, one layer after the other, in forwards of all kinds."""
    mx.random.seed(3)
    found = []
    for rows, tokens in ((1, 1), (1, 5), (2, 1), (2, 5)):
        heads = [mx.random.normal((rows, count, tokens, 32)).astype(dtype) for count in (4, 2)]
        arrays = [StepPositions([n] * rows, mx.int32) for n in (40000, 3)] + [mx.array([3, 900][:rows])]
        for offset in (0, 7, 8, *arrays, StepPositions([3, 900][:rows]), mx.array(5)):
            found += [layer(x, offset=offset) for layer in layers for x in heads]
    return found


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("kind", ROTARY)
def test_heads_are_rotated_as_by_the_library_bit_by_bit(kind: str, dtype: mx.Dtype) -> None:
    model = nn.Sequential(ROTARY[kind](), ROTARY[kind](), nn.RoPE(32, base=10.0))
    expected = rotate_heads(model.layers, dtype)
    assert share_angles(model) == 3
    found = rotate_heads(model.layers, dtype)
    assert all(mx.array_equal(a, b).item() for a, b in zip(found, expected, strict=True))


def test_the_angles_of_a_forward_are_computed_once() -> None:
    model = nn.Sequential(nn.RoPE(32), nn.RoPE(32), nn.RoPE(32, base=10.0))
    x, offset = mx.ones((1, 2, 1, 32)), StepPositions([9])
    before = count_nodes("Cos", *(layer(x, offset) for layer in model.layers for _ in range(2)))
    share_angles(model)
    after = count_nodes("Cos", *(layer(x, offset) for layer in model.layers for _ in range(2)))
    assert (before, after) == (6, 2), "once for each rule"


def test_angles_that_are_kept_too_long_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.RoPE(32))
    expected = rotate_heads(model.layers)
    find = rotary_angles._Angles.find

    def keep_first(self: Any, layer: Any, x: mx.array, offset: Any) -> Sequence[mx.array]:
        return find(self, layer, x, 7)

    monkeypatch.setattr(rotary_angles._Angles, "find", keep_first)
    share_angles(model)
    found = rotate_heads(model.layers)
    assert not all(mx.array_equal(a, b).item() for a, b in zip(found, expected, strict=True))


def test_positions_that_the_library_changes_in_place_are_followed() -> None:
    """Its caches of several rows add to one array."""
    model = nn.Sequential(nn.RoPE(32))
    x, plain, offset = mx.ones((1, 2, 1, 32)), nn.RoPE(32), mx.array([9])
    share_angles(model)
    assert mx.array_equal(model.layers[0](x, offset), plain(x, 9)).item()
    offset += 1
    assert mx.array_equal(model.layers[0](x, offset), plain(x, 10)).item()


def test_other_rotary_positions_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert share_angles(nn.Sequential(nn.RoPE(32, traditional=True), YarnRoPE(32))) == 0
    monkeypatch.setattr(rotary_angles, "uses_gpu", lambda: True)
    assert share_angles(nn.Sequential(nn.RoPE(32))) == 0
