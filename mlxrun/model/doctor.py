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
from mlxrun.model.machine.blas import ADVICE, loaded_blas
from mlxrun.model.machine.versions import Finding
from mlxrun.model.model_info import LoadedModelInfo
from mlxrun.model.probe import ProbeReport

GEMM_SIZE = 1024
GEMM_SECONDS = 0.3


def backend() -> str:
    """metal, cuda or cpu: where arrays are computed unless somebody says otherwise."""
    if mx.default_device() != mx.gpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def device_facts() -> dict[str, Any]:
    """The device as MLX describes it, with its backend; byte counts by MLX's own names. No serial numbers."""
    info = {k: v for k, v in mx.device_info(mx.default_device()).items() if k not in ("uuid", "pci_bus_id")}
    name = str(info.pop("device_name", info.get("architecture", "unknown")))
    facts = {"backend": backend(), "name": name} | info
    if facts["backend"] == "cpu":
        blas = loaded_blas()
        facts["blas"] = None if blas is None else Path(blas).name
    return facts


def machine_findings() -> list[Finding]:
    """Everything about the machine that needs no model."""
    facts = device_facts()
    found = [Finding("device", "backend", "ok", f"{facts['backend']}: {facts['name']}", facts=facts)]
    found.append(memory_finding(facts))
    if facts["backend"] == "cpu":
        found += [blas_finding(loaded_blas(), gemm_gflops()), compiler_finding()]
    return found


def memory_finding(facts: dict[str, Any]) -> Finding:
    """Total and free bytes where somebody counts them, and what mlxrun takes of it by default."""
    known = {
        "total": facts.get("total_memory", facts.get("memory_size", _total_memory())),
        "free": facts.get("free_memory", device.free_memory()),
        "recommended": facts.get("max_recommended_working_set_size", 0),
        "limit": device.device_limit(),
    }
    value = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in known.items() if size)
    return Finding("device", "memory", "ok", value or "unknown", facts=known)


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def blas_finding(path: str | None, gflops: float) -> Finding:
    """On Linux MLX's own BLAS is the slow reference one, unless OpenBLAS came first."""
    value = f"float32 matmul {gflops:.0f} GFLOP/s, {path or 'the one MLX was built with'}"
    slow = path is None and sys.platform.startswith("linux")
    advice = f"{ADVICE}: float32 matmul becomes some 30 times faster" if slow else ""
    facts = {"path": path, "gflops": round(gflops, 1)}
    return Finding("device", "BLAS", "note" if slow else "ok", value, advice, facts)


def gemm_gflops() -> float:
    """Rate of a float32 matrix product of 1024 x 1024, best of a short while."""
    a = mx.random.normal((GEMM_SIZE, GEMM_SIZE))
    mx.eval(a, a @ a)
    best, end = float("inf"), time.perf_counter() + GEMM_SECONDS
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        mx.eval(a @ a)
        best = min(best, time.perf_counter() - start)
    return 2 * GEMM_SIZE**3 / best / 1e9


def compiler_finding() -> Finding:
    """mx.compile on a CPU calls g++; without one it computes uncompiled."""
    path = shutil.which("g++")
    if path is not None:
        return Finding("device", "compiler", "ok", path, facts={"path": path})
    advice = "install g++: MLX compiles fused CPU kernels with it and runs unfused without"
    return Finding("device", "compiler", "note", "no g++", advice, {"path": None})


def host_finding(path: str, host: LoadedModelInfo) -> Finding:
    """What the model's files say."""
    facts = {
        "type": str(host.config.get("model_type", "unknown")),
        "vision": host.vision,
        "context_length": host.context_length,
        "chat_template": host.chat_template is not None,
    }
    kind = "images and text" if host.vision else "text"
    value = f"{facts['type']}, {kind}, context {host.context_length:,} tokens"
    if host.chat_template is not None:
        return Finding("model", path, "ok", value, facts=facts)
    advice = "no chat template: only /v1/completions will work; see model.chat_template"
    return Finding("model", path, "note", value, advice, facts)


def probe_findings(probe: ProbeReport) -> Iterator[Finding]:
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
    padded = f", padded up to {sharing.padded} tokens" if sharing.padded and sharing.rows > 1 else ""
    value = f"decode {probe.methods.decode}, up to {sharing.rows} short prompts prefill together{padded}"
    facts = {"decode": probe.methods.decode, "prefill_rows": sharing.rows, "padded": sharing.padded}
    alone = probe.methods.decode == "alone"
    advice = "rows decode one by one: this model's caches cannot share a batch" if alone else ""
    yield Finding("parity", "in use", "note" if alone else "ok", value, advice, facts)
