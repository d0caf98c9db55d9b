"""Makes the device of `engine.device` MLX's default, which is one for a process.

MLX names a GPU wherever it was built for one. Headless Macs, and the virtual ones of hosted runners, may
refuse it all the same, so that `auto` and `gpu` compute something on it first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import mlx.core as mx

from mlxrun.config.settings import EngineSettings
from mlxrun.core.errors import ConfigError

log = logging.getLogger(__name__)

_DEFAULT = mx.default_device()  # what `auto` means, whatever another engine has been given


class _HeldDevice:
    """How many engines of this process compute on the default device."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders = 0


_HELD = _HeldDevice()


@contextmanager
def hold_device(settings: EngineSettings) -> Iterator[None]:
    """Within the block, compute on the device of these settings. ConfigError as `use_device`."""
    use_device(settings)
    with _HELD.lock:
        _HELD.holders += 1
    try:
        yield
    finally:
        with _HELD.lock:
            _HELD.holders -= 1


def use_device(settings: EngineSettings) -> None:
    """Make the device of these settings MLX's default. ConfigError if it does not exist, or if another engine
    of this process computes on another one."""
    device = _choose_device(settings)
    with _HELD.lock:
        if device == mx.default_device():
            return
        if _HELD.holders:
            raise ConfigError(
                f"engine.device: another engine of this process computes on {mx.default_device()}, so this "
                f"one cannot on {device}; give both the same device"
            )
        mx.set_default_device(device)


def _choose_device(settings: EngineSettings) -> mx.Device:
    if settings.device == "cpu" or (settings.device == "auto" and mx.cpu == _DEFAULT):
        return mx.Device(mx.cpu, 0)
    problem = find_gpu_problem()
    if not problem:
        return _DEFAULT if mx.gpu == _DEFAULT else mx.Device(mx.gpu, 0)
    if settings.device == "gpu":
        raise ConfigError(f"engine.device: MLX has no gpu here ({problem}): set auto or cpu")
    _log_fallback(problem)
    return mx.Device(mx.cpu, 0)


@cache
def find_gpu_problem() -> str:
    """Why MLX cannot compute on a GPU here; empty if it can."""
    if not mx.is_available(mx.gpu):
        return "MLX finds none"
    try:
        with mx.stream(mx.Device(mx.gpu, 0)):
            found = mx.sum(mx.ones((4, 4)) @ mx.ones((4, 4))).item()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "" if found == 64 else f"4 x 4 ones, multiplied and summed, are {found} on it and not 64"


@cache  # one line in the log of a process
def _log_fallback(problem: str) -> None:
    log.warning("engine.device: the GPU cannot be used, so that the CPU computes: %s", problem)
