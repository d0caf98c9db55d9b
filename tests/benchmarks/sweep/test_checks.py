"""Requests through an engine, and when its answers count as the library's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.sweep import checks
from benchmarks.sweep.checks import CheckResult, FamilyChecks, make_request
from benchmarks.tiny.library_loop import answer_text
from benchmarks.tiny.random_models import write_text_model
from mlxrun.engine.scheduler.scheduler import Scheduler

PROMPTS = {"a": list(range(40)), "b": [65, 66], "d": [7, 8, 9]}


def make_checks(folder: Path) -> FamilyChecks:
    write_text_model("llama", folder / "model")
    requests = {key: make_request(key, ids) for key, ids in PROMPTS.items()}
    longer = {"c": make_request("c", [*PROMPTS["a"], 10, 11])}
    answers = {
        key: answer_text(folder / "model", request.prompt, checks.TOKENS)
        for key, request in (requests | longer).items()
    }
    return FamilyChecks(folder / "model", folder / "cache", requests, longer, answers)


def test_every_condition_is_checked_once(tmp_path: Path) -> None:
    results = list(make_checks(tmp_path).run())
    names = ["alone, chunks of 64", "together", "late join", "alone, chunks of 7", "disk"]
    names += ["alone, chunks of 1", "snapshot", "preemption"]
    assert [result.name for result in results] == names
    assert all(result.exact for result in results), results


def test_rows_are_preempted_and_snapshots_are_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conditions that the names promise do come about."""
    cached: list[int] = []
    preempted: list[str] = []
    run, preempt = checks.run_requests, Scheduler.preempt

    def watch_run(engine: Any, requests: Any) -> Any:
        found = run(engine, requests)
        cached.append(max(answer.cached for answer in found.values()))
        return found

    def watch_preempt(self: Any, state: Any) -> None:
        preempted.append(state.request.id)
        preempt(self, state)

    monkeypatch.setattr(checks, "run_requests", watch_run)
    monkeypatch.setattr(Scheduler, "preempt", watch_preempt)
    names = [result.name for result in make_checks(tmp_path).run()]
    assert names[-2:] == ["snapshot", "preemption"] and cached[-2] > 0 and preempted


@pytest.mark.parametrize(
    ("result", "exact"),
    [
        (CheckResult("x", 1e-5), True),
        (CheckResult("x", 1e-2), False),
        (CheckResult("x", float("inf")), False),
        (CheckResult("x", 0.0, "an error"), False),
    ],
)
def test_what_counts_as_exact(result: CheckResult, exact: bool) -> None:
    assert result.exact is exact


def test_the_sweep_compares_each_model_itself(tmp_path: Path) -> None:
    """Without processor files a tiny model has the digests of another, and so that one's kept verdict."""
    assert checks.make_config(tmp_path, 7).engine.load_check == "always"
