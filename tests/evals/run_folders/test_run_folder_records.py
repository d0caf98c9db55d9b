"""Edited, mixed and incomplete outputs are named with file, line and id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxrun.core.errors import JobError
from mlxrun.evals.run_folders.run_folder import RunFolder
from tests.helpers.batch_fakes import Bench, chat, edit_line, finish_job, write_job


def describe(run: RunFolder) -> list[str]:
    """The problems of a run, without the folder."""
    return [str(problem).replace(f"{run.paths.out.parent}/", "") for problem in run.check()]


async def test_an_edited_answer_is_named_with_file_line_and_id(tmp_path: Path) -> None:
    bench = await finish_job(tmp_path)
    edit_line(bench.paths.out, 3, lambda line: line.replace(b"say", b"sag", 1))
    custom_id = json.loads(bench.paths.out.read_bytes().splitlines()[3])["custom_id"]
    run = RunFolder.open(bench.job)
    start = f"job.out.jsonl:4: line '{custom_id}' was edited or damaged: its record does not have the digest"
    [problem] = describe(run)
    assert problem.startswith(start) and run.check()[0].kind == "edited"
    with pytest.raises(JobError, match="job.out.jsonl:4: line 'line-"):
        list(run.read_lines())


async def test_records_that_are_missing_twice_or_damaged_are_named(tmp_path: Path) -> None:
    bench = await finish_job(tmp_path)
    records = bench.paths.out.read_bytes().splitlines(keepends=True)
    ids = [json.loads(record)["custom_id"] for record in records]
    bench.paths.out.write_bytes(b"".join([*records[1:], records[5], b"garbage\n"]))
    assert describe(RunFolder.open(bench.job)) == [
        f"job.out.jsonl:12: line {ids[5]!r} has a record of which journal.jsonl knows nothing: it is from "
        "another run, or was edited",
        f"job.out.jsonl:12: line {ids[5]!r} has a second record",
        "job.out.jsonl:13: this is no record: it was damaged, or mlxrun did not write it",
        f"job.out.jsonl: line {ids[0]!r} has no record here, but journal.jsonl names it as done",
        f"job.out.jsonl: line {ids[0]!r} has neither an answer nor an error (line "
        f"{int(ids[0].removeprefix('line-')) + 1} of job.jsonl)",
    ]


async def test_a_record_of_another_run_is_named(tmp_path: Path) -> None:
    bench = await finish_job(tmp_path)
    (tmp_path / "b").mkdir()
    other = Bench(write_job(tmp_path / "b", [chat("line-3", "another")]))
    await other.run()
    with bench.paths.out.open("ab") as file:
        file.write(other.paths.out.read_bytes())
    problems = RunFolder.open(bench.job).check()
    assert {problem.kind for problem in problems} == {"mixed"}
    assert [problem.id for problem in problems] == ["line-3", "line-3"]


async def test_a_journal_of_other_settings_and_a_missing_one_are_named(tmp_path: Path) -> None:
    bench = await finish_job(tmp_path)
    edit_line(bench.paths.journal, 0, lambda line: line.replace(b'"settings":"', b'"settings":"00'))
    assert describe(RunFolder.open(bench.job)) == [
        "job.out.jsonl.run/journal.jsonl:1: was written with other settings than manifest.json records"
    ]
    bench.paths.journal.unlink()
    assert describe(RunFolder.open(bench.job)) == [
        "job.out.jsonl.run/journal.jsonl: is missing: whether records were edited cannot be seen"
    ]


async def test_reordered_records_are_named(tmp_path: Path) -> None:
    bench = await finish_job(tmp_path)
    records = bench.paths.out.read_bytes().splitlines(keepends=True)
    bench.paths.out.write_bytes(b"".join(reversed(records)))
    assert describe(RunFolder.open(bench.job)) == [
        "job.out.jsonl: its digest is not that of manifest.json: its records were moved or removed"
    ]
