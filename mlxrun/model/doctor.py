"""The findings of `mlxrun doctor` about the machine, a model and the load check."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import mlx.core as mx

from mlxrun.config.settings import Config
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import ConfigError
from mlxrun.core.media_names import PLURALS, describe_input
from mlxrun.model.hooks.install import InstalledHook
from mlxrun.model.hooks.weight_form import WeightForm
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.load_check.report import LoadCheckReport, describe_check, describe_methods
from mlxrun.model.machine import device
from mlxrun.model.machine.blas import ADVICE, find_loaded_blas, hold_blas_threads
from mlxrun.model.machine.decisions import (
    Decision,
    decide_kernel,
    decide_memory_limit,
    decide_pool,
    decide_wired,
)
from mlxrun.model.machine.device import describe_device
from mlxrun.model.machine.device_choice import find_gpu_problem
from mlxrun.model.machine.versions import Finding
from mlxrun.model.pooling.pooling_runner import PoolingCheck

MATMUL_SIZE = 1024
MATMUL_SECONDS = 0.3
ROWS, WIDTHS = 8, (576, 1536)  # a product of decoding rows in a model of 135M parameters
WAITING = 2  # a note where threads make it so many times slower than one


def check_machine(config: Config) -> list[Finding]:
    """All findings that need no model, on the device of the config, or on the CPU if there is no such."""
    settings, problem = config.engine, ""
    try:
        facts = describe_device(settings)
    except ConfigError as error:
        problem = str(error)
        facts = describe_device(replace(settings, device="cpu"))
    refused = "" if problem or settings.device == "cpu" else find_gpu_problem()
    value = f"{facts['backend']}: {facts['name']} (engine.device: {settings.device})"
    found = [Finding("device", "backend", "off" if problem else "ok", value, problem, facts)]
    if refused and mx.is_available(mx.gpu):
        advice = "the CPU computes, as engine.device: auto says"
        found.append(Finding("device", "GPU", "note", f"cannot be used: {refused}", advice))
    found += [check_memory(facts), *report_decisions(config)]
    if facts["backend"] == "cpu":
        found += [check_blas(find_loaded_blas(), measure_matmul()), check_compiler()]
        if facts.get("blas_threads", 1) > 1 and not facts["blas_threads_fixed"]:
            found.append(check_blas_threads(facts["blas_threads"], *measure_threads()))
    return found


def report_decisions(config: Config) -> Iterator[Finding]:
    """What is decided by the machine alone, and why."""
    machine, engine = device.describe_memory(), config.engine
    limit = decide_memory_limit(machine, config.scheduler.memory_limit)
    sizes: dict[str, Decision[Any]] = {
        "memory limit": limit,
        "pool": decide_pool(machine, limit.value),
        "wired memory": decide_wired(machine, limit.value),
    }
    for name, decided in sizes.items():
        value = format_rounded(decided.value) if decided.value else "not limited"
        facts = {"bytes": decided.value, "reason": decided.reason}
        yield Finding("decisions", name, "ok", f"{value}: {decided.reason}", facts=facts)
    kernel = decide_kernel(machine.backend, engine.reproducible, bool(engine.load_check))
    value, facts = f"{kernel.value}: {kernel.reason}", {"use": kernel.value, "reason": kernel.reason}
    yield Finding("decisions", "attention kernel", "ok", value, facts=facts)


def check_memory(facts: dict[str, Any]) -> Finding:
    """Total and free memory, where known, and mlxrun's default limit."""
    known = {
        "total": facts.get(
            "total_memory", facts.get("memory_size", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        ),
        "free": facts.get("free_memory", device.read_free_memory()),
        "recommended": facts.get("max_recommended_working_set_size", 0),
        "limit": device.get_memory_limit(),
    }
    value = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in known.items() if size)
    return Finding("device", "memory", "ok", value or "unknown", facts=known)


def check_blas(path: str | None, gflops: float) -> Finding:
    """The loaded BLAS. MLX on Linux has a slow one, unless OpenBLAS was loaded first."""
    value = f"float32 matmul {gflops:.0f} GFLOP/s, {path or 'the one MLX was built with'}"
    slow = path is None and sys.platform.startswith("linux")
    advice = f"{ADVICE}: float32 matmul becomes some 30 times faster" if slow else ""
    facts = {"path": path, "gflops": round(gflops, 1)}
    return Finding("device", "BLAS", "note" if slow else "ok", value, advice, facts)


