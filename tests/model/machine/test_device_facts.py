"""What the last digits of results depend on is described, as an engine with its settings has it."""

from __future__ import annotations

import pytest

from mlxrun.config.settings import EngineSettings
from mlxrun.jobs.records.manifest_checks import RunEnvironment
from mlxrun.model.machine import device
from mlxrun.model.machine.device import (
    DECISIVE,
    choose_blas_threads,
    describe_device,
    describe_rounding,
)

REPRODUCIBLE = EngineSettings(reproducible=True)


def test_the_device_is_described_without_serial_numbers() -> None:
    facts = describe_device()
    assert facts["backend"] in {"cpu", "metal", "cuda"} and facts["name"]
    assert not {"uuid", "pci_bus_id", "device_name"} & facts.keys()


def test_reproducible_engines_have_one_thread_unless_they_are_given_more() -> None:
    assert choose_blas_threads(EngineSettings()) is None
    assert choose_blas_threads(REPRODUCIBLE) == 1
    assert choose_blas_threads(EngineSettings(blas_threads=3)) == 3
    assert choose_blas_threads(EngineSettings(reproducible=True, blas_threads=3)) == 3


def test_the_threads_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the process has; and whether they are fixed."""
    monkeypatch.setattr(device, "get_backend", lambda: "cpu")
    monkeypatch.setattr(device, "describe_blas", lambda: {"blas": "x", "blas_threads": 8})
    free, fixed = describe_device(EngineSettings()), describe_device(REPRODUCIBLE)
    assert (free["blas_threads"], free["blas_threads_fixed"]) == (8, False)
    assert (fixed["blas_threads"], fixed["blas_threads_fixed"]) == (1, True)
    assert describe_rounding(REPRODUCIBLE)["blas_threads"] == 1
    assert describe_device()["blas_threads"] == 8
    monkeypatch.setattr(device, "describe_blas", lambda: {"blas": None})
    assert "blas_threads" not in describe_device(REPRODUCIBLE)


def test_compiling_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, MLX needs g++ for it."""
    monkeypatch.delenv("MLX_DISABLE_COMPILE", raising=False)
    monkeypatch.setattr(device, "get_backend", lambda: "cpu")
    monkeypatch.setattr(device.shutil, "which", lambda name: "/bin/g++")
    assert describe_device()["compile"] is True
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    assert describe_device()["compile"] is False
    monkeypatch.setattr(device, "get_backend", lambda: "cuda")
    assert describe_device()["compile"] is True
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "")
    assert describe_device()["compile"] is False


def test_variables_of_mlx_are_recorded_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    monkeypatch.setenv("MLXRUN_KEY_TEAM", "secret")
    found = describe_device()["variables"]
    assert found["MLX_DISABLE_COMPILE"] == "1" and all(name.startswith("MLX_") for name in found)


def test_a_gpu_is_described_by_its_float32_and_not_by_the_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "get_backend", lambda: "cuda")
    monkeypatch.setattr(device, "may_shorten_float32", lambda: True)
    facts = describe_device(REPRODUCIBLE)
    assert facts["tf32"] is True and not {"blas", "blas_threads", "libc"} & facts.keys()


def test_every_decisive_fact_is_compared_between_runs() -> None:
    """The names of the facts are here, those of messages where runs are compared."""
    for key in DECISIVE:
        old, new = (RunEnvironment({}, {key: value}) for value in ("a", "b"))
        assert len(old.list_differences(new)) == 1, key
