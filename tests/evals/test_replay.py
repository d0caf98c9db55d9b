"""A run is rebuilt from its manifest alone, and what it gives is compared byte by byte."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.config.settings import EngineSettings, SamplingSettings
from mlxrun.core.errors import JobError
from mlxrun.evals.replay import (
    check_model,
    check_replays,
    find_job,
    list_machine_differences,
    read_engine_settings,
    rebuild_config,
    replay_job,
)
from mlxrun.evals.run_folders.run_folder import RunFolder
from mlxrun.jobs.lines.line_keys import collect_settings
from mlxrun.jobs.records.manifest_checks import RunEnvironment
from mlxrun.jobs.records.output_records import BatchStamp
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.jobs.run.job_run import JobOptions, JobSetup
from tests.helpers.batch_fakes import MIXED, Bench, FakeClient, chats, write_job
from tests.helpers.tokenizers import DIGESTS, FakeModelInfo


async def finish(folder: Path, lines: list[Any] | None = None) -> tuple[Bench, RunFolder]:
    bench = Bench(write_job(folder, lines or chats(12)))
    bench.config = replace(bench.config, sampling=SamplingSettings(temperature=0.5, seed=3))
    await bench.run()
    return bench, RunFolder.open(bench.paths.out)


def make_setup(bench: Bench, run: RunFolder) -> JobSetup:
    config = rebuild_config(run)
    setup = bench.make_setup()
    return replace(setup, config=config)


async def test_a_replay_is_equal(tmp_path: Path) -> None:
    """Failed lines and invalid ones included, in whatever order they end."""
    bench, run = await finish(tmp_path, [*chats(12), *MIXED])
    bench.client.pause = 0.001
    paths = JobPaths(bench.job, tmp_path / "again.out.jsonl")
    found = await replay_job(run, paths, make_setup(bench, run), JobOptions(), bench.said.append)
    assert (found.compared, found.differing) == (19, [])
    with pytest.raises(JobError, match="again.out.jsonl: is complete already"):
        check_replays("run", [paths])
    with pytest.raises(JobError, match="^run: its 2 replays are complete already; --fresh runs them again"):
        check_replays("run", [paths, paths])
    check_replays("run", [paths, JobPaths(bench.job, tmp_path / "other.out.jsonl")])
    await replay_job(run, paths, make_setup(bench, run), JobOptions(fresh=True), bench.said.append)


async def test_an_impure_engine_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: one whose answers depend on something else than the line."""
    bench, run = await finish(tmp_path)
    answer = FakeClient.answer_body

    def answer_otherwise(self: FakeClient, request: Any, text: str) -> Any:
        seed = (request.params.seed or 0) + (text == "say 7")
        return answer(self, replace(request, params=replace(request.params, seed=seed)), text)

    monkeypatch.setattr(FakeClient, "answer_body", answer_otherwise)
    paths = JobPaths(bench.job, tmp_path / "again.out.jsonl")
    found = await replay_job(run, paths, make_setup(bench, run), JobOptions(), bench.said.append)
    assert found.compared == 12
    (line,) = found.differing
    assert (line.id, line.number) == ("line-7", 8)
    assert line.text.startswith("choices[0].message.content differs from character ")


async def test_lines_of_an_unfinished_run_are_compared(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, chats(8)))
    await bench.run(limit=3)
    run = RunFolder.open(bench.paths.out)
    paths = JobPaths(bench.job, tmp_path / "again.out.jsonl")
    found = await replay_job(run, paths, make_setup(bench, run), JobOptions(), bench.said.append)
    assert (found.compared, found.differing) == (3, [])
    paths = JobPaths(bench.job, tmp_path / "less.out.jsonl")
    found = await replay_job(run, paths, make_setup(bench, run), JobOptions(limit=2), bench.said.append)
    assert [str(line) for line in found.differing] == ["'line-2' (line 3 of the job): it was not run"]


async def test_the_config_is_the_recorded_one(tmp_path: Path) -> None:
    bench, run = await finish(tmp_path)
    assert rebuild_config(run) == bench.config
    for junk in (None, 3, {"model": 3}, {"scheduler": {"max_running": "many"}}):
        damaged = RunFolder(run.paths, run.manifest | {"config": junk}, "x")
        with pytest.raises(JobError, match="contains no config that can be used"):
            rebuild_config(damaged)
    other = json.loads(json.dumps(run.manifest))
    other["config"]["sampling"]["temperature"] = 0.6
    with pytest.raises(JobError, match="its config was edited"):
        rebuild_config(RunFolder(run.paths, other, "x"))
    del other["config"]["sampling"]["max_tokens"]  # as if it was written before there was such a key
    assert rebuild_config(RunFolder(run.paths, other, "x")).sampling.temperature == 0.6


