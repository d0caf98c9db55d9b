"""The pages of a folder of runs: what the index lists, when pages are made again, and hostile names."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mlxrun.core.errors import JobError, NotFound
from mlxrun.evals.reports import page
from mlxrun.evals.reports.run_pages import DAMAGED, RunPages
from mlxrun.evals.run_folders.run_folder import RunFolder
from tests.evals.reports.test_page import find_dangers
from tests.helpers.batch_fakes import chats
from tests.helpers.report_jobs import mixed_lines, run_lines, write_suite


async def test_the_index_has_jobs_and_suites_with_their_cells(tmp_path: Path) -> None:
    await run_lines(tmp_path / "one", mixed_lines())
    suite = tmp_path / "s.out"
    await run_lines(suite / "m" / "t" / "seed-1", chats(4))
    write_suite(
        suite, {"name": "m/t/seed-2", "model": "m", "task": "t", "variant": "seed-2", "state": "todo"}
    )
    found = {run.key: run for run in RunPages(tmp_path).list_runs()}
    assert set(found) == {"one/job.out.jsonl", "s.out"}
    job, whole = found["one/job.out.jsonl"], found["s.out"]
    assert (job.state, job.done, job.failed, job.total) == ("done", 4, 2, 6)
    assert job.score.startswith("50.0 %") and job.model == "fake" and job.time > "2000"
    assert (whole.state, whole.done, whole.total, whole.unit) == ("unfinished", 1, 2, "cells")
    (cell,) = whole.cells
    assert (cell.name, cell.state, cell.done) == ("m/t/seed-1", "done", 4)
    assert RunPages(suite).list_runs()[0].key == "." and RunPages(suite).list_runs()[0].name == "s.out"
    assert RunPages(tmp_path / "none").list_runs() == []
    assert "no runs here yet" in RunPages(tmp_path / "none").render([])[1]


async def test_a_suite_that_could_not_begin(tmp_path: Path) -> None:
    error = "<b>no weights"
    write_suite(tmp_path, {"name": "m/t/v", "model": "m", "task": "t", "state": "failed", "error": error})
    (suite,) = RunPages(tmp_path).list_runs()
    assert (suite.state, suite.done, suite.total, suite.has_report) == ("failed", 0, 1, False)
    assert suite.note == f"1 cell failed: {error}"
    html = RunPages(tmp_path).render([])[1]
    assert "failed: &lt;b&gt;no weights" in html and 'href="?run=' not in html


async def test_a_folder_inside_a_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await run_lines(tmp_path / "s.out" / "m" / "t" / "seed-1", chats(1))
    write_suite(tmp_path / "s.out")
    monkeypatch.chdir(tmp_path / "s.out" / "m")
    assert [run.key for run in RunPages(Path()).list_runs()] == ["t/seed-1/job.out.jsonl"]
    monkeypatch.chdir(tmp_path)
    assert [run.key for run in RunPages(Path()).list_runs()] == ["s.out"]


async def test_a_run_that_goes_on(tmp_path: Path) -> None:
    """Its process says how far it is, in status.json."""
    bench = await run_lines(tmp_path, chats(4))
    pages, key = RunPages(tmp_path), "job.out.jsonl"
    before = pages.render([])[0], pages.render([key])[0]
    status = {"state": "running", "pid": os.getpid(), "updated": datetime.now(UTC).isoformat()}
    bench.paths.status.write_text(json.dumps({**status, "done": 2, "failed": 1, "total": 4}))
    (run,) = pages.list_runs()
    assert (run.state, run.done, run.failed, run.total) == ("running", 2, 1, 4)
    assert pages.render([])[0] != before[0] and pages.render([key])[0] != before[1]
    for keys in ([], [key]):
        assert 'data-live="1"' in pages.render(keys)[1]
    bench.paths.status.unlink()
    assert 'data-live="0"' in pages.render([key])[1]


async def test_a_report_is_made_again_when_its_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await run_lines(tmp_path, chats(2))
    made: list[str] = []
    real = page.render_page
    monkeypatch.setattr(page, "render_page", lambda *given, **more: made.append("") or real(*given, **more))
    pages = RunPages(tmp_path)
    first = pages.render(["job.out.jsonl"])[1]
    assert pages.render(["job.out.jsonl"])[1] == first and len(made) == 1
    await bench.run(fresh=True, limit=1)
    assert "1 line not part of the run (--limit)" in pages.render(["job.out.jsonl"])[1] and len(made) == 2


async def test_a_request_lists_the_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the browser has the page already or not."""
    await run_lines(tmp_path, chats(1))
    pages, walks = RunPages(tmp_path), list[Path]()
    real = RunPages.list_runs
    monkeypatch.setattr(RunPages, "list_runs", lambda self: walks.append(tmp_path) or real(self))
    for keys in ([], ["job.out.jsonl"]):
        digest, html = pages.render(keys)
        assert html and pages.render(keys, [digest]) == (digest, "")
        assert pages.render(keys, ["another"]) == (digest, html)
    assert len(walks) == 6