def measure_matmul() -> float:
    """The best rate, in GFLOP/s, of float32 products of MATMUL_SIZE x MATMUL_SIZE matrices."""
    a = mx.random.normal((MATMUL_SIZE, MATMUL_SIZE))
    mx.eval(a, a @ a)
    best, end = float("inf"), time.perf_counter() + MATMUL_SECONDS
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        mx.eval(a @ a)
        best = min(best, time.perf_counter() - start)
    return 2 * MATMUL_SIZE**3 / best / 1e9


def check_blas_threads(threads: int, every: float, one: float) -> Finding:
    """Whether OpenBLAS' threads wait for each other, by seconds of a small product with all and with one."""
    times = [f"{1000 * seconds:.2f} ms" for seconds in (every, one)]
    value = f"a product of {ROWS} rows takes {times[0]} with {threads} threads and {times[1]} with one"
    waits = every > WAITING * one
    advice = "other programs compute here: engines take fewer threads while they do" if waits else ""
    facts = {"threads": threads, "seconds": every, "seconds_with_one": one}
    return Finding("device", "BLAS threads", "note" if waits else "ok", value, advice, facts)


def measure_threads() -> tuple[float, float]:
    """Seconds of a product of few rows, medians: with the threads that OpenBLAS has, and with one."""
    rows, weight = mx.random.normal((ROWS, WIDTHS[0])), mx.random.normal(WIDTHS)
    mx.eval(rows @ weight)

    def measure() -> float:
        times, end = list[float](), time.perf_counter() + MATMUL_SECONDS
        while not times or time.perf_counter() < end:
            start = time.perf_counter()
            mx.eval(rows @ weight)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    every = measure()
    with hold_blas_threads(1):
        return every, measure()


def check_compiler() -> Finding:
    """The C++ compiler. mx.compile on a CPU calls g++, and does not fuse kernels without it."""
    path = shutil.which("g++")
    if path is not None:
        return Finding("device", "compiler", "ok", path, facts={"path": path})
    advice = "install g++: MLX compiles fused CPU kernels with it and runs unfused without"
    return Finding("device", "compiler", "note", "no g++", advice, {"path": None})


def describe_use(info: LoadedModelInfo) -> str:
    """Return what a model takes, and what it gives unless that is text alone."""
    if info.speech is not None:
        return "sound to text"
    if info.pooled is None:
        return describe_input(info)
    return f"{describe_input(info)}, {'embeddings' if info.pooled.task == 'embed' else 'scores of documents'}"


def report_model(path: str, info: LoadedModelInfo) -> Finding:
    """What the model's files say."""
    facts = {
        "type": str(info.config.get("model_type", "unknown")),
        "vision": info.vision,
        "video": info.video_sampling is not None,
        "audio": info.audio_sampling is not None,
        "context_length": info.context_length,
        "chat_template": info.chat_template is not None,
    }
    note = f" ({info.kind_note})" if info.kind_note else ""
    value = f"{facts['type']}, {describe_use(info)}{note}, context {info.context_length:,} tokens"
    if info.chat_template is not None or not info.generates:
        return Finding("model", path, "ok", value, facts=facts)
    advice = "no chat template: only /v1/completions will work; see model.chat_template"
    return Finding("model", path, "note", value, advice, facts)


def report_weights(form: WeightForm) -> Iterator[Finding]:
    """Weights that the model does not use, and how quantized ones are multiplied, with the measured times."""
    if form.unused:
        names = ", ".join(form.unused[:3]) + (", and more" if len(form.unused) > 3 else "")
        advice = "the files have weights that this model does not use, such as heads for other tasks"
        facts: dict[str, Any] = {"names": form.unused}
        yield Finding("weights", "unused", "note", f"{len(form.unused)}: {names}", advice, facts)
    if form.kinds:
        facts = {"kinds": form.kinds, "held": form.held, "methods": form.table.entries}
        yield Finding("weights", "form", "ok", form.describe(), facts={**facts, "seconds": form.seconds})
    if form.plain is not None:
        facts = {"methods": form.plain.entries}
        yield Finding("weights", "plain", "ok", form.describe_plain(), facts=facts)
    if form.reason:
        yield Finding("weights", "why", "ok", form.reason, facts={"reason": form.reason})
    for name, times in form.seconds.items():
        curve = ", ".join(f"{rows} rows {value * 1e6:.0f}" for rows, value in times.items())
        yield Finding("weights", name, "ok", f"{curve} us", facts={"seconds": times})


