"""What this machine has, as findings for `mlxrun doctor`: backend, memory, BLAS and compiler."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxrun.model.machine import device
from mlxrun.model.machine.blas import ADVICE, find_loaded_blas
from mlxrun.model.machine.versions import Finding
from mlxrun.model.model_info import LoadedModelInfo
from mlxrun.model.probe import ProbeReport

MATMUL_SIZE = 1024
MATMUL_SECONDS = 0.3


def get_backend() -> str:
    """metal, cuda or cpu: where arrays are computed unless somebody says otherwise."""
    if mx.default_device() != mx.gpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def describe_device() -> dict[str, Any]:
    """The device as MLX describes it, with its backend; byte counts by MLX's own names. No serial numbers."""
    info = {k: v for k, v in mx.device_info(mx.default_device()).items() if k not in ("uuid", "pci_bus_id")}
    name = str(info.pop("device_name", info.get("architecture", "unknown")))
    facts = {"backend": get_backend(), "name": name} | info
    if facts["backend"] == "cpu":
        blas = find_loaded_blas()
        facts["blas"] = None if blas is None else Path(blas).name
    return facts


def check_machine() -> list[Finding]:
    """Everything about the machine that needs no model."""
    facts = describe_device()
    found = [Finding("device", "backend", "ok", f"{facts['backend']}: {facts['name']}", facts=facts)]
    found.append(check_memory(facts))
    if facts["backend"] == "cpu":
        found += [check_blas(find_loaded_blas(), measure_matmul()), check_compiler()]
    return found


def check_memory(facts: dict[str, Any]) -> Finding:
    """Total and free bytes where somebody counts them, and what mlxrun takes of it by default."""
    known = {
        "total": facts.get("total_memory", facts.get("memory_size", _read_total_memory())),
        "free": facts.get("free_memory", device.read_free_memory()),
        "recommended": facts.get("max_recommended_working_set_size", 0),
        "limit": device.get_memory_limit(),
    }
    value = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in known.items() if size)
    return Finding("device", "memory", "ok", value or "unknown", facts=known)


def _read_total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_blas(path: str | None, gflops: float) -> Finding:
    """On Linux MLX's own BLAS is the slow reference one, unless OpenBLAS came first."""
    value = f"float32 matmul {gflops:.0f} GFLOP/s, {path or 'the one MLX was built with'}"
    slow = path is None and sys.platform.startswith("linux")
    advice = f"{ADVICE}: float32 matmul becomes some 30 times faster" if slow else ""
    facts = {"path": path, "gflops": round(gflops, 1)}
    return Finding("device", "BLAS", "note" if slow else "ok", value, advice, facts)


def measure_matmul() -> float:
    """Rate of a float32 matrix product of 1024 x 1024, best of a short while."""
    a = mx.random.normal((MATMUL_SIZE, MATMUL_SIZE))
    mx.eval(a, a @ a)
    best, end = float("inf"), time.perf_counter() + MATMUL_SECONDS
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        mx.eval(a @ a)
        best = min(best, time.perf_counter() - start)
    return 2 * MATMUL_SIZE**3 / best / 1e9


def check_compiler() -> Finding:
    """mx.compile on a CPU calls g++; without one it computes uncompiled."""
    path = shutil.which("g++")
    if path is not None:
        return Finding("device", "compiler", "ok", path, facts={"path": path})
    advice = "install g++: MLX compiles fused CPU kernels with it and runs unfused without"
    return Finding("device", "compiler", "note", "no g++", advice, {"path": None})


def report_model(path: str, model_info: LoadedModelInfo) -> Finding:
    """What the model's files say."""
    facts = {
        "type": str(model_info.config.get("model_type", "unknown")),
        "vision": model_info.vision,
        "context_length": model_info.context_length,
        "chat_template": model_info.chat_template is not None,
    }
    kind = "images and text" if model_info.vision else "text"
    value = f"{facts['type']}, {kind}, context {model_info.context_length:,} tokens"
    if model_info.chat_template is not None:
        return Finding("model", path, "ok", value, facts=facts)
    advice = "no chat template: only /v1/completions will work; see model.chat_template"
    return Finding("model", path, "note", value, advice, facts)


def report_probe(probe: ProbeReport) -> Iterator[Finding]:
    """The parity table: each fast way that was tried, and then what the engine uses."""
    for check in probe.checks:
        facts = {"passed": check.passed, "difference": check.difference, "error": check.error}
        value = check.error or f"differs by {check.difference:.1e} of the logits' spread"
        if check.passed:
            yield Finding("parity", check.name, "ok", value, facts=facts)
        else:
            yield Finding(
                "parity",
                check.name,
                "note",
                value,
                "is not used for this model: a safer, slower way is",
                facts,
            )
    sharing = probe.methods.sharing
    padded = (
        f", padded up to {sharing.max_padded} tokens" if sharing.max_padded and sharing.max_rows > 1 else ""
    )
    value = f"decode {probe.methods.decode}, up to {sharing.max_rows} short prompts prefill together{padded}"
    facts = {"decode": probe.methods.decode, "prefill_rows": sharing.max_rows, "padded": sharing.max_padded}
    alone = probe.methods.decode == "alone"
    advice = "rows decode one by one: this model's caches cannot share a batch" if alone else ""
    yield Finding("parity", "in use", "note" if alone else "ok", value, advice, facts)
