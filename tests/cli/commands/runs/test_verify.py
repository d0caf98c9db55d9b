"""`mlxrun verify` as it is typed: what it prints, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.cli.main import main
from tests.helpers.batch_fakes import MIXED, FakeClient, chat, chats, edit_line, write_job
from tests.helpers.tokenizers import FakeModelInfo

pytestmark = pytest.mark.thorough

Prints = pytest.CaptureFixture[str]


def run_job(folder: Path, *flags: str, lines: list[Any] | None = None) -> Path:
    job = write_job(folder, lines or chats(30))
    assert main(["batch", str(job), *flags]) in (0, 1)
    return job


def test_a_run_is_verified(tmp_path: Path, fake_engine: list[Any], capsys: Prints) -> None:
    """By its job, its output, its run folder, or the folder around it; what differs comes first."""
    job = run_job(tmp_path, lines=[*chats(30), *MIXED])
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    for path in (job, tmp_path / "job.out.jsonl", tmp_path / "job.out.jsonl.run"):
        assert main(["verify", str(path), "--seed", "3"]) == 0
        out, err = capsys.readouterr()
        assert err.startswith(f"{path}: checks 37 records, then computes 20 of 32 answers again, one by one")
        assert f"{path}: reading the model's files, for 20 answers\n" in err
        assert out.splitlines() == [
            f"{path}: versions, device and BLAS are those of the run",
            f"{path}: the digests of all records, of the output and of the job file are right",
            f"{path}: the model's files and its settings are those of the run",
            f"{path}: 20 lines of 37 run again, alone and without a cache: 20 equal, 0 different",
        ]
    assert main(["verify", str(tmp_path), "--all"]) == 0
    assert ": 32 lines of 37 run again" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in files} == files
    assert {config.cache.backend for config in fake_engine[1:]} == {"none"}
    assert {config.scheduler.max_running for config in fake_engine[1:]} == {1}


@pytest.mark.parametrize("command", ["verify", "replay"])
def test_a_model_is_known_by_its_files_and_not_by_its_name(
    tmp_path: Path, fake_engine: list[Any], capsys: Prints, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Elsewhere its folder has another name, and lines of the job name it as it was called."""
    job = run_job(tmp_path, lines=[*chats(3), chat("named", "hello", model="fake")])
    moved = FakeModelInfo(name="moved", names=("moved", "alias"), vision=True)
    monkeypatch.setattr("mlxrun.model.load.model_info.load_model_info", lambda settings, **_: moved)
    capsys.readouterr()
    assert main([command, str(job), "--model", str(tmp_path / "moved")]) == 0
    out = capsys.readouterr().out
    assert "4 equal, 0 different" in out or "4 of 4 records equal" in out


def pretend_reproducible(out: Path) -> None:
    """Change a setting in the manifest alone."""
    manifest = out.with_name("job.out.jsonl.run") / "manifest.json"
    text = manifest.read_text()
    assert text.count('"reproducible": false') == 2
    manifest.write_text(text.replace('"reproducible": false', '"reproducible": true'))


@pytest.mark.parametrize(
    "damage, says",
    [
        (
            lambda out: edit_line(out, 4, lambda line: line.replace(b"say", b"say ", 1)),
            "out.jsonl:5: line 'line",
        ),
        (
            lambda out: edit_line(out, 0, lambda line: line.replace(b'"score": 1', b'"score": 0')),
            "out.jsonl:1: ",
        ),
        (lambda out: edit_line(out, 29, lambda line: b""), "has no record here, but journal.jsonl names it"),
        (lambda out: out.write_bytes(out.read_bytes()[:-1]), "out.jsonl:30: line 'line"),
        (
            lambda out: edit_line(out.with_name("job.jsonl"), 2, lambda line: line.replace(b"say", b"SAY")),
            "job",
        ),
        (pretend_reproducible, "was written with other settings than manifest.json records"),
    ],
)
def test_one_changed_byte_is_found(
    tmp_path: Path, fake_engine: list[Any], capsys: Prints, damage: Callable[[Path], object], says: str
) -> None:
    """The line is named, and nothing is run."""
    run_job(tmp_path)
    damage(tmp_path / "job.out.jsonl")
    capsys.readouterr()
    code = main(["verify", str(tmp_path / "job.out.jsonl")])
    printed = capsys.readouterr()
    assert code == 1 and says in printed.out and len(fake_engine) == 1
    assert "no line was run again" in printed.out


