"""What doctor finds out about the machine and the load check; the command is in tests/cli."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import pytest

from mlxrun.config.settings import Config
from mlxrun.model import doctor
from mlxrun.model.hooks.weight_form import WeightForm
from mlxrun.model.load_check.report import ComparedWindow, LoadCheck, LoadCheckReport
from mlxrun.model.machine.blas import describe_blas
from mlxrun.model.run.chunk_grouping import PrefillSharing
from mlxrun.model.run.compute_methods import ComputeMethods


def test_the_reference_blas_is_noted_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    slow, fast = doctor.check_blas(None, 7.5), doctor.check_blas("/lib/libopenblas.so.0", 240.0)
    assert slow.level == "note" and "libopenblas0-pthread" in slow.advice and "8 GFLOP/s" in slow.value
    assert fast.level == "ok" and not fast.advice and fast.facts["gflops"] == 240.0
    monkeypatch.setattr(sys, "platform", "darwin")
    assert doctor.check_blas(None, 900.0).level == "ok"


def test_the_load_check_says_what_passed_and_what_is_used() -> None:
    """What fails the load check is not used, and doctor says so."""
    checks = (
        LoadCheck("decode ragged", False, error="TypeError: no array offset"),
        LoadCheck("decode grouped", True, 1.5e-6),
        LoadCheck("prefill padded", False, 5.5, limit=0.005, instead="equal lengths only"),
    )
    found = list(
        doctor.report_load_check(LoadCheckReport(ComputeMethods("grouped", PrefillSharing(8, 0)), checks))
    )
    assert [f.level for f in found] == ["note", "ok", "note", "ok"]
    assert "TypeError" in found[0].value and "1.5e-06" in found[1].value and found[2].facts["limit"] == 0.005
    assert found[0].advice == "not used for this model"
    assert found[2].advice == "not used for this model; instead: equal lengths only"
    methods = {
        "decode": "grouped",
        "attention": "engine",
        "fused_prompts": False,
        "prefill_rows": 8,
        "padded": 0,
    }
    assert found[-1].facts == methods | {"library_chunks": False, "snapshots": True}
    (alone,) = doctor.report_load_check(LoadCheckReport(ComputeMethods("row_by_row"), ()))
    assert alone.level == "note" and "one by one" in alone.advice


def test_what_was_reduced_refused_or_switched_off_is_said() -> None:
    methods = ComputeMethods().split_as_library()
    windows = (ComparedWindow(4, 4), ComparedWindow(4096, 8))
    notes = {"images": "refused: other positions", "long_rows": "ValueError: 30 tokens"}
    report = LoadCheckReport(
        replace(methods, attention="library"), (), windows=windows, seconds=1.25, **notes
    )
    small, large, long, images, took, used = doctor.report_load_check(report)
    assert (long.level, long.value, took.value) == ("note", "ValueError: 30 tokens", "1.2 s")
    assert small.value == "4 tokens, crossed" and large.facts == {"size": 4096, "compared": 8}
    assert large.value == "4,096 tokens, crossed as a window of 8, to which the checks reduce it"
    assert (images.level, images.value) == ("note", "refused: other positions")
    assert used.value.endswith(
        "the library's attention, prompts split as the library splits them, no prefix cache"
    )


def test_a_verdict_that_was_kept_is_shown_with_its_age() -> None:
    report = LoadCheckReport(ComputeMethods(), (), seconds=12.72, compared=time.time() - 9000)
    computed, kept = (
        next(each for each in doctor.report_load_check(replace(report, kept=kept)) if each.name == "time")
        for kept in (False, True)
    )
    assert computed.value == "12.7 s"
    assert kept.value == "12.7 s at an earlier start, 2.5 hours ago"
    assert (computed.facts["kept"], kept.facts["kept"]) == (False, True) and 9000 <= kept.facts["age"] < 9600


def test_memory_is_told_with_its_default_limit() -> None:
    finding = doctor.check_memory({})
    assert finding.facts["total"] > finding.facts["free"] >= 0  # which a pretended Mac does not know
    assert 0 <= finding.facts["limit"] <= finding.facts["total"] and "total" in finding.value
    assert bool(finding.facts["limit"]) == bool(finding.facts["free"])


def test_without_a_compiler_kernels_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    finding = doctor.check_compiler()
    assert finding.level == "note" and "install g++" in finding.advice
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/bin/g++")
    assert doctor.check_compiler().level == "ok"


def test_the_rate_of_the_matmul_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MATMUL_SIZE", 32)
    monkeypatch.setattr(doctor, "MATMUL_SECONDS", 0.0)
    assert doctor.measure_matmul() > 0


def test_threads_that_wait_for_each_other_are_a_note() -> None:
    busy, quiet = doctor.check_blas_threads(2, 0.014, 0.0003), doctor.check_blas_threads(2, 0.0002, 0.0003)
    assert busy.level == "note" and "engines take fewer threads" in busy.advice
    assert busy.value == "a product of 8 rows takes 14.00 ms with 2 threads and 0.30 ms with one"
    assert quiet.level == "ok" and not quiet.advice


def test_threads_are_measured_and_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time is of one thread, whatever the process has."""
    monkeypatch.setattr(doctor, "MATMUL_SECONDS", 0.0)
    threads: list[int | None] = []
    median = doctor.statistics.median

    def watched(times: list[float]) -> float:
        threads.append(describe_blas().get("blas_threads"))
        return median(times)

    before = describe_blas().get("blas_threads")
    monkeypatch.setattr(doctor.statistics, "median", watched)
    assert min(doctor.measure_threads()) > 0
    assert threads == [before, before and 1]
    assert describe_blas().get("blas_threads") == before


@pytest.mark.parametrize(("threads", "fixed"), [(2, False), (2, True), (1, False), (None, False)])
def test_only_threads_that_nobody_fixed_are_measured(
    monkeypatch: pytest.MonkeyPatch, threads: int | None, fixed: bool
) -> None:
    monkeypatch.setattr(doctor, "MATMUL_SECONDS", 0.0)
    facts = {"backend": "cpu", "name": "x"}
    if threads is not None:
        facts |= {"blas_threads": threads, "blas_threads_fixed": fixed}
    monkeypatch.setattr(doctor, "describe_device", lambda settings: facts)
    found = [finding.name for finding in doctor.check_machine(Config())]
    assert ("BLAS threads" in found) is (threads == 2 and not fixed)


def test_weights_without_a_use_are_a_note() -> None:
    names = ("mtp.fc.weight", "mtp.norm.weight", "score.weight", "vision_tower.x.weight")
    (found,) = doctor.report_weights(WeightForm(unused=names))
    assert (found.area, found.name, found.level) == ("weights", "unused", "note")
    assert found.value == "4: mtp.fc.weight, mtp.norm.weight, score.weight, and more"
    assert found.facts == {"names": names}
    assert list(doctor.report_weights(WeightForm())) == []
