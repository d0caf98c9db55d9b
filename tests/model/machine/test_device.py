"""Settings and costs that depend on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxrun.config.settings import Config, EngineSettings, SchedulerSettings
from mlxrun.core.step_plan import DEFAULT_CHUNK, StepCosts
from mlxrun.model.machine import device
from mlxrun.model.machine.memory_limits import MemoryLimit


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    name: str = request.param
    monkeypatch.setattr(device, "STEP_MS", 200)  # in other tests, steps have no limit
    monkeypatch.setattr(device, "uses_gpu", lambda: name != "cpu")
    monkeypatch.setattr(device, "get_backend", lambda: name)
    return name


def on(*names: str) -> Any:
    return pytest.mark.parametrize("backend", names, indirect=True)


@on("cpu", "metal", "cuda")
def test_chunks_and_budgets_have_values_of_the_device(backend: str) -> None:
    found = device.resolve_config(Config()).scheduler
    assert found.chunk == (device.CUDA_CHUNK if backend == "cuda" else DEFAULT_CHUNK)
    assert found.prefill_budget_busy == device.BUSY[backend]
    assert found.step_ms == (device.CUDA_STEP_MS if backend == "cuda" else device.STEP_MS)
    assert device.resolve_config(Config(scheduler=found)).scheduler == found


@on("cpu", "metal", "cuda")
def test_what_is_configured_stays(backend: str) -> None:
    given = SchedulerSettings(chunk=64, prefill_budget=100, prefill_budget_busy=70, step_ms=0)
    assert device.resolve_config(Config(scheduler=given)).scheduler == given


@on("cpu", "cuda")
def test_a_chunk_fits_the_budget_and_reproducible_runs_keep_whole_chunks(backend: str) -> None:
    small = Config(scheduler=SchedulerSettings(prefill_budget=100))
    assert device.resolve_config(small).scheduler.chunk == 100
    whole = replace(Config(), engine=EngineSettings(reproducible=True))
    found = device.resolve_config(whole).scheduler
    assert found.prefill_budget_busy == found.chunk


@on("cpu", "cuda")
def test_deep_prompts_have_small_chunks_unless_their_share_is_configured(backend: str) -> None:
    costs = device.CPU_STEP_COSTS if backend == "cpu" else device.CUDA_STEP_COSTS
    assert device.choose_step_costs(Config()) == costs and costs.deep_prompt > 0
    fixed = Config(scheduler=SchedulerSettings(prefill_budget_busy=64))
    assert device.choose_step_costs(fixed) == replace(costs, deep_prompt=0)


@on("metal", "cuda")
def test_only_cuda_is_bound_by_launches(backend: str) -> None:
    expected = device.CUDA_STEP_COSTS if backend == "cuda" else StepCosts()
    assert device.choose_step_costs(Config()) == expected


@pytest.mark.parametrize("key", ["max_recommended_working_set_size", "memory_size", "total_memory"])
@on("metal")
def test_a_gpu_names_its_memory_in_one_of_three_ways(
    backend: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.mx, "device_info", lambda _: {key: 123, "architecture": "x"})
    assert device.get_memory_limit() == 123
    monkeypatch.setattr(device, "list_limits", list)
    monkeypatch.setattr(device.mx, "device_info", lambda _: {})
    assert device.get_memory_limit() == 0


def test_the_total_is_no_less_than_what_is_free() -> None:
    assert device.get_total_memory() >= device.read_free_memory() > 0


def test_the_limit_counts_what_arrays_have_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a model is loaded, its weights are part of the limit, and no longer of what is free."""
    limits = [MemoryLimit("ulimit -v", 10**12, 10**11, reserves=True), MemoryLimit("this machine", 300, 50)]
    monkeypatch.setattr(device, "uses_gpu", lambda: False)
    monkeypatch.setattr(device.mx, "get_active_memory", lambda: 200)
    monkeypatch.setattr(device, "list_limits", lambda: limits)
    assert (device.read_free_memory(), device.get_memory_limit()) == (50, 200)
    assert device.get_total_memory() == 300
    monkeypatch.setattr(device, "list_limits", list)
    assert device.read_free_memory() == device.get_memory_limit() == 0, "another system"


def test_float32_may_be_shortened_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not device.may_shorten_float32()
    monkeypatch.setattr(device, "uses_gpu", lambda: True)
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    assert device.may_shorten_float32()
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    assert not device.may_shorten_float32()
