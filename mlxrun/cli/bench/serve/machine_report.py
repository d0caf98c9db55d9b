"""`mlxrun bench report`: one file of what a machine does, to compare machines and versions.

It starts the config's own server on a free port, and sends chats at several concurrencies, then the workload
`interactive`. What was chosen and the peak memory come from /v1/status. Then it measures the attention kernel
by itself, and checks tiny models of much used families. The keys of `concurrency_results` are those of
SiliconBench's result files (github.com/WindChimeRan/SiliconBench): milliseconds, seconds, tokens a second.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mlxrun.cli.bench.report import format_bytes, make_console, make_table, print_notes
from mlxrun.cli.bench.serve.benchmark import run_serve_bench
from mlxrun.cli.bench.serve.family_report import FAMILIES, check_families, describe_families
from mlxrun.cli.bench.serve.streaming_client import LoadPattern, Target
from mlxrun.cli.bench.serve.workloads import PromptSize, ServePlan
from mlxrun.core.errors import MlxrunError

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = 1
START_SECONDS = 900.0  # a large model is read from disk
STOP_SECONDS = 30.0
MAIN = "import sys; from mlxrun.cli.main import main; sys.exit(main())"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ReportPlan:
    """What to measure. `arguments`: options of `mlxrun serve`; `levels`: numbers of requests at a time;
    `families`: those to check."""

    arguments: tuple[str, ...]
    requests: int
    size: PromptSize
    levels: tuple[int, ...] = (1, 8, 16)
    families: tuple[str, ...] = FAMILIES


def run_machine_report(plan: ReportPlan, say: Say) -> dict[str, Any]:
    """Start the server, measure it, stop it, and return the report as `--json` writes it."""
    with run_server(plan.arguments, say) as url:
        levels = [_measure_level(plan, url, level, say) for level in plan.levels]
        interactive = _measure_interactive(plan, url, say)
        status = _read_json(f"{url}/v1/status")
    return {
        "format": FORMAT,
        "framework": "mlxrun",
        "model": status["model"]["name"],
        "config_hash": status["config_hash"],
        "device": status["device"],
        "versions": status["versions"],
        "settings": {
            "requests": plan.requests,
            "prompt_words": plan.size.prompt,
            "output_tokens": plan.size.output,
            "long_words": plan.size.long,
        },
        "concurrency_results": levels,
        "interactive": interactive,
        "memory": status["memory"],
        "decode": (status["load_check"] or {}).get("decode"),
        "load_check": status["load_check"],
        "power": status["power"],
        "kernel": _measure_kernel(say),
        "families": check_families(say, plan.families) if plan.families else None,
    }


def _measure_kernel(say: Say) -> list[dict[str, Any]]:
    """The attention kernel on this machine, once the server has left it."""
    import mlxrun.model  # noqa: F401  its limits of memory are checked before more is imported
    from mlxrun.model.load_check.kernel_report import measure_kernel

    say("measures the attention kernel")
    return measure_kernel()


@contextmanager
def run_server(arguments: Sequence[str], say: Say) -> Iterator[str]:
    """Run a server of this installation during the block, and give its URL. MlxrunError if it does not
    start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", MAIN, "serve", *arguments, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(process, url)
        say("the server is ready")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise MlxrunError(f"the server ended with exit code {process.returncode}; its log says why")
        try:
            _read_json(f"{url}/health")
            return
        except (OSError, urllib.error.URLError):  # not listening yet, or loading
            time.sleep(0.2)
    raise MlxrunError(f"the server was not ready after {START_SECONDS:.0f} s")


def _read_json(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=30) as response:
        found: dict[str, Any] = json.load(response)
    return found


def _measure_level(plan: ReportPlan, url: str, level: int, say: Say) -> dict[str, Any]:
    target, load = Target("mlxrun", f"{url}/v1"), LoadPattern(level, seed=f"level {level}")
    report = run_serve_bench(ServePlan((target,), ("chat",), plan.size, plan.requests, load, 1), say)
    side = report["workloads"]["chat"]["mlxrun"]
    found, failed = side["median"], int(side["median"]["errors"] or 0)
    return {
        "concurrency": level,
        "num_requests": plan.requests,
        "successful": plan.requests - failed,
        "failed": failed,
        "ttft_p50_ms": _to_ms(found["ttft_p50"]),
        "ttft_p99_ms": _to_ms(found["ttft_p99"]),
        "itl_p50_ms": _to_ms(found["gap_p50"]),
        "itl_p99_ms": _to_ms(found["gap_p99"]),
        "latency_p50_s": found["latency_p50"],
        "output_throughput_tps": found["output_rate"],
        "error_samples": list(side["errors"]),
    }


def _measure_interactive(plan: ReportPlan, url: str, say: Say) -> dict[str, float]:
    """Empty where no long prompt fits the model that is not computed too soon."""
    target, error = Target("mlxrun", f"{url}/v1"), None
    for part in (1, 2, 4, 8):
        size = replace(plan.size, long=max(1, plan.size.long // part))
        serve_plan = ServePlan((target,), ("interactive",), size, 1, LoadPattern(1), 3)
        try:
            report = run_serve_bench(serve_plan, say)
        except MlxrunError as failed:
            error = error or failed
            continue
        median = report["workloads"]["interactive"]["mlxrun"]["median"]
        return {key: value for key, value in median.items() if value is not None}
    say(f"{error}; try another --long-words")
    return {}


def _to_ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def print_machine_report(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a table with a row for each concurrency, and what the machine is."""
    console = make_console(console)
    titles = ("concurrency", "output tok/s", "TTFT p50", "TTFT p99", "inter-token p50", "failed")
    rows = [
        (
            str(level["concurrency"]),
            *(_format(level[key], unit) for key, unit in _SHOWN),
            str(level["failed"]),
        )
        for level in report["concurrency_results"]
    ]
    console.print(make_table(titles, 1, rows, console.is_terminal))
    interactive, memory = report["interactive"], report["memory"] or {}
    lines = [f"{report['model']}: {report['settings']['requests']} requests at each concurrency"]
    if "behind" in interactive:
        behind, alone = (f"{interactive[key] * 1000:,.0f} ms" for key in ("behind", "alone"))
        lines.append(f"TTFT of a short request: {alone} alone, {behind} behind a long prompt")
    else:
        lines.append("a short request behind a long prompt was not measured: try another --long-words")
    if "peak" in memory:
        lines.append(f"peak memory: {format_bytes(memory['peak'])}")
    lines += [_describe_kernel(each) for each in report["kernel"]]
    if not report["kernel"]:
        lines.append("attention kernel: there is none for this device")
    if report["families"] is not None:
        lines.append(describe_families(report["families"]))
    print_notes(lines, console)


def _describe_kernel(found: Mapping[str, Any]) -> str:
    name = f"attention kernel, {found['family']}, {found['dtype']}"
    if "error" in found:
        return f"{name}: FAILED: {found['error']}"
    return (
        f"{name}: {found['kernel_us']:,.0f} us, MLX's own {found['library_us']:,.0f} us; "
        f"error {found['kernel_error']:.1e}, MLX's own {found['library_error']:.1e}"
    )


_SHOWN = (
    ("output_throughput_tps", ""),
    ("ttft_p50_ms", "ms"),
    ("ttft_p99_ms", "ms"),
    ("itl_p50_ms", "ms"),
)


def _format(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.1f} {unit}".rstrip()
