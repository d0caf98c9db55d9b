"""Products with dequantized weights are launched a few at a time, and the host waits for earlier ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.model.hooks import quantized_layers
from mlxrun.model.hooks.quantized_layers import (
    LAUNCHED,
    MOST_LAUNCHES,
    are_bounded,
    bound_transients,
    record_product,
)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is launched, and waited for."""
    calls: list[tuple[str, int]] = []
    for name in ("async_eval", "eval"):
        real = getattr(mx, name)

        def call(array: Any, name: str = name, real: Any = real) -> None:
            real(array)
            calls.append((name, array.item()))

        monkeypatch.setattr(quantized_layers.mx, name, call)
    return calls


def test_so_many_are_launched_together_and_few_are_under_way(seen: list[tuple[str, int]]) -> None:
    with bound_transients():
        assert are_bounded()
        for i in range(8):
            record_product(mx.array(i) + 0, LAUNCHED // 2)
    launches = [("async_eval", i) for i in (1, 3, 5, 7)]
    assert [call for call in seen if call[0] == "async_eval"] == launches
    waits = [("eval", i) for i in (1, 3, 5, 7)[: 4 - MOST_LAUNCHES]]
    assert [call for call in seen if call[0] == "eval"] == waits
    assert seen.index(waits[0]) == MOST_LAUNCHES + 1  # behind the launch that is one too many
    assert not are_bounded()


def test_nothing_is_launched_elsewhere_or_kept(seen: list[tuple[str, int]]) -> None:
    for _ in range(4):
        record_product(mx.array(1), LAUNCHED)
    with bound_transients():
        record_product(mx.array(2), LAUNCHED - 1)
    with bound_transients():
        record_product(mx.array(3), 1)
    assert seen == []
    with pytest.raises(RuntimeError), bound_transients():
        record_product(mx.array(4), LAUNCHED)
        raise RuntimeError
    assert not quantized_layers._TRANSIENTS.launched and not are_bounded()


def test_each_thread_waits_for_its_own() -> None:
    """Each engine of a process has a thread."""

    def bound() -> bool:
        before = are_bounded()
        with bound_transients():
            return before

    with ThreadPoolExecutor(1) as other, bound_transients():
        record_product(mx.array(1), LAUNCHED)
        assert not other.submit(bound).result()
        assert are_bounded() and len(quantized_layers._TRANSIENTS.launched) == 1