async def test_the_threads_are_those_of_the_run(tmp_path: Path) -> None:
    """A run before there was `engine.blas_threads` had those of its environment, which the manifest has."""
    _, run = await finish(tmp_path)
    old = json.loads(json.dumps(run.manifest))
    old["config"]["engine"]["reproducible"] = True
    old["device"]["blas_threads"] = 2
    edited = RunFolder(run.paths, json.loads(json.dumps(old)), "x")
    assert read_engine_settings(edited) == EngineSettings()  # whoever uses its config hears of it
    del old["config"]["engine"]["blas_threads"]
    for reproducible, threads in ((True, 2), (False, None)):
        old["config"]["engine"]["reproducible"] = reproducible
        found = read_engine_settings(RunFolder(run.paths, old, "x"))
        assert (found.reproducible, found.blas_threads) == (reproducible, threads)


async def test_the_job_file_is_found_by_its_digest(tmp_path: Path) -> None:
    """At the same place relative to the output, or beside it under any name."""
    bench, run = await finish(tmp_path)
    assert find_job(run).paths.job == bench.job
    moved = bench.job.rename(tmp_path / "renamed.jsonl")
    found = find_job(run)
    assert found.paths.job == moved and found.paths.out == run.paths.out
    assert len(list(found.read_lines())) == 12
    moved.write_text(moved.read_text().replace("say 3", "say 4"))
    with pytest.raises(JobError, match=r"the job file is missing, and no \.jsonl file in .* has its digest"):
        find_job(run)
    moved.rename(bench.job)
    with pytest.raises(JobError, match="the job file has changed since the run"):
        find_job(run)


async def test_what_differs_on_this_machine_is_named(tmp_path: Path) -> None:
    bench, run = await finish(tmp_path)
    last = run.manifest["runs"][-1]
    assert list_machine_differences(run.manifest, RunEnvironment.parse(last)) == []
    here = RunEnvironment(last["versions"] | {"mlx": "99"}, {"name": "another"})
    was = last["versions"]["mlx"]
    assert list_machine_differences(run.manifest, here) == [
        f"mlx is 99, was {was}",
        "the device is another, was fake",
    ]
    mixed = run.manifest | {"mixed": True}
    assert "the run is mixed" in list_machine_differences(mixed, here)[0]
    old = {key: value for key, value in run.manifest.items() if key != "mixed"} | {"runs": [{"done": 12}]}
    assert list_machine_differences(old, here) == [f"mlx is 99, was {was}", "the device is another, was fake"]


@pytest.mark.parametrize(
    "change, says",
    [
        ({"model_info": FakeModelInfo(digests=DIGESTS | {"model": "x"})}, "the same path with other files"),
        ({"model_info": FakeModelInfo(digests=DIGESTS | {"template": "x"})}, "the chat template has changed"),
        ({"engine": EngineSettings(reproducible=True)}, "engine.reproducible is true, was false"),
    ],
)
async def test_another_model_cannot_repeat_a_run(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    bench, run = await finish(tmp_path)
    model_info = change.pop("model_info", bench.model_info)
    config = replace(bench.config, **change)
    with pytest.raises(JobError, match=says) as caught:
        check_model(run, collect_settings(config, model_info), config.model.path)
    assert caught.value.exit_code == 2
    check_model(run, collect_settings(bench.config, bench.model_info), config.model.path)
    damaged = RunFolder(run.paths, json.loads(json.dumps(run.manifest)) | {"settings": {}}, "x")
    with pytest.raises(JobError, match=r"lines cannot be run again|is damaged"):
        check_model(damaged, collect_settings(config, model_info), config.model.path)


async def test_a_batch_of_a_server_is_not_run_again(tmp_path: Path) -> None:
    """The ids of its answers are made of the batch's id."""
    bench = Bench(write_job(tmp_path, chats(2)), stamp=BatchStamp("batch_1", 1_700_000_000))
    await bench.run()
    run = RunFolder.open(bench.paths.out)
    assert run.manifest["batch"] == {"batch_id": "batch_1", "created_at": 1_700_000_000}
    with pytest.raises(JobError, match="is a batch of a server"):
        rebuild_config(run)
