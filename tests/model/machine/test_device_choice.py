"""`engine.device`: which device becomes MLX's default, and what is said where there is no such GPU."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, Literal

import mlx.core as mx
import pytest

from mlxrun.config.settings import EngineSettings
from mlxrun.core.errors import ConfigError
from mlxrun.model.machine import device_choice
from mlxrun.model.machine.device_choice import hold_device, use_device

CPU, GPU = mx.Device(mx.cpu, 0), mx.Device(mx.gpu, 0)


class FakeMLX(SimpleNamespace):
    """MLX with a GPU, whose default device is `device`. `refused`: what computing on the GPU raises."""

    cpu, gpu, Device, ones, sum = mx.cpu, mx.gpu, mx.Device, mx.ones, mx.sum

    def __init__(self, device: mx.Device, refused: str = "", available: bool = True) -> None:
        self.device, self.refused, self.available = device, refused, available

    def default_device(self) -> mx.Device:
        return self.device

    def set_default_device(self, device: mx.Device) -> None:
        self.device = device

    def is_available(self, device: Any) -> bool:
        return self.available

    def stream(self, device: mx.Device) -> Any:
        if self.refused:
            raise RuntimeError(self.refused)
        return mx.stream(mx.cpu)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(default: mx.Device, refused: str = "", available: bool = True) -> FakeMLX:
        fake = FakeMLX(default, refused, available)
        monkeypatch.setattr(device_choice, "mx", fake)
        monkeypatch.setattr(device_choice, "_DEFAULT", default)
        monkeypatch.setattr(device_choice, "_HELD", device_choice._HeldDevice())
        device_choice.find_gpu_problem.cache_clear()
        device_choice._log_fallback.cache_clear()
        return fake

    yield make
    device_choice.find_gpu_problem.cache_clear()
    device_choice._log_fallback.cache_clear()


def choose(device: Literal["auto", "cpu", "gpu"]) -> EngineSettings:
    return EngineSettings(device=device)


def test_the_device_of_the_config_becomes_the_default(machine: Any) -> None:
    fake = machine(GPU)
    for wanted, expected in (("cpu", CPU), ("auto", GPU), ("cpu", CPU), ("gpu", GPU)):
        use_device(choose(wanted))
        assert fake.device == expected


def test_auto_keeps_the_cpu_where_it_is_the_default(machine: Any) -> None:
    """As in tests on a Mac, which compute on the CPU of every platform."""
    fake = machine(CPU)
    use_device(choose("auto"))
    assert fake.device == CPU
    use_device(choose("gpu"))
    assert fake.device == GPU


def test_a_gpu_that_refuses_is_replaced_by_the_cpu_in_one_line(
    machine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a headless Mac, where Metal is there and its device is not."""
    fake = machine(GPU, refused="[metal::load_device] no device")
    with caplog.at_level(logging.WARNING):
        use_device(choose("auto"))
        use_device(choose("auto"))
    assert fake.device == CPU
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "engine.device: the GPU cannot be used, so that the CPU computes: [metal::load_device] no device"
    ]


@pytest.mark.parametrize(("available", "reason"), [(False, "MLX finds none"), (True, "no device")])
def test_a_gpu_that_is_not_there_is_an_error(machine: Any, available: bool, reason: str) -> None:
    fake = machine(CPU, refused="no device", available=available)
    with pytest.raises(ConfigError, match=rf"^engine.device: .*\({reason}\): set auto or cpu$"):
        use_device(choose("gpu"))
    assert fake.device == CPU


def test_two_engines_of_a_process_have_one_device(machine: Any) -> None:
    fake = machine(GPU)
    with hold_device(choose("gpu")), hold_device(choose("auto")):
        with pytest.raises(ConfigError, match=r"another engine of this process computes on Device\(gpu, 0\)"):
            use_device(choose("cpu"))
        assert fake.device == GPU
    use_device(choose("cpu"))
    assert fake.device == CPU


def test_a_real_machine_says_whether_it_has_a_gpu() -> None:
    """On a Linux CPU there is none; on any other machine the trial computes."""
    problem = device_choice.find_gpu_problem()
    assert bool(problem) or mx.is_available(mx.gpu)
