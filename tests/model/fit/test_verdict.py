"""The verdict says what admission does, and what would fit instead."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from benchmarks.embeddings import write_random_encoder
from mlxrun.config.settings import Config, ModelSettings, SchedulerSettings
from mlxrun.core.errors import ConfigError
from mlxrun.engine.build import build_engine
from mlxrun.model.fit import verdict
from mlxrun.model.fit.verdict import FitReport, WantedRows, judge_model, limit_memory
from mlxrun.model.machine.decisions import FREE_SHARE
from tests.helpers.model_fixtures import Zoo


def judge(folder: Path, rows: int | None = None, tokens: int | None = None, **scheduler: int) -> FitReport:
    config = Config(model=ModelSettings(path=str(folder)), scheduler=SchedulerSettings(**scheduler))
    return judge_model(config, WantedRows(rows, tokens), "mine")


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_vl"])
def test_the_sum_is_that_of_the_engine(zoo: Zoo, family: str, caplog: pytest.LogCaptureFixture) -> None:
    """The same config gives the engine the same budget, so the same rows run. Its log says how many."""
    caplog.set_level(logging.INFO)
    folder = zoo.vision(family) if family == "qwen3_vl" else zoo.text(family)
    report = judge(folder, 5, 700, memory_limit=10**9)
    config = Config(
        model=ModelSettings(path=str(folder)),
        scheduler=SchedulerSettings(max_running=5, memory_limit=10**9),
    )
    budget = build_engine(config).scheduler.token_budget
    memory = budget._memory
    assert report.needed == memory.compute_rows_bytes(5, 700, budget.min_chunk)
    assert (report.limit, report.images, report.features) == (memory.limit, memory.images, memory.features)
    assert (report.features > 0) == (family == "qwen3_vl") and report.shortage is None
    assert report.fits and report.verdict.startswith("fits: 5 rows of 700 tokens at a time; ")
    rows = memory.find_max_rows(4096, 5, budget.min_chunk)
    assert f"that may be used without rows; {rows} of 5 rows of 4096 tokens fit at a time" in caplog.text


@pytest.mark.parametrize(("family", "known"), [("llama", True), ("qwen3_vl", True), ("idefics3", False)])
def test_the_encoding_of_an_image_is_known_or_left_open(zoo: Zoo, family: str, known: bool) -> None:
    """idefics3's tower looks at its pixels, to leave out empty ones."""
    report = judge(zoo.text(family) if family == "llama" else zoo.vision(family), 1, 100)
    assert (report.encoding is not None) == known
    assert family == "llama" or not known or report.encoding


def test_what_does_not_fit_is_said_with_what_would(zoo: Zoo) -> None:
    """Each way that is named fits, and a little more does not."""
    folder = zoo.text("llama")
    report = judge(folder, 16, 4000, memory_limit=40_000_000)
    assert not report.fits and report.verdict.startswith("does not fit: 16 rows of 4,000 tokens need ")
    assert report.fitting_tokens == 4000
    rows, shorter = report.fitting_rows, int(report.verdict.split("(--tokens ")[1].split(")")[0])
    assert f"(--rows {rows})" in report.verdict and 1 <= rows < 16
    assert judge(folder, 16, shorter, memory_limit=40_000_000).fits
    assert not judge(folder, 16, shorter + 256, memory_limit=40_000_000).fits


def test_what_nobody_asked_for_is_reduced(zoo: Zoo) -> None:
    folder = zoo.text("llama")
    report = judge(folder, memory_limit=40_000_000)
    assert report.fits and report.rows < 32 and report.tokens == 4096
    assert "further requests wait" in report.verdict
    tight = judge(folder, memory_limit=9_000_000)
    assert tight.fits and tight.rows == 1 and tight.tokens < 4096
    assert "the context of 4,096 does not fit" in tight.verdict
    assert not judge(folder, tokens=4096, memory_limit=9_000_000).fits


def test_a_model_that_would_be_refused_does_not_fit(zoo: Zoo) -> None:
    report = judge(zoo.text("llama"), memory_limit=100_000)
    assert not report.fits and report.fitting_rows == 0
    assert "scheduler.memory_limit: weights" in report.verdict


def test_another_machine_has_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "get_backend", lambda: "cpu")
    assert limit_memory(Config(), 10**10).scheduler.memory_limit == int(10**10 * FREE_SHARE)
    given = Config(scheduler=SchedulerSettings(memory_limit=5))
    assert limit_memory(given, 10**10).scheduler.memory_limit == 5
    monkeypatch.setattr(verdict, "get_backend", lambda: "cuda")
    assert limit_memory(Config(), 10**10).scheduler.memory_limit == 10**10


def test_models_that_only_give_vectors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mine only gives vectors or scores"):
        judge(write_random_encoder(tmp_path / "encoder", 0))
