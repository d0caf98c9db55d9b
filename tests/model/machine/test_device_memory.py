"""Memory is counted in bytes on every backend."""

from __future__ import annotations

import mlx.core as mx

from mlxrun.model.machine.device import read_device_memory, read_peak, start_measuring


def test_the_peak_outlives_the_arrays_and_starts_anew() -> None:
    before = start_measuring(drop_pool=True)
    array = mx.zeros((1 << 20,), mx.float32)
    mx.eval(array)
    assert read_device_memory()["active"] >= before + 4 * (1 << 20)
    del array
    assert read_peak() >= before + 4 * (1 << 20)
    after = start_measuring(drop_pool=True)
    assert read_peak() < before + 4 * (1 << 20) and after <= read_peak()
    assert read_device_memory()["cache"] == 0, "the pool was dropped"
