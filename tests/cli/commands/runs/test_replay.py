"""`mlxrun replay` as it is typed: where its answers go, what it prints, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.cli.main import main
from tests.helpers.batch_fakes import MIXED, FakeClient, by_id, chats, edit_line, write_job

pytestmark = pytest.mark.thorough

Prints = pytest.CaptureFixture[str]


def answer_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, answers have other tokens."""
    answer = FakeClient.answer_body

    def answer_again(self: FakeClient, request: Any, text: str) -> Any:
        return answer(self, replace(request, params=replace(request.params, max_tokens=4)), text)

    monkeypatch.setattr(FakeClient, "answer_body", answer_again)


def test_a_run_is_replayed(tmp_path: Path, fake_engine: list[Any], capsys: Prints) -> None:
    """With the recorded config, into an output of its own, once."""
    job = write_job(tmp_path, [*chats(6), *MIXED[:2]])
    assert main(["batch", str(job), "--set", "sampling.temperature=0.5"]) == 1
    out, again = tmp_path / "job.out.jsonl", tmp_path / "job.replay.out.jsonl"
    assert main(["replay", str(job)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"8 of 8 records equal, byte for byte: {again}"
    assert by_id(out) == by_id(again)
    assert main(["replay", str(out)]) == 2
    assert "is complete already; --fresh runs it again, or give another -o" in capsys.readouterr().err
    assert main(["replay", str(out), "-o", str(tmp_path / "b.jsonl")]) == 0
    assert main(["replay", str(out), "--fresh"]) == 0
    assert main(["replay", str(out), "-o", str(out)]) == 2
    assert "is the output of the run itself" in capsys.readouterr().err


def test_lines_that_differ_are_named(
    tmp_path: Path, fake_engine: list[Any], capsys: Prints, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path, chats(40))
    assert main(["batch", str(job)]) == 0
    answer_shortly(monkeypatch)
    capsys.readouterr()
    assert main(["replay", str(job)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("line 'line-0' (line 1 of the job): choices[0].message.content differs from")
    assert lines[-3:] == [
        "... and 20 more",
        f"0 of 40 records equal, byte for byte: {tmp_path}/job.replay.out.jsonl",
        "the run was made without engine.reproducible, so answers may depend on the batch",
    ]


def test_a_reproducible_run_that_differs_on_another_machine(
    tmp_path: Path, fake_engine: list[Any], capsys: Prints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What differs is printed before the lines, and named as what may be the reason after them."""
    job = write_job(tmp_path, chats(3))
    assert main(["batch", str(job), "--set", "engine.reproducible=true"]) == 0
    manifest = tmp_path / "job.out.jsonl.run" / "manifest.json"
    found = json.loads(manifest.read_text())
    found["runs"][0]["device"]["name"] = "another chip"
    manifest.write_text(json.dumps(found))
    answer_shortly(monkeypatch)
    capsys.readouterr()
    assert main(["replay", str(job)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(", was another chip") and "bytes may therefore differ" in lines[1]
    assert lines[-2].startswith("0 of 3 records equal")
    assert lines[-1] == "this machine differs from that of the run (above), which may be the reason"


def test_without_its_job_file_a_run_cannot_be_replayed(
    tmp_path: Path, fake_engine: list[Any], capsys: Prints
) -> None:
    job = write_job(tmp_path, chats(3))
    assert main(["batch", str(job)]) == 0
    out = tmp_path / "job.out.jsonl"
    job.rename(tmp_path / "other.jsonl")
    assert main(["replay", str(out)]) == 0  # its digest says that it is the one
    (tmp_path / "other.jsonl").unlink()
    assert main(["replay", str(out), "--fresh"]) == 2
    assert "has its digest (sha256 " in capsys.readouterr().err


def delete_answers(folder: Path) -> None:
    (folder / "job.out.jsonl").unlink()


def delete_journal(folder: Path) -> None:
    (folder / "job.out.jsonl.run/journal.jsonl").unlink()


def edit_answer(folder: Path) -> None:
    edit_line(folder / "job.out.jsonl", 2, lambda line: line.replace(b"say", b"SAY", 1))


@pytest.mark.parametrize(
    "harm, count, says",
    [
        (delete_answers, 16, "job.out.jsonl: line 'line-0' has no record here, but journal.jsonl names it"),
        (delete_journal, 1, "journal.jsonl: is missing: whether records were edited cannot be seen"),
        (edit_answer, 1, "was edited or damaged"),
    ],
)
def test_records_are_checked_before_anything_is_run(
    tmp_path: Path,
    fake_engine: list[Any],
    capsys: Prints,
    harm: Callable[[Path], None],
    count: int,
    says: str,
) -> None:
    job = write_job(tmp_path, chats(8))
    assert main(["batch", str(job)]) == 0
    harm(tmp_path)
    capsys.readouterr()
    assert main(["replay", str(job)]) == 2
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == count and says in out
    assert "it is not as it was written, so no line was run again" in err
    assert len(fake_engine) == 1 and not (tmp_path / "job.replay.out.jsonl").exists()


def test_a_run_without_finished_lines_is_not_replayed(
    tmp_path: Path, fake_engine: list[Any], capsys: Prints
) -> None:
    """Of which nothing could differ; one with some says how many are compared."""
    job = write_job(tmp_path, chats(8))
    assert main(["batch", str(job), "--limit", "3"]) == 0
    capsys.readouterr()
    assert main(["replay", str(job)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{job}: the run is unfinished: 3 of 8 lines are finished"
    assert lines[-1].startswith("3 of 3 records equal")
    (tmp_path / "job.out.jsonl").unlink()
    journal = tmp_path / "job.out.jsonl.run/journal.jsonl"
    journal.write_bytes(journal.read_bytes().splitlines(keepends=True)[0])
    assert main(["replay", str(job), "--fresh"]) == 2
    assert "no line is finished, so there is no record to compare" in capsys.readouterr().err
