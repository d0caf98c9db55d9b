"""The files of a job: one process writes them, and what is there is not lost."""

from __future__ import annotations

import errno
import fcntl
import json
from pathlib import Path

import pytest

from mlxrun.core.durable_writes import write_atomically
from mlxrun.core.errors import JobError
from mlxrun.jobs.records.run_paths import JobPaths, lock_folder, wrap_write_errors
from tests.helpers.batch_fakes import MIXED, Bench, by_id, chats, write_job


async def test_fresh(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, MIXED))
    await bench.run()
    before = by_id(bench.paths.out)
    await bench.run(fresh=True)
    assert bench.ran == 3
    assert by_id(bench.paths.out) == before
    assert len(json.loads(bench.paths.manifest.read_text())["runs"]) == 1


async def test_one_process_at_a_time(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, chats(2)))
    await bench.run()
    with (bench.paths.folder / "lock").open("r+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(JobError, match=r"another mlxrun \(process \d+\) runs this job"):
            await bench.run()
    await bench.run()


async def test_a_file_that_is_not_ours_is_not_touched(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, chats(2)))
    bench.paths.out.write_text('{"precious": 1}\n')
    with pytest.raises(JobError, match=r"was not written by this job .*--fresh"):
        await bench.run()
    assert bench.paths.out.read_text() == '{"precious": 1}\n'
    assert (await bench.run(fresh=True)).exit_code == 0


def test_paths(tmp_path: Path) -> None:
    """Outputs stand beside the job, or where -o says; never over the job."""
    job = tmp_path / "eval.jsonl"
    paths = JobPaths(job)
    names = [path.name for path in (paths.out, paths.errors, paths.folder)]
    assert names == ["eval.out.jsonl", "eval.errors.jsonl", "eval.out.jsonl.run"]
    other = JobPaths(job, tmp_path / "answers.jsonl")
    assert (other.errors.name, other.folder.name) == ("answers.errors.jsonl", "answers.jsonl.run")
    assert JobPaths(tmp_path / "eval.txt").out.name == "eval.txt.out.jsonl"
    for out in (job, tmp_path, tmp_path / "no" / "x.jsonl"):
        with pytest.raises(JobError):
            JobPaths(job, out)


def test_a_link_that_leads_nowhere_is_no_bug(tmp_path: Path) -> None:
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    assert JobPaths(tmp_path / "eval.jsonl", loop).out == loop  # the system refuses it when it is written


@pytest.mark.parametrize("job", ["", ".", "/"])
def test_a_folder_without_a_name_is_no_job(job: str) -> None:
    with pytest.raises(JobError, match=r"^[./]: cannot read the job file: Is a directory$"):
        JobPaths(Path(job))


def test_standard_output_is_no_output(tmp_path: Path) -> None:
    """The answers went into a file of that name."""
    with pytest.raises(JobError, match="-: the output cannot be written: answers are kept in a file"):
        JobPaths(tmp_path / "x.jsonl", Path("-"))


def test_what_fresh_sets_aside(tmp_path: Path) -> None:
    """Answers of any run are moved and never replaced; without answers, nothing is kept."""
    paths = JobPaths(tmp_path / "x.jsonl")
    paths.folder.mkdir()
    for path in (paths.journal, paths.manifest, paths.status, paths.answers):
        path.write_text("1")
    assert paths.set_outputs_aside() is None
    assert list(paths.folder.iterdir()) == []
    folders = []
    for text in ("one", "two", "three"):
        paths.out.write_text(text)
        paths.journal.write_text(text)
        paths.answers.write_text(text)
        folders.append(paths.set_outputs_aside())
        assert not any(path.exists() for path in (paths.out, paths.journal, paths.answers))
    assert len(set(folders)) == 3
    for folder, text in zip(folders, ("one", "two", "three"), strict=True):
        assert folder is not None and folder.parent == paths.earlier
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["journal.jsonl", "x.out.jsonl"] and (folder / "x.out.jsonl").read_text() == text


def test_a_small_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for data in (b"1", b"22"):
        write_atomically(path, data)
        assert path.read_bytes() == data
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]


def test_a_file_that_cannot_be_written_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk, where a file can be created and not filled."""
    path = tmp_path / "x.json"
    write_atomically(path, b"1")

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mlxrun.core.durable_writes.sync_handle", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"22")
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"] and path.read_bytes() == b"1"


@pytest.mark.parametrize("is_new", [True, False])
def test_only_lines_that_may_be_there_are_said_to_be_kept(tmp_path: Path, is_new: bool) -> None:
    folder = tmp_path / "x.run"
    if not is_new:
        folder.mkdir()
        (folder / "lock").mkdir()  # which cannot be opened as a file
    else:
        (tmp_path / "file").write_text("")
        folder = tmp_path / "file" / "x.run"
    with pytest.raises(JobError, match="cannot be written") as caught, lock_folder(folder):
        pass
    assert ("Finished lines are kept" in str(caught.value)) is not is_new


def test_a_folder_into_which_nothing_is_written_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "x.run"
    with lock_folder(folder), pytest.raises(JobError, match="another mlxrun"), lock_folder(folder):
        pass
    assert not folder.exists()
    with lock_folder(folder):
        (folder / "journal").write_text("")
    with lock_folder(folder):
        (folder / "journal").unlink()
    assert folder.exists()  # it was there before


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, 3), (errno.EDQUOT, 3), (errno.EFBIG, 3), (errno.EIO, 3), (errno.EACCES, 2)],
)
def test_a_disk_that_fails_is_no_mistake_of_the_job(tmp_path: Path, number: int, code: int) -> None:
    with pytest.raises(JobError, match="Finished lines are kept") as caught, wrap_write_errors(tmp_path):
        raise OSError(number, "It fails")
    assert caught.value.exit_code == code