async def test_manifests_are_read_again_only_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of thousands of runs in a folder, most are finished."""
    bench, read = await run_lines(tmp_path, chats(2)), list[Path]()
    real = RunFolder.open.__func__
    monkeypatch.setattr(RunFolder, "open", classmethod(lambda cls, out: read.append(out) or real(cls, out)))
    pages = RunPages(tmp_path)
    before = pages.list_runs()
    assert pages.list_runs() == before and len(read) == 1
    await bench.run(fresh=True, limit=1)
    read.clear()
    assert pages.list_runs()[0].state == "limited" and len(read) == 1
    bench.paths.manifest.unlink()
    assert [pages.list_runs()[0].state for _ in range(2)] == [DAMAGED] * 2


async def test_only_runs_of_the_folder_are_shown(tmp_path: Path) -> None:
    await run_lines(tmp_path / "in", chats(1))
    await run_lines(tmp_path / "out", chats(1))
    pages = RunPages(tmp_path / "in")
    for key in ("../out/job.out.jsonl", str(tmp_path / "out/job.out.jsonl"), "in", "", "\0"):
        with pytest.raises(NotFound, match="there is no run"):
            pages.render([key])


async def test_several_runs_are_side_by_side(tmp_path: Path) -> None:
    for name in ("a", "b"):
        await run_lines(tmp_path / name, chats(3))
    html = RunPages(tmp_path).render(["a/job.out.jsonl", "b/job.out.jsonl"])[1]
    assert 'id="difference"' in html and 'id="differences"' in html


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("counts", {}),
        ("counts", {"done": 1e999, "failed": 0, "total": 1}),
        ("runs", "text"),
        ("runs", [1]),
        ("model", "text"),
        ("scores", {"total": {"lines": 1}}),
        ("scores", [1]),
        ("input", {"path": "x"}),
    ],
)
async def test_a_manifest_with_other_values(tmp_path: Path, key: str, value: object) -> None:
    """It spoils neither the index nor the other runs."""
    await run_lines(tmp_path / "good", chats(1))
    bench = await run_lines(tmp_path / "bad", chats(1))
    manifest = json.loads(bench.paths.manifest.read_text())
    bench.paths.manifest.write_text(json.dumps(manifest | {key: value}))
    pages = RunPages(tmp_path)
    states = {run.key: run.state for run in pages.list_runs()}
    assert states["good/job.out.jsonl"] == "done" and states["bad/job.out.jsonl"] == DAMAGED
    assert "the manifest is damaged" in pages.render([])[1]


@pytest.mark.parametrize("key", ["cache", "config", "counts", "device", "model", "runs", "versions"])
async def test_a_number_in_place_of_an_object(tmp_path: Path, key: str) -> None:
    """The index says that the run is damaged, and its report is an error that names the key."""
    bench = await run_lines(tmp_path, chats(1))
    manifest = json.loads(bench.paths.manifest.read_text())
    bench.paths.manifest.write_text(json.dumps(manifest | {key: 7}))
    pages = RunPages(tmp_path)
    (run,) = pages.list_runs()
    assert run.state == DAMAGED and f"{key} has a value of another kind" in run.note
    with pytest.raises(JobError, match=f"is damaged: {key}"):
        pages.render([run.key])[1]


async def test_fifos_are_not_read(tmp_path: Path) -> None:
    """Reading one would block for ever."""
    bench = await run_lines(tmp_path, chats(1))
    for path in (bench.paths.manifest, bench.paths.status, tmp_path / "s" / "suite.json"):
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    pages = RunPages(tmp_path)
    found = {run.key: run for run in pages.list_runs()}
    assert set(found) == {"job.out.jsonl", "s"}
    assert all(run.state == DAMAGED and "a FIFO" in run.note for run in found.values())
    assert pages.render([])[1].count("a FIFO") == 2


@pytest.mark.parametrize("text", ["null", "{", '{"cells": 5}', '{"format": 1, "cells": [1], "runs": []}'])
async def test_a_damaged_suite(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is not taken to be done, its cells are shown, and a look at it loses no history."""
    await run_lines(tmp_path / "s.out" / "m" / "t" / "seed-1", chats(1))
    (tmp_path / "s.out" / "suite.json").write_text(text)
    pages = RunPages(tmp_path)
    (suite,) = pages.list_runs()
    assert suite.state == DAMAGED and "the manifest is damaged" in suite.note
    (cell,) = suite.cells
    assert cell.state == "done" and "line-0" in pages.render([cell.key])[1]
    assert "the manifest is damaged" in pages.render([])[1]
    assert "is lost" not in caplog.text


async def test_hostile_names_and_damaged_runs(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>'\""
    await run_lines(tmp_path / name, chats(1))
    bench = await run_lines(tmp_path / "damaged", chats(1))
    bench.paths.manifest.write_text('{"format": 1, "<script>": 1}')
    await run_lines(tmp_path / "odd", chats(1))
    odd = (tmp_path / "odd").rename(tmp_path / os.fsdecode(b"\xff"))
    pages = RunPages(tmp_path)
    found = {run.path.parent.name: run for run in pages.list_runs()}
    assert found["damaged"].state == DAMAGED and "is damaged" in found["damaged"].note
    html = pages.render([])[1]
    html.encode()
    dangers = [each for each in find_dangers(html) if each != "form" and not each.startswith("?")]
    assert dangers == [] and "&lt;img" in html
    assert "line-0" in pages.render([found[odd.name].key])[1]
