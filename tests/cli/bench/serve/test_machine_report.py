"""`mlxrun bench report`: a real server of the embedded model, and servers that do not start."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mlxrun.cli.bench.serve.machine_report import ReportPlan, print_machine_report, run_server
from mlxrun.cli.bench.serve.workloads import PromptSize
from mlxrun.cli.main import main
from mlxrun.core.errors import MlxrunError


@pytest.mark.slow
def test_a_report_of_the_embedded_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    sizes = ["--requests", "2", "--output-tokens", "3", "--prompt-words", "5", "--long-words", "250"]
    assert (
        main(["bench", "report", *sizes, "--no-families", "--set", "scheduler.chunk=32", "--json", str(out)])
        == 0
    )
    report = json.loads(out.read_text())
    assert [level["concurrency"] for level in report["concurrency_results"]] == [1, 8, 16]
    for level in report["concurrency_results"]:
        assert (level["successful"], level["failed"], level["error_samples"]) == (2, 0, [])
        assert level["output_throughput_tps"] > 0 and level["ttft_p50_ms"] > 0
    assert (report["framework"], report["model"], report["decode"]) == ("mlxrun", "embedded", "ragged")
    assert report["memory"]["peak"] > 0 and report["versions"]["mlx"] and report["machine"]["cores"]
    assert report["device"]["backend"] == "cpu"
    assert (report["kernel"], report["families"]) == ([], None) and report["load_check"]["decode"] == "ragged"
    shown = capsys.readouterr()
    assert "| 16 " in shown.out and "peak memory" in shown.out
    # A fast machine has computed the long prompt before the short one comes.
    assert report["interactive"] or "the long prompt was done before it came" in shown.err


def test_a_server_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    arguments = ("--set", f"model.path={tmp_path / 'nothing'}")
    with pytest.raises(MlxrunError, match="the server ended with exit code"), run_server(arguments, print):
        pass


def test_a_mistake_in_the_config_is_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "report", "--set", "scheduler.chunks=5"]) == 2
    assert "scheduler.chunks" in capsys.readouterr().err


KERNEL = {
    "family": "qwen3 8B",
    "dtype": "float16",
    "kernel_us": 61.2,
    "library_us": 90.4,
    "kernel_error": 2e-4,
    "library_error": 3e-4,
}
FAILED = {"family": "qwen3 8B", "dtype": "float16", "error": "RuntimeError: no [kernel]"}


def make_report(**changes: Any) -> dict[str, Any]:
    level = {"concurrency": 8, "output_throughput_tps": 1234.5, "ttft_p50_ms": 20.0, "ttft_p99_ms": None}
    report = {
        "model": "m",
        "settings": {"requests": 9},
        "concurrency_results": [level | {"itl_p50_ms": 1.25, "failed": 1}],
        "interactive": {"alone": 0.05, "behind": 0.3},
        "memory": {"peak": 2_000_000_000},
        "kernel": [],
        "families": None,
    }
    return report | changes


@pytest.mark.parametrize(
    ("changes", "wanted", "missing"),
    [
        ({}, "50 ms alone, 300 ms behind", "never"),
        ({"interactive": {}}, "was not measured", "alone"),
        ({"memory": None}, "50 ms alone", "peak memory"),
        ({}, "attention kernel: there is none for this device", "FAILED"),
        ({"kernel": [KERNEL]}, "qwen3 8B, float16: 61 us, MLX's own 90 us; error 2.0e-04", "FAILED"),
        ({"kernel": [FAILED]}, "float16: FAILED: RuntimeError: no [kernel]", "there is none"),
        ({"families": {"results": [], "skipped": "so"}}, "families: not checked: so", "answer as"),
    ],
)
def test_the_table_shows_what_was_measured(changes: dict[str, Any], wanted: str, missing: str) -> None:
    output = io.StringIO()
    print_machine_report(make_report(**changes), Console(file=output, width=200))
    text = output.getvalue()
    assert "1,234.5" in text and "20.0 ms" in text and re.search(r"\|\s+- \|", text)
    assert wanted in text and missing not in text


def test_the_levels_of_a_plan() -> None:
    assert ReportPlan((), 1, PromptSize(1, 1)).levels == (1, 8, 16)
