"""The device that MLX computes on, its memory, and the settings that depend on it.

It also describes what decides the last digits of results besides model, settings and versions: device, BLAS,
compiler.
"""

from __future__ import annotations

import gc
import os
import platform
import shutil
import time
from collections import deque
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlxrun.config.settings import Config, EngineSettings
from mlxrun.core.step_plan import DEFAULT_CHUNK, StepCosts
from mlxrun.model.machine.blas import describe_blas
from mlxrun.model.machine.decisions import (
    Backend,
    Machine,
    decide_kernel,
    decide_memory_limit,
    decide_pool,
    decide_wired,
)
from mlxrun.model.machine.device_choice import use_device
from mlxrun.model.machine.memory_limits import count_reserved_bytes, find_free_memory, list_limits

WARM_SIZE, WARM_SECONDS = 1024, 0.2
CUDA_CHUNK = 4096  # tokens; launches of forwards and copies dominate on CUDA: few large chunks are best
# One more launch-bound forward costs more than the logits of so many tokens, or than rows that wait.
CUDA_STEP_COSTS = StepCosts(
    512,
    waiting_weight=4,
    deep_prompt=8192,
    few_lengths=True,
    min_chunk=512,
    least_fitting=0.75,
    lone_share=0.25,
    lone_tokens=2048,
)
# A deep prompt's chunk costs about as much as a step of 16 rows.
CPU_STEP_COSTS = StepCosts(deep_prompt=384, lone_share=0.25)
BUSY = {"cpu": 256, "metal": 512, "cuda": 2048}  # tokens beside decoding rows
STEP_MS, CUDA_STEP_MS = 200, 100
PARALLEL_BYTES, MOST_STREAMS, MOST_LAUNCHED = 1 << 28, 8, 2
REPRODUCIBLE_THREADS = 1  # the only number that every machine has
# The facts on which the last digits of results depend.
DECISIVE = (
    *("backend", "name", "architecture", "compile", "tf32", "libc"),
    *("blas", "blas_version", "blas_kernel", "blas_threads"),
)


def get_backend() -> Backend:
    """The backend of the default device: metal, cuda or cpu."""
    if not uses_gpu():
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def uses_gpu() -> bool:
    return bool(mx.default_device() == mx.gpu)


def may_shorten_float32() -> bool:
    """Whether the GPU may multiply float32 matrices in TF32, with the mantissa of float16. NVIDIA's and
    Apple's newest GPUs do, unless the environment has MLX_ENABLE_TF32=0."""
    return uses_gpu() and os.environ.get("MLX_ENABLE_TF32", "1") != "0"


def uses_cuda() -> bool:
    return get_backend() == "cuda"


def choose_step_costs(config: Config) -> StepCosts:
    """The scheduler's costs on this device. A configured `prefill_budget_busy` is not adapted."""
    costs = {"cpu": CPU_STEP_COSTS, "cuda": CUDA_STEP_COSTS, "metal": StepCosts()}[get_backend()]
    return replace(costs, deep_prompt=0) if config.scheduler.prefill_budget_busy else costs


def resolve_config(config: Config) -> Config:
    """The config with values for the settings that depend on the device."""
    scheduler = config.scheduler
    chunk = scheduler.chunk or min(CUDA_CHUNK if uses_cuda() else DEFAULT_CHUNK, scheduler.prefill_budget)
    most = chunk if config.engine.reproducible else min(chunk, BUSY[get_backend()])
    busy = scheduler.prefill_budget_busy or min(most, scheduler.prefill_budget)
    default = CUDA_STEP_MS if uses_cuda() else STEP_MS
    step_ms = default if scheduler.step_ms is None else scheduler.step_ms
    scheduler = replace(scheduler, chunk=chunk, prefill_budget_busy=busy, step_ms=step_ms)
    return replace(config, scheduler=scheduler)


def describe_memory() -> Machine:
    """The device's memory, for decisions. What arrays have already counts as free."""
    backend, free = get_backend(), 0
    if backend != "cuda":
        free = read_free_memory()
        free = free + mx.get_active_memory() if free else 0
    recommended = _read_recommended() if uses_gpu() else 0
    return Machine(backend, recommended or _read_total(), recommended, free)


def get_memory_limit(given: int | None = None) -> int:
    """Bytes that may be used, those that arrays have already included; 0 if unknown. `given`: if the config
    says it."""
    return decide_memory_limit(describe_memory(), given).value


def get_total_memory() -> int:
    """Bytes that the device has, or that this process may have of them, whatever is in use; 0 if unknown."""
    return _read_recommended() if uses_gpu() else _read_total()


def _read_recommended() -> int:
    """Bytes that the GPU recommends, or has; 0 if it does not say."""
    info = mx.device_info(mx.default_device())
    for key in ("max_recommended_working_set_size", "memory_size", "total_memory"):
        if isinstance(info.get(key), int):
            return int(info[key])
    return 0


def _read_total() -> int:
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([size, *(limit.total for limit in list_limits())])


