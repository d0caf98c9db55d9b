"""The manifest of a job: what it records, and of which run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxrun.config.settings import SpeculationSettings
from mlxrun.core.errors import EngineDead, JobError
from mlxrun.core.request import Request, TokenEvent
from mlxrun.jobs.records.manifest import write_json
from tests.helpers.batch_fakes import (
    MIXED,
    Bench,
    FakeClient,
    chat,
    chats,
    edit_line,
    finish_job,
    make_config,
    write_job,
)
from tests.helpers.tokenizers import DIGESTS


async def test_a_killed_run_is_in_the_manifest(tmp_path: Path) -> None:
    """What a run did that had no time to say so is added up from its journal entries."""
    bench = await finish_job(tmp_path)
    manifest = json.loads(bench.paths.manifest.read_text())
    whole = dict(manifest["runs"][0])
    manifest["runs"][0].update(ended=None, exit=None, computed=0, reused=0, done=0, failed=0)
    bench.paths.manifest.write_text(json.dumps(manifest))
    await bench.run()
    runs = json.loads(bench.paths.manifest.read_text())["runs"]
    assert runs[0] == {**whole, "ended": None, "exit": None}
    assert (runs[1]["exit"], runs[1]["computed"]) == (1, 0)


async def test_settings_that_change_no_answer_run_nothing_again(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, chats(4)))
    await bench.run()
    bench.config = make_config(rows=9, retries=0, concurrency=3)
    await bench.run()
    assert bench.ran == 0


async def test_the_manifest(tmp_path: Path) -> None:
    """Every field; digests are those of the files; tokens and runs add up."""
    import hashlib

    bench = Bench(write_job(tmp_path, MIXED))
    await bench.run(limit=2)
    await bench.run()
    found = json.loads(bench.paths.manifest.read_text())
    keys = "format config config_hash model settings versions device mixed seeds input output counts scores"
    assert list(found) == [*keys.split(), "tokens", "cache", "runs"]
    assert found["input"]["sha256"] == hashlib.sha256(bench.job.read_bytes()).hexdigest()
    assert found["output"]["sha256"] == hashlib.sha256(bench.paths.out.read_bytes()).hexdigest()
    assert found["counts"] == {"total": 7, "done": 2, "failed": 5, "cut_by_length": 1}
    group: dict[str, Any] = {"lines": 2, "correct": 1, "failed": 1, "cut_by_length": 0, "unscored": 0}
    group |= {"share": 0.5, "interval": [0.0945312057, 0.9054687943], "interval_method": "wilson"}
    assert found["scores"] == {"groups": {"a": group}, "total": group}
    scores = json.loads(bench.paths.scores.read_text())
    assert scores == {"format": 1, "counts": found["counts"], **found["scores"]}
    assert [(run["done"], run["failed"], run["exit"]) for run in found["runs"]] == [(1, 1, 1), (1, 4, 1)]
    assert (
        found["tokens"]["computed"] == found["tokens"]["prompt"] == sum(r["computed"] for r in found["runs"])
    )
    assert [run["lines"] for run in found["runs"]] == [2, 5] and found["mixed"] is False
    for run in found["runs"]:
        assert (run["versions"], run["device"]) == (found["versions"], found["device"])
        assert run["config_hash"] == found["config_hash"]
        assert run["config"] == {"scheduler.max_running": 4}
    assert found["model"] == {
        "path": "embedded",
        "name": "fake",
        "fingerprint": DIGESTS["model"],
        "tokenizer_sha256": DIGESTS["tokenizer"],
        "template_sha256": DIGESTS["template"],
    }
    status = json.loads(bench.paths.status.read_text())
    assert (status["state"], status["done"], status["failed"], status["total"]) == ("done", 2, 5, 7)
    assert status["lines"] == 7


VERSIONS = {"python": "3.11.1", "mlx": "0.30.1", "mlx-lm": "0.28.0"}


async def test_what_was_drafted_is_in_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of each run's engine at its end, where the config lets it draft."""
    drafts = {"method": "ngram", "configured": "auto", "problem": None, "drafted": 7, "accepted": 5}
    stats = SimpleNamespace(counts={"speculation": drafts})
    monkeypatch.setattr(FakeClient, "read_stats", lambda self: stats, raising=False)
    bench = Bench(write_job(tmp_path, chats(4)))
    await bench.run(limit=2)
    bench.config = replace(make_config(), speculation=SpeculationSettings("auto"))
    await bench.run()
    first, last = read_runs(bench)
    assert "speculation" not in first and last["speculation"] == drafts


