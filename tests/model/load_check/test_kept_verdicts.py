"""Verdicts are read as they were written, or not at all."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mlxrun.core import cache_home
from mlxrun.model.hooks.quantized_layers import MethodTable
from mlxrun.model.hooks.weight_form import WeightForm
from mlxrun.model.kv.ragged.quantized_buffer import KVQuantization
from mlxrun.model.load_check import kept_verdicts
from mlxrun.model.load_check.kept_verdicts import KeptVerdict, VerdictFile, describe_form
from mlxrun.model.load_check.report import ComparedWindow, LoadCheck, LoadCheckReport
from mlxrun.model.run.chunk_grouping import PrefillSharing
from mlxrun.model.run.compute_methods import ComputeMethods

KEY = "ab" * 32
METHODS = ComputeMethods(
    decode="grouped",
    sharing=PrefillSharing(3, 7, merge_chunks=True, tails=True, max_shared=99),
    fixed_width=5,
    narrow_widths=(1, 3),
    snapshots=False,
    quantization=KVQuantization(8, 64, 3),
    draft_problem="they differ",
    attention="library",
)
CHECKS = (
    LoadCheck("decode ragged", False, 0.7, None, 0.005, "one forward for rows of similar length"),
    LoadCheck("decode grouped", True, 1e-6, None, 0.005),
    LoadCheck("snapshot", False, None, "IndexError: no", 0.005, "no prefix cache"),
)


def make_verdict() -> KeptVerdict:
    report = LoadCheckReport(
        METHODS,
        CHECKS,
        windows=(ComparedWindow(128, 8),),
        long_rows="too long",
        images="refused: they differ",
        refused={"images": "they differ", "videos": ""},
        features_cached=False,
        seconds=12.5,
        compared=time.time(),
        peak=77,
    )
    return KeptVerdict("the form", {"held": {1: 0.5, 32: 0.25}, "library": {1: 0.75}}, report)


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_home, "KEPT_DAYS", 7.0)


def test_a_verdict_is_read_as_it_was_written(tmp_path: Path) -> None:
    file, verdict = VerdictFile(KEY, tmp_path), make_verdict()
    assert file.read() is None
    file.write(verdict)
    assert file.read() == replace(verdict, report=replace(verdict.report, kept=True))
    assert VerdictFile("cd" * 32, tmp_path).read() is None
    file.remove()
    file.remove()
    assert file.read() is None


def change_digit(content: bytes) -> bytes:
    return content.replace(b"12.5", b"12.6")


def make_future(content: bytes) -> bytes:
    return json.dumps(json.loads(content) | {"format": kept_verdicts.FORMAT + 1}).encode()


def change_shape(content: bytes) -> bytes:
    """With the right checksum, as another program might write it."""
    body = json.dumps({"key": KEY, "form": "", "seconds": {}, "report": {"methods": {"decode": "ragged"}}})
    outer = {"format": kept_verdicts.FORMAT, "digest": kept_verdicts._digest(body), "body": body}
    return json.dumps(outer).encode()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "without its end": lambda content: content[:-1],
    "changed": change_digit,
    "of a future version": make_future,
    "of another shape": change_shape,
    "not text": lambda content: b"\xff\xfe" * 50,
    "not an object": lambda content: b"[1, 2]",
    "deep": lambda content: b"[" * 100_000,
    "without fields": lambda content: b"{}",
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_cannot_be_used_is_ignored_with_one_line(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = VerdictFile(KEY, tmp_path)
    file.write(make_verdict())
    (path,) = tmp_path.iterdir()
    path.write_bytes(DAMAGES[name](path.read_bytes()))
    with caplog.at_level(logging.INFO):
        assert file.read() is None
    (record,) = caplog.records
    assert path.name in record.getMessage() and "is ignored" in record.getMessage()
    file.write(make_verdict())
    assert file.read() is not None


def test_a_verdict_under_the_name_of_another_key_is_ignored(tmp_path: Path) -> None:
    VerdictFile(KEY, tmp_path).write(make_verdict())
    (path,) = tmp_path.iterdir()
    path.rename(tmp_path / f"{'cd' * 32}.json")
    assert VerdictFile("cd" * 32, tmp_path).read() is None


@pytest.mark.parametrize("days", [-8, 1])
def test_old_verdicts_and_those_of_the_future_are_not_used(days: float, tmp_path: Path) -> None:
    file, verdict = VerdictFile(KEY, tmp_path), make_verdict()
    when = time.time() + days * kept_verdicts.DAY
    file.write(replace(verdict, report=replace(verdict.report, compared=when)))
    assert file.read() is None


def test_old_files_are_removed(tmp_path: Path) -> None:
    VerdictFile(KEY, tmp_path).write(make_verdict())
    (old,) = tmp_path.iterdir()
    before = time.time() - 8 * kept_verdicts.DAY
    os.utime(old, (before, before))
    VerdictFile("cd" * 32, tmp_path).write(make_verdict())
    assert [path.name for path in tmp_path.iterdir()] == [f"{'cd' * 32}.json"]


def test_a_folder_that_cannot_be_written_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    file = VerdictFile(KEY, tmp_path / "file")
    file.write(make_verdict())
    assert file.read() is None


def test_the_form_has_no_measured_times() -> None:
    form = WeightForm(("affine 4 bit",), held=True, seconds={"held": {1: 0.5}}, reason="measured")
    assert (
        describe_form(form)
        == describe_form(replace(form, seconds={}, reason=""))
        != describe_form(WeightForm())
    )
    other = replace(form, table=MethodTable(((4, "library"), (8, "dequantized"))))
    assert len({describe_form(each) for each in (form, replace(form, held=False), other)}) == 3