@pytest.mark.parametrize(
    "reproducible, strict, code", [(True, False, 1), (False, False, 0), (False, True, 1)]
)
def test_lines_that_differ(
    tmp_path: Path,
    fake_engine: list[Any],
    capsys: Prints,
    monkeypatch: pytest.MonkeyPatch,
    reproducible: bool,
    strict: bool,
    code: int,
) -> None:
    """Only a reproducible run promises equal bytes; others are reported."""
    flags = ["--set", "engine.reproducible=true"] if reproducible else []
    job = run_job(tmp_path, *flags, lines=chats(5))
    answer = FakeClient.answer_body

    def answer_otherwise(self: FakeClient, request: Any, text: str) -> Any:
        most = 4 if text == "say 3" else request.params.max_tokens
        return answer(self, replace(request, params=replace(request.params, max_tokens=most)), text)

    monkeypatch.setattr(FakeClient, "answer_body", answer_otherwise)
    capsys.readouterr()
    assert main(["verify", str(job), *(["--strict"] if strict else [])]) == code
    out = capsys.readouterr().out
    assert "5 lines of 5 run again, alone and without a cache: 4 equal, 1 different" in out
    assert "line 'line-3' (line 4 of the job): choices[0].message.content differs from character 4 on" in out
    assert ("without engine.reproducible" in out) is not reproducible


def test_what_cannot_be_verified(
    tmp_path: Path, fake_engine: list[Any], capsys: Prints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No run, several options, or another model: exit code 2."""
    assert main(["verify", str(tmp_path / "none.jsonl")]) == 2
    job = run_job(tmp_path)
    assert main(["verify", str(job), "--all", "--sample", "3"]) == 2
    assert "give one of --sample and --all" in capsys.readouterr().err
    other = FakeModelInfo(digests={"model": "x", "tokenizer": "y", "template": "z"}, vision=True)
    monkeypatch.setattr("mlxrun.model.load.model_info.load_model_info", lambda settings, **_: other)
    assert main(["verify", str(job)]) == 2
    assert "its lines cannot be run again here" in capsys.readouterr().err


def test_a_run_without_answers(tmp_path: Path, fake_engine: list[Any], capsys: Prints) -> None:
    job = run_job(tmp_path, lines=["not JSON"])
    assert main(["verify", str(job)]) == 0
    out = capsys.readouterr().out
    assert (
        "of 1 record and of the job file are right; no line was answered, so that there is no output\n" in out
    )
    assert "no line was answered, so none was run again" in out and "not finished" not in out


def test_an_unfinished_run_is_said_to_be_one(tmp_path: Path, fake_engine: list[Any], capsys: Prints) -> None:
    job = run_job(tmp_path, "--limit", "4")
    assert main(["verify", str(job)]) == 0
    out = capsys.readouterr().out
    assert f"{job}: the run is unfinished: 4 of 30 lines are finished" in out
    assert "4 lines of 30 run again" in out


def test_a_killed_run_is_said_to_be_unfinished(
    tmp_path: Path, fake_engine: list[Any], capsys: Prints
) -> None:
    """Its manifest is that of its start, and has no digest of the output."""
    job = write_job(tmp_path, chats(8))
    assert main(["batch", str(job), "--limit", "5"]) == 0
    path = tmp_path / "job.out.jsonl.run/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["counts"] |= {"done": 0, "failed": 0}
    manifest["output"]["sha256"] = manifest["runs"][-1]["ended"] = None
    path.write_text(json.dumps(manifest))
    capsys.readouterr()
    assert main(["verify", str(job)]) == 0
    assert capsys.readouterr().out.splitlines()[1:3] == [
        f"{job}: the run is unfinished: 5 of 8 lines are finished",
        f"{job}: the digests of 5 records and of the job file are right; the output is not finished and has "
        "none",
    ]
    assert main(["export", str(job), "--format", "inspect"]) == 2
    assert "the run is unfinished, with 5 of 8 lines done" in capsys.readouterr().err


def test_runs_with_equal_engines_share_one(tmp_path: Path, fake_engine: list[Any]) -> None:
    """The cells of a suite, for instance; one with other settings of the engine comes after them."""
    for name, flags in (("a", ()), ("b", ("--set", "model.dtype=float32")), ("c", ())):
        (tmp_path / name).mkdir()
        run_job(tmp_path / name, *flags)
    before = len(fake_engine)
    assert main(["verify", str(tmp_path), "--sample", "2"]) == 0
    assert [config.model.dtype for config in fake_engine[before:]] == ["auto", "float32"]