def read_runs(bench: Bench) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(bench.paths.manifest.read_text())["runs"]
    return runs


async def test_threads_that_nothing_has_fixed_need_no_decision(tmp_path: Path) -> None:
    """A job that workers began with one thread each goes on here, and is not mixed. Where both runs have
    fixed their number, another one is refused."""
    for fixed in (False, True):
        folder = tmp_path / str(fixed)
        folder.mkdir()
        bench = Bench(write_job(folder, chats(6)))
        bench.device = old = {"name": "fake", "blas_threads": 1, "blas_threads_fixed": fixed}
        await bench.run(limit=2)
        bench.device = old | {"blas_threads": 2}
        if fixed:
            with pytest.raises(JobError, match="the number of BLAS threads .* is 2, was 1"):
                await bench.run()
        else:
            await bench.run()
            assert json.loads(bench.paths.manifest.read_text())["mixed"] is False


@pytest.mark.parametrize(
    "versions, device, says",
    [
        ({"mlx": "0.31.0"}, {}, "(mlx is 0.31.0, was 0.30.1)"),
        (
            {},
            {"blas": "libopenblas.so.0", "blas_threads": 8},
            "(the number of BLAS threads (engine.blas_threads) is 8, was 2)",
        ),
        (
            {"mlx-lm": "0.29.0"},
            {"name": "another", "blas": None},
            "(mlx-lm is 0.29.0, was 0.28.0; the device is another, was fake; "
            "the BLAS library is not known, was libopenblas.so.0)",
        ),
    ],
)
async def test_another_version_or_device_needs_a_decision(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    versions: dict[str, str],
    device: dict[str, Any],
    says: str,
) -> None:
    """Old and new are named, nothing is written, and --mixed records which run computed which lines."""
    monkeypatch.setattr("mlxrun.jobs.records.manifest.list_versions", lambda: VERSIONS)
    bench = Bench(write_job(tmp_path, chats(6)))
    bench.device = old = {"name": "fake", "blas": "libopenblas.so.0", "blas_threads": 2}
    await bench.run(limit=2)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr("mlxrun.jobs.records.manifest.list_versions", lambda: VERSIONS | versions)
    bench.device = old | device
    with pytest.raises(JobError) as caught:
        await bench.run()
    assert caught.value.exit_code == 2 and says in str(caught.value)
    assert "its answers (2 lines)" in str(caught.value) and "4 lines left" in str(caught.value)
    assert bench.ran == 0 and {path: path.read_bytes() for path in files} == files
    await bench.run(limit=4, mixed=True)
    found = json.loads(bench.paths.manifest.read_text())
    assert found["mixed"] is True and found["versions"] == VERSIONS | versions
    first, second = found["runs"]
    assert (first["versions"], first["device"], first["lines"]) == (VERSIONS, old, 2)
    assert (second["versions"], second["device"], second["lines"]) == (VERSIONS | versions, old | device, 2)
    runs = {entry["custom_id"]: entry["run"] for entry in read_journal(bench)}
    assert runs == {"line-0": 1, "line-1": 1, "line-2": 2, "line-3": 2}
    await bench.run()  # what is mixed already goes on where it was mixed
    assert [run["lines"] for run in read_runs(bench)] == [2, 2, 2]
    monkeypatch.setattr("mlxrun.jobs.records.manifest.list_versions", lambda: VERSIONS | {"mlx": "1.0"})
    await bench.run()  # nothing is left to be computed
    assert bench.ran == 0 and [run["lines"] for run in read_runs(bench)] == [2, 2, 2, 0]
    edit_line(bench.paths.out, 5, lambda line: line.replace(b"say", b"SAY"))
    with pytest.raises(JobError, match=r"mlx is 1\.0"):  # the edited record makes it a run that computes
        await bench.run()
    await bench.run(fresh=True)
    assert json.loads(bench.paths.manifest.read_text())["mixed"] is False


def read_journal(bench: Bench) -> list[dict[str, Any]]:
    return [json.loads(line) for line in bench.paths.journal.read_text().splitlines()[1:]]


