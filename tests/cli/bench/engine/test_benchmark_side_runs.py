"""A side of `mlxrun bench engine` that fails: what is kept, what is said, and what memory it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxrun.cli.bench.engine import benchmark
from mlxrun.cli.bench.engine.benchmark import BenchMeter, make_meter, measure_workload
from mlxrun.cli.bench.engine.workloads import make_workload
from mlxrun.cli.bench.models import open_model
from mlxrun.cli.main import main
from mlxrun.config.settings import CacheSettings, Config, ModelSettings
from mlxrun.core.errors import ConfigError, MlxrunError, RequestError
from tests.cli.bench.engine.test_benchmark import FakeContender

OOM = "[malloc] failed:\n out of memory"


class FailingContender(FakeContender):
    """Fails in its third step."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def step(self) -> Any:
        if self.now == 2.0:
            raise self._error
        return super().step()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Measures two workloads, three runs each; the n-th contender to be opened raises `errors[n]`, if any."""

    def run(errors: dict[int, BaseException]) -> tuple[int, dict[str, Any]]:
        opened: list[FakeContender] = []

        def open_one() -> FakeContender:
            at = len(opened)
            assert all(each.closed for each in opened)
            opened.append(FailingContender(errors[at]) if at in errors else FakeContender())
            return opened[-1]

        openers = {"mlxrun": open_one, "mlx-lm": open_one}
        monkeypatch.setattr(benchmark, "make_openers", lambda *_: openers)
        meter = BenchMeter(lambda: opened[-1].now, lambda _: 0, lambda: 0, lambda: 0)
        monkeypatch.setattr(benchmark, "make_meter", lambda: meter)
        path = tmp_path / "bench.json"
        args = ["--repeat", "3", "--scale", "0.01", "--workload", "single", "--workload", "few"]
        code = main(["bench", "engine", *args, "--json", str(path)])
        return code, json.loads(path.read_text()) if path.exists() else {}

    return run


def get_cells(output: str, measure: str) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in output.splitlines() if "|" in line]
    return [row[1:] for row in rows if row[0] == measure]


def test_a_peer_that_fails_loses_neither_its_runs_nor_anybody_elses(
    bench: Callable[..., tuple[int, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Contenders are opened as A B, B A, A: the third one is the peer's second run."""
    code, report = bench({2: RuntimeError(OOM)})
    assert code == 0
    single, few = report["workloads"]["single"], report["workloads"]["few"]
    assert [len(side["runs"]) for side in single["sides"].values()] == [3, 1]
    assert single["sides"]["mlx-lm"]["error"] == "RuntimeError: [malloc] failed: out of memory"
    assert "error" not in single["sides"]["mlxrun"]
    assert single["ratio"]["wall_s"] == 1.0 and single["same_tokens"] == 1.0
    assert [len(side["runs"]) for side in few["sides"].values()] == [3, 3]
    shown = capsys.readouterr()
    assert get_cells(shown.out, "runs") == [["3", "1, then FAILED", "-"]]
    line = "mlx-lm FAILED in run 2: RuntimeError: [malloc] failed: out of memory"
    assert f"single: {line}" in shown.out and "Traceback" not in shown.err and "bug" not in shown.err
    assert "single mlx-lm 2/3: FAILED: RuntimeError: [malloc] failed: out of memory" in shown.err


def test_a_peer_without_any_run_has_no_figures(
    bench: Callable[..., tuple[int, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = bench({1: RuntimeError(OOM)})
    part = report["workloads"]["single"]
    assert code == 0 and part["sides"]["mlx-lm"]["runs"] == [] and "same_tokens" not in part
    out = capsys.readouterr().out
    assert get_cells(out, "runs") == [["3", "FAILED", "-"]]
    assert get_cells(out, "whole workload")[0][1:] == ["-", "-"]


@pytest.mark.parametrize(
    ("error", "text", "bug"),
    [(RequestError("no room"), "no room", False), (TypeError("oops"), "TypeError: oops", True)],
)
def test_our_own_failure_is_the_exit_code_and_a_bug_has_its_traceback(
    error: Exception,
    text: str,
    bug: bool,
    bench: Callable[..., tuple[int, dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, report = bench({0: error})
    assert code == 1 and report["workloads"]["single"]["sides"]["mlxrun"]["error"] == text
    assert len(report["workloads"]["few"]["sides"]["mlxrun"]["runs"]) == 3
    shown = capsys.readouterr()
    assert f"single: mlxrun FAILED in run 1: {text}" in shown.out and ("Traceback" in shown.err) is bug


def test_an_interrupt_after_a_failure_keeps_it_and_its_own_exit_code(
    bench: Callable[..., tuple[int, dict[str, Any]]],
) -> None:
    code, report = bench({0: RequestError("no room"), 1: KeyboardInterrupt()})
    assert code == 130 and report["incomplete"]
    assert report["workloads"] == {
        "single": report["workloads"]["single"]
        | {"sides": {"mlxrun": {"runs": [], "median": {}, "error": "no room"}}}
    }


def test_wrong_settings_end_the_benchmark(bench: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    assert bench({0: ConfigError("model.dtype: no")}) == (2, {})


def test_a_failed_engine_leaves_no_memory_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines fail in the middle of a real run; the bytes in use are what they were before."""
    from mlx_lm.generate import BatchGenerator

    from mlxrun.cli.bench.engine.mlx_lm_contender import MlxLmContender
    from mlxrun.cli.bench.engine.mlxrun_contender import MlxrunContender
    from mlxrun.engine.engine import Engine

    meter, before, held = make_meter(), [], []

    def fail(engine: Any) -> Any:  # the traceback refers to the engine, as that of a real failure does
        for _ in range(5):
            step(engine)
        held.append(meter.read_memory())
        raise MlxrunError("fails")

    with open_model("tiny") as model:
        config = Config(model=ModelSettings(path=str(model.folder)), cache=CacheSettings(backend="none"))
        openers = {
            "mlxrun": lambda: MlxrunContender.open(config),
            "mlx-lm": lambda: MlxLmContender.open(model.folder),
        }
        for name, kind, method in (("mlxrun", Engine, "step"), ("mlx-lm", BatchGenerator, "next")):
            step = getattr(kind, method)
            monkeypatch.setattr(kind, method, fail)
            before.append(meter.reset_peak(True))
            sides = measure_workload(make_workload("few", 0.1, 100), {name: openers[name]}, 1, meter, str)
            assert sides[name].error == "fails"
            assert held[-1] > before[-1] + 4_000_000  # the weights alone
            assert meter.read_memory() <= before[-1] + 100_000
