"""What this machine computes on, and what follows from that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from mlxrun.config.settings import Config
from mlxrun.scheduler.scheduler import DEFAULT_CHUNK
from mlxrun.scheduler.token_budget import StepCosts

CPU_SHARE = 0.8  # of the memory that is free at start
CHUNK_CUDA = 4096  # tokens; CUDA is bound by launches, of forwards and of copies: few large chunks are best
# A launch-bound forward more costs more than the logits of so many tokens, and than what rows wait for them.
CUDA_STEP_COSTS = StepCosts(max_sampling_chunk=512, waiting_weight=4)
CPU_STEP_COSTS = StepCosts(deep_prompt=384)  # so that a piece costs about as much as a step of 16 rows
BUSY_CPU, BUSY_GPU = 256, 512  # tokens beside decoding rows


def uses_gpu() -> bool:
    return bool(mx.default_device() == mx.gpu)


def uses_cuda() -> bool:
    return uses_gpu() and not mx.metal.is_available()


def choose_step_costs(config: Config) -> StepCosts:
    """How the scheduler should cut steps here. A configured `prefill_budget_busy` is what it is."""
    if uses_gpu():
        return CUDA_STEP_COSTS if uses_cuda() else StepCosts()
    return StepCosts() if config.scheduler.prefill_budget_busy else CPU_STEP_COSTS


def resolve_config(config: Config) -> Config:
    """The config with the values that depend on the device filled in."""
    scheduler = config.scheduler
    chunk = scheduler.chunk or min(CHUNK_CUDA if uses_cuda() else DEFAULT_CHUNK, scheduler.prefill_budget)
    whole = chunk if config.engine.reproducible else min(chunk, BUSY_GPU if uses_gpu() else BUSY_CPU)
    busy = scheduler.prefill_budget_busy or min(whole, scheduler.prefill_budget)
    return replace(config, scheduler=replace(scheduler, chunk=chunk, prefill_budget_busy=busy))


def get_memory_limit() -> int:
    """Bytes that may be used: the device's recommendation, or most of what is free; 0 if nobody says."""
    info = mx.device_info()
    if uses_gpu():
        for key in ("max_recommended_working_set_size", "memory_size", "total_memory"):
            if isinstance(info.get(key), int):
                return int(info[key])
        return 0
    return int(read_free_memory() * CPU_SHARE)


def read_free_memory() -> int:
    """Bytes that Linux calls available; 0 elsewhere."""
    path = Path("/proc/meminfo")
    if not path.is_file():
        return 0
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
