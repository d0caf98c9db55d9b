"""`mlxrun batch` on jobs and outputs at URLs: fetched, run on copies, published, continued elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

from mlxrun.cli.main import main
from mlxrun.config.settings import Config
from mlxrun.core.errors import EngineDead, JobError
from mlxrun.jobs.run.remote_file import RemoteFile
from tests.helpers.batch_fakes import FakeClient, chats

pytestmark = pytest.mark.usefixtures("fake_engine")


@pytest.fixture(params=["memory", "file"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a folder, with `job.jsonl` of six lines."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    url = f"{request.param}://{tmp_path}/bucket"
    write_job(url, 6)
    return url


def write_job(bucket: str, count: int) -> None:
    with fsspec.open(f"{bucket}/job.jsonl", "w", auto_mkdir=True) as file:
        file.write("".join(json.dumps(line) + "\n" for line in chats(count)))


def read(url: str) -> list[Any]:
    with fsspec.open(url, "r") as file:
        return [json.loads(line) for line in file]


def exists(url: str) -> bool:
    return RemoteFile(url).read_stamp() is not None


def move_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on it is another machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))


def test_a_job_at_a_url(bucket: str, fake_engine: list[Config], capsys: Any) -> None:
    """The output is published beside the job; a second run runs nothing, a longer job the new lines only."""
    assert main(["batch", f"{bucket}/job.jsonl"]) == 0
    assert f"published: {bucket}/job.out.jsonl" in capsys.readouterr().err
    assert len(read(f"{bucket}/job.out.jsonl")) == 6
    assert all(exists(f"{bucket}/job.out.jsonl.run/{n}") for n in ("manifest.json", "journal.jsonl"))
    assert main(["batch", f"{bucket}/job.jsonl"]) == 0
    assert len(fake_engine) == 1
    write_job(bucket, 8)
    assert main(["batch", f"{bucket}/job.jsonl"]) == 0
    assert "continuing: 6" in capsys.readouterr().err
    assert len(read(f"{bucket}/job.out.jsonl")) == 8 and len(fake_engine) == 2


def test_only_the_output_is_at_a_url(bucket: str, tmp_path: Path) -> None:
    local = tmp_path / "mine.jsonl"
    local.write_text("".join(json.dumps(line) + "\n" for line in chats(2)))
    assert main(["batch", str(local), "-o", f"{bucket}/new/mine.out.jsonl"]) == 0
    assert len(read(f"{bucket}/new/mine.out.jsonl")) == 2
    assert not (tmp_path / "mine.out.jsonl").exists()


def test_only_the_job_is_at_a_url(bucket: str, tmp_path: Path) -> None:
    assert main(["batch", f"{bucket}/job.jsonl", "-o", str(tmp_path / "mine.out.jsonl")]) == 0
    assert len((tmp_path / "mine.out.jsonl").read_text().splitlines()) == 6
    assert not exists(f"{bucket}/job.out.jsonl")


def test_another_machine_continues(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_engine: list[Config], capsys: Any
) -> None:
    """What an engine that died left is published too, and its lines are not run again."""
    answer, left = FakeClient.answer_body, iter(range(4))

    async def dies(self: FakeClient, request: Any, text: str) -> Any:
        if next(left, None) is None:
            raise EngineDead("as scripted")
        async for event in answer(self, request, text):
            yield event

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeClient, "answer_body", dies)
        assert main(["batch", f"{bucket}/job.jsonl", "--set", "scheduler.max_running=1"]) == 3
    done = len(read(f"{bucket}/job.out.jsonl"))
    assert 0 < done < 6
    move_elsewhere(tmp_path, monkeypatch)
    capsys.readouterr()
    assert main(["batch", f"{bucket}/job.jsonl"]) == 0
    err = capsys.readouterr().err
    assert f"continuing from {bucket}/job.out.jsonl" in err and f"continuing: {done}" in err
    assert len(read(f"{bucket}/job.out.jsonl")) == 6
    # The first machine does not write over what the second one has published.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    assert main(["batch", f"{bucket}/job.jsonl"]) == 2
    assert "it was changed since this machine published it" in capsys.readouterr().err


def test_two_machines_at_once(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The one that ends first has published; the other one says so and overwrites nothing."""
    answer, started = FakeClient.answer_body, []

    async def overtaken(self: FakeClient, request: Any, text: str) -> Any:
        if not started:
            started.append(1)
            with fsspec.open(f"{bucket}/job.out.jsonl", "w") as file:
                file.write('{"of": "another"}\n')
        async for event in answer(self, request, text):
            yield event

    monkeypatch.setattr(FakeClient, "answer_body", overtaken)
    assert main(["batch", f"{bucket}/job.jsonl"]) == 2
    assert "it was changed while this job ran, and stays as it is" in capsys.readouterr().err
    assert read(f"{bucket}/job.out.jsonl") == [{"of": "another"}]


def list_claims(bucket: str) -> list[str]:
    return RemoteFile(f"{bucket}/job.out.jsonl.run/manifest.json").list_siblings("publishing-")