async def test_a_server_goes_on_and_the_manifest_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can be asked there, and a batch has to end after the server was updated."""
    from mlxrun.jobs.run.job_run import JobRun

    monkeypatch.setattr("mlxrun.jobs.records.manifest.list_versions", lambda: VERSIONS)
    bench = Bench(write_job(tmp_path, chats(3)))
    await bench.run(limit=1)
    monkeypatch.setattr("mlxrun.jobs.records.manifest.list_versions", lambda: VERSIONS | {"mlx": "0.31.0"})
    run = JobRun.run

    async def run_in_server(self: JobRun) -> Any:
        self.stop.owns_process = False
        return await run(self)

    monkeypatch.setattr(JobRun, "run", run_in_server)
    await bench.run()
    assert json.loads(bench.paths.manifest.read_text())["mixed"] is True


async def test_a_manifest_of_format_1_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had the environment of its last run only, and its journal did not name the runs of old lines."""
    monkeypatch.setattr("mlxrun.jobs.records.manifest.list_versions", lambda: VERSIONS)
    bench = Bench(write_job(tmp_path, chats(4)))
    await bench.run(limit=1)
    await bench.run(limit=2)
    manifest = json.loads(bench.paths.manifest.read_text()) | {"format": 1}
    del manifest["mixed"]
    for run in manifest["runs"]:
        for key in ("versions", "device", "lines", "config", "config_hash"):
            del run[key]
    bench.paths.manifest.write_text(json.dumps(manifest))
    for at in (1, 2):
        edit_line(bench.paths.journal, at, lambda line: line.replace(b'"run":1', b'"run":0'))
    monkeypatch.setattr("mlxrun.jobs.records.manifest.list_versions", lambda: VERSIONS | {"mlx": "0.31.0"})
    with pytest.raises(JobError, match=r"its answers \(2 lines\).*mlx is 0\.31\.0, was 0\.30\.1"):
        await bench.run()
    await bench.run(mixed=True)
    runs = read_runs(bench)
    assert [run["versions"] and run["versions"]["mlx"] for run in runs] == [None, "0.30.1", "0.31.0"]
    assert [run["lines"] for run in runs] == [0, 2, 2]


async def test_versions_that_change_no_answer_ask_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another Python, and facts that are measured, such as free memory."""
    monkeypatch.setattr("mlxrun.jobs.records.manifest.list_versions", lambda: VERSIONS)
    bench = Bench(write_job(tmp_path, chats(3)), device={"name": "fake", "free_memory": 1})
    await bench.run(limit=1)
    monkeypatch.setattr("mlxrun.jobs.records.manifest.list_versions", lambda: VERSIONS | {"python": "3.12.0"})
    bench.device = {"name": "fake", "free_memory": 2}
    await bench.run()
    assert json.loads(bench.paths.manifest.read_text())["mixed"] is False


@pytest.mark.parametrize("version, continued", [("0.30.1", {"BBBBB": 3}), ("0.31.0", {})])
async def test_no_answer_is_continued_with_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, continued: dict[str, int]
) -> None:
    """Its first tokens would be of one version and the others of another."""
    monkeypatch.setattr("mlxrun.jobs.records.manifest.list_versions", lambda: VERSIONS)
    bench = Bench(write_job(tmp_path, [chat("a", "BBBBB")]))

    async def answer_partly(self: FakeClient, request: Request) -> AsyncGenerator[TokenEvent, None]:
        yield TokenEvent(request.id, (66, 66, 66), (), 9)
        await asyncio.sleep(0.05)
        raise EngineDead("in the middle of it")

    with monkeypatch.context() as patch:
        patch.setattr(FakeClient, "generate", answer_partly)
        with pytest.raises(EngineDead):
            await bench.run()
    assert bench.paths.answers.stat().st_size > 100
    monkeypatch.setattr("mlxrun.jobs.records.manifest.list_versions", lambda: VERSIONS | {"mlx": version})
    await bench.run()
    assert bench.client.answered == continued


def test_the_name_of_a_file_may_be_no_text(tmp_path: Path) -> None:
    """As one of a program that writes Latin-1."""
    write_json(tmp_path / "manifest.json", {"job": "caf\udce9.jsonl"})
    assert json.loads((tmp_path / "manifest.json").read_bytes()) == {"job": "caf\udce9.jsonl"}
