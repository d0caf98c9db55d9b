"""A model of half precision whose parameters are read as float32 computes as its float32 twin."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxrun.model.hooks.derived_layers import transpose_weights
from mlxrun.model.load_check import rounding
from mlxrun.model.load_check.rounding import read_in_float32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        self.layers = [nn.Linear(32, 32), nn.Linear(32, 32, bias=False)]
        self.norm = nn.RMSNorm(32)
        self.gain = mx.full((32,), 1.1)

    def __call__(self, ids: mx.array) -> mx.array:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + nn.silu(layer(self.norm(x))) * self.gain
        return self.embed.as_linear(x)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_a_model_computes_as_its_float32_twin(dtype: mx.Dtype, bits: int | None) -> None:
    mx.random.seed(3)
    model, ids = Block(), mx.array([[1, 5, 7]])
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    model.set_dtype(dtype)
    kinds, names = [type(m) for m in model.modules()], list(dict(model.parameters()))
    rounded = model(ids)
    with read_in_float32(model):
        exact = model(ids)
    mx.eval(rounded, exact)
    assert exact.dtype == mx.float32 and rounded.dtype == dtype
    assert [type(m) for m in model.modules()] == kinds and list(dict(model.parameters())) == names
    assert model.gain.dtype == dtype
    model.set_dtype(mx.float32)  # the halves, exactly
    assert mx.allclose(exact, model(ids), atol=1e-5).item()
    assert mx.abs(rounded.astype(mx.float32) - exact).max().item() > 1e-5


def test_the_model_is_as_before_after_an_error() -> None:
    model = Block()
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(RuntimeError), read_in_float32(model):
        raise RuntimeError
    assert [type(m) for m in model.modules()] == kinds


def test_a_large_model_is_never_in_memory_in_float32() -> None:
    """One large parameter at a time is. Twin: without waiting for layers, all are at the end."""
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(12)])
    model.set_dtype(mx.bfloat16)
    transpose_weights(model)
    x = mx.ones((1, 1024))
    mx.eval(model.parameters(), model(x.astype(mx.bfloat16)), x)

    def measure() -> float:
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        with read_in_float32(model):
            mx.eval(model(x))
        return (mx.get_peak_memory() - before) / (4 << 20)  # float32 weights of a layer

    assert measure() < 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding, "LARGE", 1 << 40)
        assert measure() > 8
