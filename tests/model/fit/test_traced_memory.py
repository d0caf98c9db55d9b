"""What a walk over a graph counts: new arrays, views, memory that is taken over, and waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxrun.model.fit import traced_memory
from mlxrun.model.fit.traced_memory import TracedBytes, measure_traced, trace_function

SIZE = 256
BYTES = SIZE * SIZE * 4


def measure(function: Callable[..., Any]) -> TracedBytes:
    arrays = {"x": mx.zeros((SIZE, SIZE)), "w": mx.zeros((SIZE, SIZE))}
    return measure_traced(trace_function(function, arrays))


@pytest.mark.parametrize(
    ("function", "arrays"),
    [
        (lambda x, w: x @ w, 1),
        (lambda x, w: mx.exp(x @ w), 1),  # in the memory of the product
        (lambda x, w: (x @ w).T[:8], 1),  # a view
        (lambda x, w: (x @ w).T.reshape(-1), 2),  # which is copied
        (lambda x, w: [y := x @ w, mx.exp(y)], 2),  # both are results
        (lambda x, w: x[:8], 0),  # a view of what is there already
        (lambda x, w: nn.silu(x @ w), 2),  # a fused function, by its parts
        (lambda x, w: mx.contiguous((x @ w).T), 2),
    ],
)
def test_results_are_counted_as_mlx_allocates_them(function: Callable[..., Any], arrays: int) -> None:
    found = measure(function)
    assert found.peak == pytest.approx(arrays * BYTES, abs=100)


def test_what_ended_is_freed_once_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was launched since the last wait is in memory; after a wait only what is still read."""

    def chain(x: mx.array, w: mx.array, waits: bool = False) -> mx.array:
        for _ in range(4):
            x = x @ w
            if waits:
                (x,) = mx.depends([x], [w])
        return x

    monkeypatch.setattr(traced_memory, "COMPUTED_SHARE", 0.0)
    assert measure(chain).peak == 4 * BYTES
    assert measure(lambda x, w: chain(x, w, waits=True)).peak == 2 * BYTES
    monkeypatch.setattr(traced_memory, "COMPUTED_SHARE", 1.0)
    assert measure(chain).peak == 2 * BYTES
    monkeypatch.setattr(traced_memory, "COMPUTED_SHARE", 0.0)
    monkeypatch.setattr(traced_memory, "MOST_AHEAD", 2)
    assert measure(chain).peak == 3 * BYTES


def test_nothing_is_computed() -> None:
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = measure(lambda x, w: x @ w)
    assert found.results == BYTES
    assert mx.get_peak_memory() - before < BYTES
    with pytest.raises(ValueError, match="eval"):
        measure(lambda x, w: mx.zeros(int((x @ w).sum().item())))
