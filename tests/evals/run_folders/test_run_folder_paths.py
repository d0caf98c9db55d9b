"""A run is found by any of its files, and what is no run is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mlxrun.core.errors import JobError
from mlxrun.evals.run_folders.run_folder import RunFolder, open_runs
from mlxrun.evals.run_folders.run_folder_paths import find_cell
from tests.helpers.batch_fakes import Bench, chats, finish_job, write_job


@pytest.mark.parametrize("name", ["job.jsonl", "job.out.jsonl", "job.out.jsonl.run", "."])
async def test_a_run_is_found_by_any_of_its_paths(tmp_path: Path, name: str) -> None:
    bench = await finish_job(tmp_path)
    run = RunFolder.open(tmp_path / name)
    assert run.paths.out == bench.paths.out and len(list(run.read_lines())) == 14


async def test_a_folder_that_was_moved_is_read_with_its_own_job(tmp_path: Path) -> None:
    await finish_job(tmp_path)
    (tmp_path / "new").mkdir()
    for path in [*tmp_path.iterdir()]:
        if path.name != "new":
            path.rename(tmp_path / "new" / path.name)
    run = RunFolder.open(tmp_path / "new")
    assert run.paths.job == tmp_path / "new" / "job.jsonl" and run.check() == []


async def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    job = write_job(tmp_path, chats(1))
    with pytest.raises(JobError, match="job.jsonl: is not the job or the output of a run: there is neither"):
        RunFolder.open(job)
    bundle = tmp_path / "s.tar.gz"
    bundle.write_bytes(b"")
    with pytest.raises(JobError, match=r"s\.tar\.gz: is a bundle, .* `mlxrun verify` and .* unpack it"):
        open_runs(bundle)
    with pytest.raises(JobError, match="nothing: no such file or folder"):
        RunFolder.open(tmp_path / "nothing")
    with pytest.raises(JobError, match="contains no run"):
        RunFolder.open(tmp_path)
    with pytest.raises(JobError, match=r"s.yaml: this suite has not been run: there is no folder .*s.out"):
        open_runs(tmp_path / "s.yaml")
    bench = Bench(job)
    await bench.run()
    manifest = bench.paths.manifest.read_text()
    for text, message in [
        ("{", "cannot be read"),
        ("[]", "is not the manifest"),
        (
            manifest.replace('\n "format": ', '\n "format": 99'),
            "has format 99., this mlxrun reads formats up to",
        ),
        (manifest.replace('"settings"', '"sets"'), "is damaged: settings is missing"),
    ]:
        bench.paths.manifest.write_text(text)
        with pytest.raises(JobError, match=f"manifest.json: {message}"):
            RunFolder.open(job)
    found = json.loads(manifest)
    for name, value in [
        ("counts", {}),
        ("counts.done", "x"),
        ("input.lines", None),
        ("output.path", 3),
        ("model", {}),
        ("seeds", None),
        ("scores.total", 10**400),
        ("runs", [{}]),
        ("runs", [{"started": "x", "ended": None}]),
    ]:
        first, _, key = name.partition(".")
        changed = found | {first: {**found[first], key: value} if key else value}
        bench.paths.manifest.write_text(json.dumps(changed))
        with pytest.raises(JobError, match=rf"manifest.json: is damaged: {name}(\.\w+)? has a value of"):
            RunFolder.open(job)
    for config in (None, {}, {"media": None}, {"media": {"max_bytes": "x"}}):
        bench.paths.manifest.write_text(json.dumps(found | {"config": config}))
        with pytest.raises(JobError, match="is damaged: its config has no limits of media"):
            RunFolder.open(job).check()
    bench.paths.manifest.unlink()
    with pytest.raises(JobError, match="manifest.json: is missing: the run folder is incomplete"):
        RunFolder.open(job)


async def test_the_cells_of_a_suite_are_read_in_its_order(tmp_path: Path) -> None:
    """Cells that have not begun, and those of an earlier suite file, are no runs of it."""
    folder = tmp_path / "s.out"
    for name in ("m/b/seed-0", "m/a/seed-0", "m/old/seed-0"):
        (folder / name).mkdir(parents=True)
        await Bench(write_job(folder / name, chats(2))).run()
    (folder / "m/late/seed-0").mkdir(parents=True)
    write_job(folder / "m/late/seed-0", chats(1))
    names = ["m/b/seed-0", "m/a/seed-0", "m/late/seed-0", "m/todo/seed-0"]
    suite = {"format": 1, "cells": [{"name": name, "job": f"{name}/job.jsonl"} for name in names]}
    (folder / "suite.json").write_text(json.dumps(suite))
    assert [run.name for run in open_runs(folder)] == names[:2]
    assert [run.name for run in open_runs(tmp_path / "s.yaml")] == names[:2]
    assert [run.name for run in open_runs(folder / "m" / "a")] == [str(folder / "m" / "a")]
    (folder / "suite.json").write_text("{}")
    with pytest.raises(JobError, match="suite.json: cannot be read, or is not the manifest of a suite"):
        open_runs(folder)
    (folder / "suite.json").write_text(json.dumps({"cells": suite["cells"][2:]}))  # type: ignore[index]
    with pytest.raises(JobError, match="s.out: no cell of this suite has begun"):
        open_runs(folder)


def test_the_cell_of_an_output(tmp_path: Path) -> None:
    out = tmp_path / "suite/model/task/seed-1/job.out.jsonl"
    assert find_cell(out) is None
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite/suite.json").write_text("{}")
    assert find_cell(out) == (tmp_path / "suite", "model", "task", "seed-1")
    assert find_cell(out.with_name("other.out.jsonl")) is None
    assert find_cell(tmp_path / "suite/job.out.jsonl") is None


async def test_a_replay_of_a_cell_is_no_cell(tmp_path: Path) -> None:
    """In a part of a suite; outside of one, every run counts."""
    for folder in (tmp_path / "s.out/m/a/seed-0", tmp_path / "s.out/m/a/seed-1"):
        folder.mkdir(parents=True)
        await Bench(write_job(folder, chats(1))).run()
    out = tmp_path / "s.out/m/a/seed-0/job.out.jsonl"
    again = out.with_name("job.replay.out.jsonl")
    shutil.copy(out, again)
    shutil.copytree(f"{out}.run", f"{again}.run")
    model = tmp_path / "s.out/m"
    assert len(open_runs(model)) == 3
    (tmp_path / "s.out/suite.json").write_text("{}")
    assert [run.name for run in open_runs(model)] == ["a/seed-0", "a/seed-1"]
    assert [run.name for run in open_runs(model / "a/seed-0")] == [str(model / "a/seed-0")]
    assert RunFolder.open(again).paths.out == again


async def test_paths_are_as_relative_as_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that warnings name the job as the command did."""
    (tmp_path / "jobs").mkdir()
    bench = Bench(write_job(tmp_path / "jobs", chats(1)))
    await bench.run()
    for folder, out in ((tmp_path, "jobs/job.out.jsonl"), (tmp_path / "jobs", "job.out.jsonl")):
        monkeypatch.chdir(folder)
        assert str(RunFolder.open(Path(out)).paths.job) == out.replace(".out", "")
        assert RunFolder.open(bench.paths.out).paths.job == bench.job
