"""`mlxrun bench report`: one file of what a machine does, to compare machines and versions.

It starts the config's own server on a free port, and sends chats at several concurrencies, then the workload
`interactive`. What was chosen and the peak memory come from /v1/status. Then it measures the attention kernel
by itself, and checks tiny models of much used families. The keys of `concurrency_results` are those of
SiliconBench's result files (github.com/WindChimeRan/SiliconBench): milliseconds, seconds, tokens a second.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mlxrun.cli.bench.report import format_bytes, make_console, make_table, print_notes
from mlxrun.cli.bench.serve.benchmark import run_serve_bench
from mlxrun.cli.bench.serve.family_report import FAMILIES, check_families, describe_families
from mlxrun.cli.bench.serve.streaming_client import LoadPattern, Target
from mlxrun.cli.bench.serve.workloads import PromptSize, ServePlan
from mlxrun.core.errors import MlxrunError
from mlxrun.core.processes import stop_process

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = 1
START_SECONDS = 900.0  # a large model is read from disk
STOP_SECONDS = 30.0
INTERRUPTED = "interrupted"
_OF_STATUS = ("model", "config_hash", "device", "versions", "memory", "decode", "load_check", "power")
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


def make_empty_report(plan: ReportPlan) -> dict[str, Any]:
    """A report as `--json` writes it, before anything was measured. `error`: why it is not finished, None if
    it is; `stage`: what was measured then."""
    return {
        "format": FORMAT,
        "framework": "mlxrun",
        "error": INTERRUPTED,  # until all is measured, in case the process is killed
        "stage": None,
        "settings": {
            "requests": plan.requests,
            "prompt_words": plan.size.prompt,
            "output_tokens": plan.size.output,
            "long_words": plan.size.long,
        },
        "concurrency_results": [],
        "interactive": {},
        "kernel": None,
        "families": None,
        **dict.fromkeys(_OF_STATUS),
        "versions": {},
    }


def run_machine_report(
    plan: ReportPlan, report: dict[str, Any], say: Say, save: Callable[[], None] = lambda: None
) -> None:
    """Start the server, measure it, and stop it. `report`, from `make_empty_report`, always has what was
    measured until then. `save` is called as each stage begins."""
    numbers, total = itertools.count(1), 3 + len(plan.levels) + bool(plan.families)

    def begin(stage: str) -> None:
        report["stage"] = stage
        save()
        say(f"{next(numbers)}/{total} {stage}")

    begin("start the server")
    with run_server(plan.arguments) as url:
        report.update(_read_status(url))
        target = Target("mlxrun", f"{url}/v1", report["model"])
        for level in plan.levels:
            begin(f"{plan.requests} chats, {level} at a time")
            report["concurrency_results"].append(measure_level(plan, target, level, say))
        begin("a short request behind a long prompt")
        report["interactive"] = _measure_interactive(plan, target, say)
        report.update(_read_status(url))
    begin("the attention kernel")
    report["kernel"] = _measure_kernel()
    if plan.families:
        begin(f"tiny models of {len(plan.families)} families")
        report["families"] = check_families(say, plan.families)
    report.update(error=None, stage=None)


def _read_status(url: str) -> dict[str, Any]:
    """What the server says of itself and its model."""
    status = _read_json(f"{url}/v1/status")
    own = {"model": status["model"]["name"], "decode": (status["load_check"] or {}).get("decode")}
    return {key: status[key] for key in _OF_STATUS if key not in own} | own


def _measure_kernel() -> list[dict[str, Any]]:
    """The attention kernel on this machine, once the server has left it."""
    import mlxrun.model  # noqa: F401  its limits of memory are checked before more is imported
    from mlxrun.model.load_check.kernel_report import measure_kernel

    return measure_kernel()


@contextmanager
def run_server(arguments: Sequence[str]) -> Iterator[str]:
    """Run a server of this installation during the block, and give its URL. MlxrunError if it does not
    start, or ends too soon. Its data folder is its own, so that `mlxrun ps` and `mlxrun stop` do not know
    it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ("--host", "127.0.0.1", "--port", str(port))
    command = [sys.executable, "-c", MAIN, "serve", *arguments, *place]
    with tempfile.TemporaryDirectory(prefix="mlxrun-report-", ignore_cleanup_errors=True) as data:
        environ = os.environ | {"XDG_DATA_HOME": data}
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environ)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, url)
            yield url
        except (MlxrunError, OSError):
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)  # its connections end before it does
            _check_alive(process)
            raise
        finally:
            stop_process(process, STOP_SECONDS)


def _check_alive(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        raise MlxrunError(f"the server ended with exit code {process.returncode}; its log says why")


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        _check_alive(process)
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


def measure_level(plan: ReportPlan, target: Target, level: int, say: Say) -> dict[str, Any]:
    """The record of one concurrency: chats to the server, `level` at a time."""
    load, warm_up = LoadPattern(level, seed=f"level {level}"), min(level, plan.requests)
    report = run_serve_bench(ServePlan((target,), ("chat",), plan.size, plan.requests, load, 1, warm_up), say)
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


def _measure_interactive(plan: ReportPlan, target: Target, say: Say) -> dict[str, float]:
    """Empty where no long prompt fits the model that is not computed too soon."""
    error = None
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
    """Print a table with a row for each concurrency that was measured, and what else was."""
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
    interactive, memory, lines = report["interactive"], report["memory"] or {}, []
    if rows:
        console.print(make_table(titles, 1, rows, console.is_terminal))
        lines.append(f"{report['model']}: {report['settings']['requests']} requests at each concurrency")
    if "behind" in interactive:
        behind, alone = (f"{interactive[key] * 1000:,.0f} ms" for key in ("behind", "alone"))
        lines.append(f"TTFT of a short request: {alone} alone, {behind} behind a long prompt")
    elif not report["error"]:
        lines.append("a short request behind a long prompt was not measured: try another --long-words")
    if "peak" in memory:
        lines.append(f"peak memory: {format_bytes(memory['peak'])}")
    lines += [_describe_kernel(each) for each in report["kernel"] or ()]
    if report["kernel"] == []:
        lines.append("attention kernel: there is none for this device")
    if report["families"] is not None:
        lines.append(describe_families(report["families"]))
    if report["error"]:
        lines.append(f"not finished; the stage was: {report['stage']}")
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