def test_two_machines_that_publish_in_the_same_second(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Both have found no output. All files at the URL are of the first one; the second one keeps its own."""
    upload, others = RemoteFile.upload, list[int]()

    def overtake(self: RemoteFile, local: Path) -> None:
        if not others:
            others.append(0)
            with pytest.MonkeyPatch.context() as patch:
                move_elsewhere(tmp_path, patch)
                others[0] = main(["batch", f"{bucket}/job.jsonl", "--set", "sampling.seed=7"])
        upload(self, local)

    monkeypatch.setattr(RemoteFile, "upload", overtake)
    assert main(["batch", f"{bucket}/job.jsonl"]) == 0
    assert others == [2] and list_claims(bucket) == []
    err = capsys.readouterr().err
    assert "another machine is publishing it" in err and "All answers are in" in err
    (own,) = tmp_path.glob("here/mlxrun/jobs/*/job.out.jsonl")
    (theirs,) = tmp_path.glob("elsewhere/mlxrun/jobs/*/job.out.jsonl")
    for name in ("", ".run/journal.jsonl", ".run/manifest.json"):
        with fsspec.open(f"{bucket}/job.out.jsonl{name}", "rb") as file:
            published = file.read()
        assert published == Path(f"{own}{name}").read_bytes() != Path(f"{theirs}{name}").read_bytes()
    assert len(theirs.read_text().splitlines()) == 6


def test_a_machine_that_was_killed_while_it_published(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_engine: list[Config], capsys: Any
) -> None:
    """Its claim is named to others, which publish once it is gone, and is no hindrance to itself."""
    remove, claims = RemoteFile.remove, list[RemoteFile]()

    def leave(self: RemoteFile) -> None:
        if "publishing-" not in self.name:
            remove(self)
        else:
            claims.append(self)
            raise JobError(f"{self.url}: it cannot be written: no route")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteFile, "remove", leave)
        assert main(["batch", f"{bucket}/job.jsonl"]) == 0
    assert list_claims(bucket) == [claims[0].name]
    move_elsewhere(tmp_path, monkeypatch)
    write_job(bucket, 8)
    assert main(["batch", f"{bucket}/job.jsonl"]) == 2
    assert f"then delete {claims[0].url}" in capsys.readouterr().err
    assert len(read(f"{bucket}/job.out.jsonl")) == 6
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    assert main(["batch", f"{bucket}/job.jsonl"]) == 0
    assert len(read(f"{bucket}/job.out.jsonl")) == 8 and list_claims(bucket) == []


def test_failed_lines_are_published_and_retracted(bucket: str) -> None:
    with fsspec.open(f"{bucket}/job.jsonl", "a") as file:
        file.write('{"id": "bad", "temprature": 1}\n')
    assert main(["batch", f"{bucket}/job.jsonl"]) == 1
    assert len(read(f"{bucket}/job.errors.jsonl")) == 1
    write_job(bucket, 6)
    assert main(["batch", f"{bucket}/job.jsonl"]) == 0
    assert not exists(f"{bucket}/job.errors.jsonl") or read(f"{bucket}/job.errors.jsonl") == []


def test_a_publication_that_fails_loses_nothing(
    bucket: str, monkeypatch: pytest.MonkeyPatch, fake_engine: list[Config], capsys: Any
) -> None:
    """The same command publishes it later, and computes nothing; also if it broke off in the middle."""
    upload = RemoteFile.upload

    def fail(self: RemoteFile, local: Path) -> None:
        if self.name == "job.out.jsonl":
            raise JobError(f"{self.url}: it cannot be written: no route")
        upload(self, local)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteFile, "upload", fail)
        assert main(["batch", f"{bucket}/job.jsonl"]) == 2
    assert "no route. All answers are in " in capsys.readouterr().err
    assert not exists(f"{bucket}/job.out.jsonl")
    assert main(["batch", f"{bucket}/job.jsonl"]) == 0
    assert len(read(f"{bucket}/job.out.jsonl")) == 6 and len(fake_engine) == 1


@pytest.mark.parametrize("arrives", [True, False])
def test_a_machine_that_was_stopped_while_it_published(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, arrives: bool
) -> None:
    """It takes the output for its own only if the content is what it has sent."""
    upload = RemoteFile.upload

    def stop(self: RemoteFile, local: Path) -> None:
        if self.name != "job.out.jsonl" or arrives:
            upload(self, local)
        if self.name == "job.out.jsonl":
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteFile, "upload", stop)
        assert main(["batch", f"{bucket}/job.jsonl"]) == 130
    assert exists(f"{bucket}/job.out.jsonl") is arrives
    if arrives:
        write_job(bucket, 8)
        assert main(["batch", f"{bucket}/job.jsonl"]) == 0
        assert len(read(f"{bucket}/job.out.jsonl")) == 8
        return
    move_elsewhere(tmp_path, monkeypatch)
    write_job(bucket, 8)
    assert main(["batch", f"{bucket}/job.jsonl"]) == 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    write_job(bucket, 6)
    assert main(["batch", f"{bucket}/job.jsonl"]) == 2
    assert "it was changed since this machine published it" in capsys.readouterr().err
    assert len(read(f"{bucket}/job.out.jsonl")) == 8


def test_a_dry_run_writes_nothing(bucket: str, capsys: Any) -> None:
    assert main(["batch", f"{bucket}/job.jsonl", "--dry-run"]) == 0
    assert "6 lines" in capsys.readouterr().out
    assert not exists(f"{bucket}/job.out.jsonl.run/manifest.json")


@pytest.mark.parametrize(
    ("job", "more", "text"),
    [
        ("{bucket}/none.jsonl", (), "there is no such file"),
        ("{bucket}/job.jsonl", ("-o", "{bucket}/job.jsonl"), "would replace the job file"),
        ("{bucket}/job.jsonl", ("-o", "nonsense://x/y.jsonl"), "Protocol not known"),
        ("http://localhost:9/x.jsonl", (), "give another -o"),
    ],
)
def test_mistakes(bucket: str, job: str, more: tuple[str, ...], text: str, capsys: Any) -> None:
    """Exit 2 before any model is loaded."""
    arguments = [each.format(bucket=bucket) for each in (job, *more)]
    assert main(["batch", *arguments, "--set", "model.path=org/broken"]) == 2
    assert text in capsys.readouterr().err