def limit_buffers(given: int | None) -> None:
    """Bound MLX's pool of free buffers, and what the system keeps in memory. `given`: the config's limit."""
    machine = describe_memory()
    limit = decide_memory_limit(machine, given).value
    pool, wired = decide_pool(machine, limit).value, decide_wired(machine, limit).value
    if pool is not None:
        mx.set_cache_limit(pool)
    if wired is not None:
        mx.set_wired_limit(wired)


def warm_device() -> None:
    """Compute for a moment before something is timed: a GPU that slept is slow for what comes first."""
    if not uses_gpu():
        return
    square, end = mx.ones((WARM_SIZE, WARM_SIZE)), time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < end:
        mx.eval(square @ square)


def read_free_memory() -> int:
    """The bytes that this process may still take, by Linux's available memory and its own limits. 0 on other
    systems."""
    return find_free_memory(list_limits(), count_reserved_bytes(loaded=True))


def choose_blas_threads(settings: EngineSettings) -> int | None:
    """The number of OpenBLAS threads of an engine; None: it is not fixed."""
    if settings.blas_threads is None and settings.reproducible:
        return REPRODUCIBLE_THREADS
    return settings.blas_threads


def describe_device(settings: EngineSettings | None = None) -> dict[str, Any]:
    """The device and its backend, with MLX's own names for byte counts, and without serial numbers.
    `settings`: of an engine, whose device and BLAS threads are then described, and not those of the process.
    That device is then MLX's default; ConfigError if it does not exist."""
    if settings is not None:
        use_device(settings)
    info = {k: v for k, v in mx.device_info(mx.default_device()).items() if k not in ("uuid", "pci_bus_id")}
    name = str(info.pop("device_name", info.get("architecture", "unknown")))
    facts = {"backend": get_backend(), "name": name} | info | {"compile": fuses_operations()}
    facts["variables"] = {key: each for key, each in sorted(os.environ.items()) if key.startswith("MLX_")}
    if facts["backend"] != "cpu":
        if settings is not None:
            used = decide_kernel(get_backend(), settings.reproducible, bool(settings.load_check))
            facts["attention_kernel"] = used.value
        return facts | {"tf32": may_shorten_float32()}
    facts |= {"libc": " ".join(platform.libc_ver()).strip() or None} | describe_blas()
    if settings is not None and "blas_threads" in facts:
        fixed = choose_blas_threads(settings)
        facts["blas_threads"] = fixed or facts["blas_threads"]
        facts["blas_threads_fixed"] = fixed is not None
    return facts


def describe_rounding(settings: EngineSettings) -> dict[str, Any]:
    """The facts that decide the rounding of an engine with these settings."""
    found = describe_device(settings)
    return {key: found[key] for key in DECISIVE if key in found}


def fuses_operations() -> bool:
    """Whether MLX fuses operations: on a CPU it calls g++ for that, and computes without if there is none."""
    if "MLX_DISABLE_COMPILE" in os.environ:
        return False
    return get_backend() != "cpu" or shutil.which("g++") is not None


class StreamSpread:
    """Spreads independent arrays over streams, which compute them at the same time. `nbytes`: of all arrays.
    On a CPU there are several streams for many bytes, each with a thread. Only the thread that made this can
    use it."""

    def __init__(self, nbytes: int) -> None:
        is_single = uses_gpu() or nbytes < PARALLEL_BYTES
        more = 0 if is_single else min(os.cpu_count() or 1, MOST_STREAMS) - 1
        self._streams = [
            mx.default_stream(mx.default_device()),
            *(mx.new_stream(mx.cpu) for _ in range(more)),
        ]
        self._sizes = [0] * len(self._streams)
        self._launched: list[deque[mx.array]] = [deque() for _ in self._streams]

    def choose(self, size: int) -> mx.Stream:
        """The stream that has least to do, for an array of this size."""
        at = self._sizes.index(min(self._sizes))
        self._sizes[at] += size
        return self._streams[at]

    def launch(self, array: mx.array, stream: mx.Stream) -> None:
        """Compute an array of this stream, once few others of it are left."""
        waiting = self._launched[self._streams.index(stream)]
        mx.async_eval(array)
        waiting.append(array)
        if len(waiting) > MOST_LAUNCHED:
            mx.eval(waiting.popleft())

    def wait(self) -> None:
        """Wait for all that was launched."""
        mx.eval([array for waiting in self._launched for array in waiting])


def start_measuring(drop_pool: bool) -> int:
    """Collect garbage, drop the pool of free buffers if `drop_pool`, and reset the peak. Returns the bytes in
    use."""
    gc.collect()
    mx.synchronize()
    if drop_pool:
        mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def read_peak() -> int:
    """The most bytes in use since `start_measuring`, without the pool of free buffers."""
    return max(mx.get_peak_memory(), mx.get_active_memory())


def read_active() -> int:
    """The bytes in use now, without the pool of free buffers."""
    return mx.get_active_memory()


def read_device_memory() -> dict[str, int]:
    """Bytes in use, in the pool of free buffers, and the most that were in use so far."""
    return {"active": mx.get_active_memory(), "cache": mx.get_cache_memory(), "peak": read_peak()}
