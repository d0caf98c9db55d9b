"""What this machine computes on, and what follows from that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from mlxrun.config.settings import Config
from mlxrun.scheduler.scheduler import CHUNK
from mlxrun.scheduler.token_budget import StepCosts

CPU_SHARE = 0.8  # of the memory that is free at start
CHUNK_CUDA = 4096  # tokens; CUDA is bound by launches, of forwards and of copies: few large chunks are best
# A launch-bound forward more costs more than the logits of so many tokens, and than what rows wait for them.
PACE_ON_CUDA = StepCosts(sampling=512, hurry=4)
PACE_ON_CPU = StepCosts(deep=384)  # so that a piece costs about as much as a step of 16 rows
BUSY_CPU, BUSY_GPU = 256, 512  # tokens beside decoding rows


def on_gpu() -> bool:
    return bool(mx.default_device() == mx.gpu)


def on_cuda() -> bool:
    return on_gpu() and not mx.metal.is_available()


def pace(config: Config) -> StepCosts:
    """How the scheduler should cut steps here. A configured `prefill_budget_busy` is what it is."""
    if on_gpu():
        return PACE_ON_CUDA if on_cuda() else StepCosts()
    return StepCosts() if config.scheduler.prefill_budget_busy else PACE_ON_CPU


def resolve(config: Config) -> Config:
    """The config with the values that depend on the device filled in."""
    scheduler = config.scheduler
    chunk = scheduler.chunk or min(CHUNK_CUDA if on_cuda() else CHUNK, scheduler.prefill_budget)
    whole = chunk if config.engine.reproducible else min(chunk, BUSY_GPU if on_gpu() else BUSY_CPU)
    busy = scheduler.prefill_budget_busy or min(whole, scheduler.prefill_budget)
    return replace(config, scheduler=replace(scheduler, chunk=chunk, prefill_budget_busy=busy))


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
