"""What this machine computes on, and what follows from that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from mlxrun.config.settings import Config

CPU_SHARE = 0.8  # of the memory that is free at start


def on_gpu() -> bool:
    return bool(mx.default_device() == mx.gpu)


def on_cuda() -> bool:
    return on_gpu() and not mx.metal.is_available()


def resolve(config: Config) -> Config:
    """The config with the values that depend on the device filled in."""
    scheduler = config.scheduler
    if scheduler.prefill_budget_busy is not None:
        return config
    whole = on_gpu() or config.engine.reproducible
    busy = scheduler.chunk if whole else max(scheduler.chunk // 2, 16)
    return replace(config, scheduler=replace(scheduler, prefill_budget_busy=busy))


def device_limit() -> int:
    """Bytes that may be used: the device's recommendation, or most of what is free; 0 if nobody says."""
    info = mx.device_info()
    if on_gpu():
        for key in ("max_recommended_working_set_size", "memory_size", "total_memory"):
            if isinstance(info.get(key), int):
                return int(info[key])
        return 0
    return int(free_memory() * CPU_SHARE)


def free_memory() -> int:
    """Bytes that Linux calls available; 0 elsewhere."""
    path = Path("/proc/meminfo")
    if not path.is_file():
        return 0
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
