"""A family that ends its process, or fails to answer, is a result; the next one is checked."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import pytest

from benchmarks.sweep import sweep
from benchmarks.sweep.family import FamilyResult
from benchmarks.sweep.left_out import LEFT_OUT, NOT_HEARD, list_audio_packages, list_vision_packages
from benchmarks.tiny.omni_families import FAMILIES
from benchmarks.tiny.vision_families import VISION


def send_or_die(sender: Connection, kind: str, family: str) -> None:
    """Stands for the check of a family; found by name in the process that runs it."""
    if family == "dies":
        os._exit(3)
    if family == "hangs":
        time.sleep(3600)
    sender.send(FamilyResult(kind, family, "exact"))


def test_a_process_that_dies_or_hangs_is_one_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "send_result", send_or_die)
    monkeypatch.setattr(sweep, "PRELOADED", [])
    families = [("text", "dies"), ("text", "good")]
    for jobs in (1, 2):
        results = list(sweep.run_sweep(families, jobs))
        assert [result.status for result in results] == ["unbuilt", "exact"]
        assert "status 3" in results[0].why
    assert list(sweep.run_sweep([])) == []


def test_a_family_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "send_result", send_or_die)
    monkeypatch.setattr(sweep, "PRELOADED", [])
    monkeypatch.setattr(sweep, "SECONDS", 0)
    (result,) = sweep.run_sweep([("text", "hangs")])
    assert result.status == "unbuilt" and "no result in 0 s" in result.why
    assert not multiprocessing.active_children()


def test_the_families_are_those_of_the_libraries() -> None:
    families = sweep.list_families()
    assert {("text", "llama"), ("text", "plamo3"), ("vision", "qwen3_vl"), ("vision", "llava")} <= set(
        families
    )
    assert len(families) == len(set(families)) > 110


def test_every_vision_package_is_checked_or_left_out_with_a_reason() -> None:
    """A new version of the library may bring more."""
    left_out = [family for families in LEFT_OUT.values() for family in families]
    assert set(list_vision_packages()) <= {*VISION, *left_out}
    assert not {*VISION} & {*left_out} and len(left_out) == len({*left_out})
    for family in left_out:
        assert importlib.util.find_spec(f"mlx_vlm.models.{family}") is not None, family


def test_every_family_that_hears_is_checked_or_left_out_with_a_reason() -> None:
    heard = set(list_audio_packages()) & VISION.keys()
    assert heard <= {*FAMILIES, *NOT_HEARD} and not FAMILIES.keys() & NOT_HEARD.keys()
    assert {*FAMILIES, *NOT_HEARD} <= VISION.keys()
