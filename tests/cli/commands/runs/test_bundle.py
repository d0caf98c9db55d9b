"""`mlxrun bundle` as it is typed, and `verify` and `replay` of what it writes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.cli.main import main
from tests.helpers.batch_fakes import MIXED, FakeClient, by_id, chat, chats, write_job
from tests.helpers.suite_files import CAPITALS, write_suite

pytestmark = pytest.mark.thorough

RUNS = (("plain", 3), ("trusting", 4))
Prints = pytest.CaptureFixture[str]


def make_bundle(folder: Path, lines: list[Any] | None = None) -> Path:
    """The bundle of a run of which nothing else is left."""
    (folder / "here").mkdir()
    job = write_job(folder / "here", lines or [*chats(6), *MIXED[:2]])
    assert main(["batch", str(job)]) in (0, 1)
    path = folder / "there" / "run.tar.gz"
    path.parent.mkdir()
    assert main(["bundle", str(job), "-o", str(path)]) == 0
    shutil.rmtree(folder / "here")
    return path


def test_a_bundle_is_verified_and_replayed(tmp_path: Path, fake_engine: list[Any], capsys: Prints) -> None:
    path = make_bundle(tmp_path)
    assert capsys.readouterr().out.splitlines()[-1] == str(path)
    assert main(["verify", str(path), "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{path}: versions, device and BLAS are those of the run"
    assert lines[-1].endswith("7 lines of 8 run again, alone and without a cache: 7 equal, 0 different")
    assert list(path.parent.iterdir()) == [path]
    assert main(["replay", str(path)]) == 0
    again = path.parent / "run/files/job.replay.out.jsonl"
    assert capsys.readouterr().out.splitlines()[-1] == f"8 of 8 records equal, byte for byte: {again}"
    assert by_id(again) == by_id(path.parent / "run/files/job.out.jsonl")
    assert main(["replay", str(path)]) == 2
    assert "is complete already; --fresh runs it again" in capsys.readouterr().err


@pytest.mark.parametrize("command, code", [("verify", 0), ("replay", 1)])
def test_other_answers_are_found(
    tmp_path: Path,
    fake_engine: list[Any],
    capsys: Prints,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    code: int,
) -> None:
    """The twin: an engine that answers shortly elsewhere. Runs without engine.reproducible may differ."""
    path, answer = make_bundle(tmp_path, chats(6)), FakeClient.answer_body

    def answer_shortly(self: FakeClient, request: Any, text: str) -> Any:
        return answer(self, replace(request, params=replace(request.params, max_tokens=4)), text)

    monkeypatch.setattr(FakeClient, "answer_body", answer_shortly)
    assert main([command, str(path)]) == code
    out = capsys.readouterr().out
    assert "0 equal, 6 different" in out or "0 of 6 records equal" in out


def test_a_bundle_is_not_changed(tmp_path: Path, fake_engine: list[Any], capsys: Prints) -> None:
    path = make_bundle(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert main(["verify", str(path)]) == 2
    assert str(path) in capsys.readouterr().err and list(path.parent.iterdir()) == [path]


def test_runs_that_would_execute_foreign_code_are_left_out(
    tmp_path: Path, fake_engine: list[Any], capsys: Prints
) -> None:
    """And named; the others are verified and replayed. One of which nothing is left is refused."""
    (tmp_path / "here").mkdir()
    plain, trusting = (write_job(tmp_path / "here", chats(count), f"{name}.jsonl") for name, count in RUNS)
    assert main(["batch", str(plain)]) == 0
    trust = ("--model", "org/model", "--set", "model.trust_remote_code=true")
    assert main(["batch", str(trusting), *trust]) == 0
    path = tmp_path / "both.tar.gz"
    assert main(["bundle", str(tmp_path / "here"), "-o", str(path)]) == 0
    shutil.rmtree(tmp_path / "here")
    capsys.readouterr()
    for command, done in (("verify", "3 equal, 0 different"), ("replay", "3 of 3 records equal")):
        assert main([command, str(path)]) == 2
        lines = capsys.readouterr().out.splitlines()
        assert done in lines[-2] and lines[-1].startswith(f"left out: {path}: ")
        assert "trusting" in lines[-1] and "its config has model.trust_remote_code" in lines[-1]


def test_functions_of_a_bundle_are_not_called(
    tmp_path: Path, fake_engine: list[Any], capsys: Prints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be anybody's. The answers are compared all the same."""
    monkeypatch.chdir(tmp_path)
    scorer = tmp_path / "mine.py"
    scorer.write_text("def words(answer): return 1\n")
    path = make_bundle(tmp_path, [chat("a", "hello", {"scorer": "mine.py:words"}, max_tokens=4)])
    called = tmp_path / "called"
    scorer.write_text(f"import os\nos.mkdir({str(called)!r})\n" + scorer.read_text())
    for command in ("verify", "replay"):
        assert main([command, str(path)]) == 0
    assert "1 of 1 record equal" in capsys.readouterr().out and not called.exists()
    assert main(["replay", str(path.parent / "run/files/job.jsonl"), "--fresh"]) == 0
    assert called.exists()  # the twin: the run in a folder is the user's own


def test_the_cells_of_a_suite_are_replayed(tmp_path: Path, fake_engine: list[Any], capsys: Prints) -> None:
    """On one engine, once; a replay of some cells goes on."""
    suite = write_suite(tmp_path, CAPITALS + "    seeds: [1, 2]\n")
    assert main(["eval", str(suite)]) == 0
    assert main(["bundle", str(suite)]) == 0
    shutil.rmtree(tmp_path / "suite.out")
    before, bundle = len(fake_engine), tmp_path / "suite.tar.gz"
    for engines in (1, 2):
        capsys.readouterr()
        assert main(["replay", str(bundle)]) == 0
        assert capsys.readouterr().out.count("3 of 3 records equal, byte for byte: ") == 2
        assert len(fake_engine) == before + engines
        assert main(["replay", str(bundle)]) == 2
        says = f"mlxrun: {bundle}: its 2 replays are complete already; --fresh runs them again"
        assert says in capsys.readouterr().err
        shutil.rmtree(next((tmp_path / "suite").rglob("seed-2/job.replay.out.jsonl.run")))
        next((tmp_path / "suite").rglob("seed-2/job.replay.out.jsonl")).unlink()
    assert main(["replay", str(bundle), "--fresh"]) == 0
    assert main(["replay", str(bundle), "-o", str(tmp_path / "o.jsonl")]) == 2
    assert "contains 2 runs, and -o names the output of one" in capsys.readouterr().err


def test_other_archives_are_refused(tmp_path: Path, fake_engine: list[Any], capsys: Prints) -> None:
    for name in ("run.tar.zst", "run.zip", "run.tgz"):
        assert main(["replay", str(tmp_path / name)]) == 2
        assert "a bundle is a file whose name ends in .tar.gz" in capsys.readouterr().err
