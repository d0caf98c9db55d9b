"""`mlxrun bench report`: a real server of the embedded model, and servers that do not start."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mlxrun.cli.bench.serve import machine_report
from mlxrun.cli.bench.serve.benchmark import KINDS, MEASURES
from mlxrun.cli.bench.serve.machine_report import ReportPlan, print_machine_report, run_server
from mlxrun.cli.bench.serve.streaming_client import Target
from mlxrun.cli.bench.serve.workloads import PromptSize, RoundResult, ServePlan
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
    assert (report["error"], report["stage"]) == (None, None)
    shown = capsys.readouterr()
    assert re.findall(r"^(\d)/6 ", shown.err, re.MULTILINE) == list("123456")
    assert "| 16 " in shown.out and "peak memory" in shown.out
    # A fast machine has computed the long prompt before the short one comes.
    assert report["interactive"] or "the long prompt was done before it came" in shown.err


def test_a_server_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    arguments = ("--set", f"model.path={tmp_path / 'nothing'}")
    with pytest.raises(MlxrunError, match="the server ended with exit code"), run_server(arguments):
        pass


def test_a_config_with_keys_is_refused_before_a_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SESAME", "sesame-open-up")
    path = tmp_path / "prod.yaml"
    path.write_text("server:\n  api_keys: {me: '${SESAME}'}\n")
    assert main(["bench", "report", "-c", str(path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"mlxrun: {path}:2:13: server.api_keys: `mlxrun bench report` can"
    )


@pytest.mark.slow
def test_the_server_is_no_server_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`mlxrun ps` does not list it, so a bare `mlxrun stop` leaves it alone."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with run_server(("--set", "log.level=warning")):
        assert main(["ps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["servers"] == []


MORTAL = """
import http.server, json, os, sys
STATUS = dict.fromkeys(("config_hash", "device", "memory", "load_check", "power"))
STATUS |= {"model": {"name": "m"}, "versions": {"mlx": "1"}}
class Mortal(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(STATUS).encode())
    def do_POST(self):
        os._exit(7)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Mortal).serve_forever()
"""


def test_a_server_that_dies_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what was known until then, and without advice that the command cannot take."""
    monkeypatch.setattr(machine_report, "MAIN", MORTAL)
    out = tmp_path / "report.json"
    assert main(["bench", "report", "--json", str(out)]) == 3
    report, shown = json.loads(out.read_text()), capsys.readouterr()
    assert report["error"] == "the server ended with exit code 7; its log says why"
    assert report["stage"] == "32 chats, 1 at a time" and report["model"] == "m"
    assert report["versions"]["mlx"] == "1" and report["machine"]["cores"]
    assert f"mlxrun: {report['error']}" in shown.err and "--model" not in shown.err
    assert "not finished; the stage was: 32 chats, 1 at a time" in shown.out


def test_what_was_measured_before_an_interruption_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, first = tmp_path / "report.json", make_report()["concurrency_results"][0]

    def measure(plan: ReportPlan, target: Target, level: int, say: object) -> dict[str, Any]:
        assert json.loads(out.read_text())["error"] == "interrupted"  # if it were killed now
        if level > 1:
            raise KeyboardInterrupt
        return first

    monkeypatch.setattr(machine_report, "MAIN", MORTAL)
    monkeypatch.setattr(machine_report, "measure_level", measure)
    assert main(["bench", "report", "--json", str(out)]) == 130
    report = json.loads(out.read_text())
    assert (report["error"], report["stage"]) == ("interrupted", "32 chats, 8 at a time")
    assert report["concurrency_results"] == [first] and report["kernel"] is None
    assert "1,234.5" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "nowhere" / "report.json"
    assert main(["bench", "report", "--json", str(out)]) == 2
    shown = capsys.readouterr().err
    assert f"--json {out}: cannot be written" in shown and "1/7" not in shown


def test_only_as_many_requests_warm_up_as_run_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their times are not in the report."""
    sent: list[int] = []

    async def run_round(target: Target, plan: ServePlan, seed: str) -> RoundResult:
        sent.append(plan.requests)
        return RoundResult(dict.fromkeys(MEASURES, 1.0), ())

    monkeypatch.setitem(KINDS, "chat", replace(KINDS["chat"], run_round=run_round))
    target, plan = Target("mlxrun", "http://127.0.0.1:9/v1", "m"), ReportPlan((), 20, PromptSize(1, 1))
    for level in (8, 40):
        machine_report.measure_level(plan, target, level, print)
    assert sent == [8, 20, 20, 20]


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
        "error": None,
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
        (
            {"error": "so", "stage": "stage 5", "interactive": {}},
            "the stage was: stage 5",
            "was not measured",
        ),
        ({"error": "so", "stage": "stage 5", "kernel": None}, "the stage was: stage 5", "attention kernel"),
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