def report_hooks(hooks: Sequence[InstalledHook]) -> Iterator[Finding]:
    """The changes to the library's model."""
    for hook in hooks:
        value, facts = f"{hook.purpose} ({hook.places})", {"places": hook.places}
        yield Finding("hooks", hook.name, "ok", value, facts=facts)


def report_pooling(checks: Sequence[PoolingCheck], max_rows: int, max_tokens: int) -> Iterator[Finding]:
    """The checks of a model that gives vectors, and how texts are computed."""
    for check in checks:
        value = f"vectors differ by {check.difference:.2g}, rounding by up to {check.limit:.2g}"
        level: Literal["ok", "note"] = "ok" if check.passed else "note"
        advice = "" if check.passed else "not used for this model; instead: texts are computed one by one"
        facts = {"difference": check.difference, "limit": check.limit}
        yield Finding("vectors", check.name, level, value, advice, facts)
    together = f"up to {max_rows} texts together" if max_rows > 1 else "texts one by one"
    facts = {"max_rows": max_rows, "max_tokens": max_tokens}
    value = f"{together}, each of up to {max_tokens:,} tokens"
    yield Finding("vectors", "in use", "ok", value, facts=facts)


def report_load_check(load_check: LoadCheckReport) -> Iterator[Finding]:
    """The load check: each check, what was not compared, and the methods that the engine uses."""
    for check in load_check.checks:
        advice = "" if check.passed else f"not used for this model{check.describe_instead()}"
        value, facts = check.describe(), describe_check(check)
        yield Finding("load check", check.name, "ok" if check.passed else "note", value, advice, facts)
    for window in load_check.windows:
        value = f"{window.size:,} tokens, crossed"
        if window.compared != window.size:
            value += f" as a window of {window.compared}, to which the checks reduce it"
        yield Finding("load check", "window", "ok", value, facts=asdict(window))
    for name, note in (
        ("long rows", load_check.long_rows),
        *((name, getattr(load_check, name)) for name in PLURALS.values()),
    ):
        if note:
            yield Finding("load check", name, "note", note, facts={name: note})
    if load_check.seconds is not None:
        facts = {"seconds": load_check.seconds, "kept": load_check.kept, "age": load_check.compute_age()}
        yield Finding("load check", "time", "ok", load_check.describe_time(), facts=facts)
    methods, sharing = load_check.methods, load_check.methods.sharing
    parts = [
        f"decode {methods.decode}{' as prompts are' * methods.fused_prompts}",
        f"up to {sharing.max_rows} short prompts prefill together",
    ]
    notes = {
        f"padded up to {sharing.max_padded} tokens": sharing.max_padded and sharing.max_rows > 1,
        "the library's attention": methods.attention == "library",
        "prompts split as the library splits them": methods.library_chunks,
        "no prefix cache": not methods.snapshots,
    }
    parts += [note for note, is_so in notes.items() if is_so]
    if methods.quantization is not None:
        bits, size, start = methods.quantization
        quantized = f"keys and values of decoding rows in {bits} bits (groups of {size})"
        parts.append(f"{quantized} from {start:,} tokens on" if start else quantized)
    single = methods.decode == "row_by_row"
    advice = "rows decode one by one: this model's caches cannot share a batch" if single else ""
    facts = describe_methods(methods)
    yield Finding("load check", "in use", "note" if single else "ok", ", ".join(parts), advice, facts)


def report_drafts(facts: Mapping[str, Any]) -> Finding:
    """The method of drafting, or why nothing drafts. `facts`: the result of DraftPlanner.describe."""
    method, problem = facts["method"], facts["problem"]
    given = {name: facts[name] for name in ("method", "configured", "problem")}
    value = f"{method}: {problem.removeprefix('off because ')}" if problem else method
    return Finding("speculation", "in use", "note" if problem else "ok", value, facts=given)
