"""Exports of runs and suites, each read by the functions of the program whose format it is."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import JobError
from mlxrun.evals.exports.export_files import FORMATS, export_runs
from mlxrun.evals.exports.exported_run import ExportNames
from tests.helpers.batch_fakes import Bench, chats, write_job
from tests.helpers.export_fakes import LINES, SCORED, finish_rich_job
from tests.helpers.harness_scripts import run_harness_script

NAMES = ExportNames(model="acme/tiny")


async def make_suite(folder: Path) -> Path:
    """The folder of a suite with three seeds of one task, of which two are done and one has not begun."""
    suite = folder / "suite.out"
    for seed in (1, 2):
        cell = suite / f"m/task/seed-{seed}"
        cell.mkdir(parents=True)
        await Bench(write_job(cell, chats(3))).run()
    jobs = [{"job": f"m/task/seed-{seed}/job.jsonl"} for seed in (1, 2, 3)]
    (suite / "suite.json").write_text(json.dumps({"cells": jobs}))
    return suite


@pytest.mark.parametrize("form", FORMATS)
async def test_files_are_in_the_run_folder_by_default(tmp_path: Path, form: str) -> None:
    run = await finish_rich_job(tmp_path)
    paths = export_runs(run.run.paths.job, form, None, NAMES)
    assert paths and all(path.is_file() and run.run.paths.folder in path.parents for path in paths)
    assert export_runs(run.run.paths.job, form, None, NAMES) == paths, "existing files are replaced"
    assert run.run.check() == [], "the run is as it was"


async def test_every_run_of_a_suite_is_exported(tmp_path: Path) -> None:
    suite = await make_suite(tmp_path)
    logs = export_runs(suite, "inspect", None, NAMES)
    assert [path.relative_to(suite).as_posix() for path in logs] == [
        "inspect/m__task__seed-1.eval",
        "inspect/m__task__seed-2.eval",
    ]
    results = export_runs(suite, "lm-eval", tmp_path / "out", NAMES)
    assert [path.parent for path in results if path.name.startswith("results_")] == [
        tmp_path / f"out/m/task/seed-{seed}/acme__tiny" for seed in (1, 2)
    ]
    assert len(export_runs(suite, "every-eval-ever", tmp_path / "eee", NAMES)) == 4
    assert export_runs(suite, "model-card", None, NAMES) == [suite / "model-card.md"]
    with pytest.raises(JobError, match="contains 2 runs, and --task names the task of one"):
        export_runs(suite, "inspect", None, ExportNames(task="one"))


async def test_a_suite_of_one_cell_has_its_exports_in_its_folder(tmp_path: Path) -> None:
    suite = tmp_path / "suite.out"
    cell = suite / "m/task/seed-1"
    cell.mkdir(parents=True)
    run = await finish_rich_job(cell)
    (suite / "suite.json").write_text(json.dumps({"cells": [{"job": "m/task/seed-1/job.jsonl"}]}))
    assert export_runs(suite, "inspect", None, NAMES) == [suite / "inspect.eval"]
    assert export_runs(suite, "model-card", None, NAMES) == [suite / "model-card.md"]
    assert export_runs(run.run.paths.job, "inspect", None, NAMES)[0].parent == run.run.paths.folder


async def test_nothing_is_written_if_one_run_cannot_be_exported(tmp_path: Path) -> None:
    suite = await make_suite(tmp_path)
    late = suite / "m/task/seed-3"
    late.mkdir()
    bench = Bench(write_job(late, chats(9)))
    await bench.run(limit=2)
    with pytest.raises(JobError, match=f"{bench.paths.out}: the run is unfinished, with 2 of 9 lines done"):
        export_runs(suite, "inspect", tmp_path / "logs", NAMES)
    assert not (tmp_path / "logs").exists()
    assert len(export_runs(suite, "inspect", tmp_path / "logs", NAMES, partial=True)) == 3


async def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    run = await finish_rich_job(tmp_path)
    with pytest.raises(JobError, match=r"ends in \.eval or \.json"):
        export_runs(run.run.paths.job, "inspect", tmp_path / "log", NAMES)
    (tmp_path / "file").write_text("")
    for form in ("lm-eval", "every-eval-ever"):
        with pytest.raises(JobError, match=f"{tmp_path}/file.*: cannot be written"):
            export_runs(run.run.paths.job, form, tmp_path / "file", NAMES)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What Inspect and lm-eval read: of the same run as .eval and as .json, and of an unfinished one."""
    folder = tmp_path_factory.mktemp("exports")

    async def make() -> tuple[list[str], list[str]]:
        run = await finish_rich_job(folder)
        late = folder / "late"
        late.mkdir()
        bench = Bench(write_job(late, chats(9)))
        await bench.run(limit=4)
        logs = ["whole.eval", "whole.json"]
        for name in logs:
            export_runs(run.run.paths.job, "inspect", folder / name, NAMES)
        export_runs(bench.job, "inspect", folder / "late.eval", NAMES, partial=True)
        export_runs(run.run.paths.job, "lm-eval", folder / "whole", NAMES)
        export_runs(bench.job, "lm-eval", folder / "part", NAMES, partial=True)
        return [str(folder / name) for name in (*logs, "late.eval")], [
            str(folder / each) for each in ("whole", "part")
        ]

    inspect, lm_eval = asyncio.run(make())
    read = run_harness_script("read_exports.py", {"inspect": inspect, "lm_eval": lm_eval}, folder)
    return {Path(path).name: each for part in read.values() for path, each in part.items()}


@pytest.mark.slow
def test_inspect_reads_both_forms_alike(found: Any) -> None:
    without = {key: value for key, value in found["whole.eval"].items() if key != "summaries"}
    assert without == {key: value for key, value in found["whole.json"].items() if key != "summaries"}
    assert [each[:2] for each in found["whole.eval"]["summaries"]] == [
        each[:2] for each in found["whole.json"]["summaries"]
    ]


@pytest.mark.slow
def test_inspect_reads_header_scores_and_samples(found: Any) -> None:
    log = found["whole.eval"]
    assert (log["status"], log["model"], log["task"]) == ("success", "mlxrun/acme/tiny", "job")
    assert (log["counts"], log["scored"]) == ([len(LINES), len(LINES) - 2], [len(SCORED), 2])
    assert log["packages"]["mlxrun"] and log["metadata"]["seeds"] and log["metadata"]["complete"] is True
    mean = log["metrics"]["accuracy"]
    interval = mean["metadata"]["confidence_interval"]
    assert interval["lower"] < mean["value"] < interval["upper"] and interval["level"] == 0.95
    assert (mean["metadata"]["samples"], mean["metadata"]["failed"]) == (len(SCORED), 1)
    assert mean["metadata"]["unscored"] == 0
    assert log["metrics"]["a/accuracy"]["name"] == "a" and log["metrics"]["pass@2"]["value"] == 1
    samples = log["samples"]
    assert set(samples) == {*SCORED, "free", "line 11"}
    assert samples["right"]["messages"][0] == ["user", "say 7"]
    assert samples["right"]["target"] == ["say 7", "seven"]
    assert samples["right"]["scores"]["score"] == [1, "say 7"]
    assert samples["message"]["messages"][:2] == [["system", "Be kind."], ["user", "ho"]]
    assert len(samples["many"]["choices"]) == 2 and samples["letter"]["options"] == ["one", "two"]
    assert samples["short"]["choices"] == [["onc", "max_tokens"]]
    assert samples["right"]["choices"][0][1] == "stop"
    assert (
        samples["long"]["error"].startswith("the engine got") and samples["long"]["scores"]["score"][0] == 0
    )
    assert samples["free"]["scores"] == {} and samples["line 11"]["messages"] == []
    assert sum(sample["usage"] for sample in samples.values()) == log["usage"]["mlxrun/acme/tiny"]


@pytest.mark.slow
def test_inspect_sees_that_a_run_is_unfinished(found: Any) -> None:
    log = found["late.eval"]
    assert (log["status"], log["counts"], log["dataset"]) == ("cancelled", [9, 4], 9)
    assert log["metadata"]["complete"] is False and len(log["samples"]) == 4


@pytest.mark.slow
def test_lm_eval_reads_results_and_samples(found: Any) -> None:
    """Its own types accept both files, and its table shows the scores."""
    results, samples = found["whole"]["results"], found["whole"]["samples"]
    assert set(samples) == {"job_a", "job_a_b", "job_pick"} == set(results["group_subtasks"]["job"])
    assert results["model_name_sanitized"] == "acme__tiny" and results["n-samples"]["job_a"]["effective"] == 6
    scores = [row["score"] for row in samples["job_a"]]
    assert results["results"]["job_a"]["score,none"] == pytest.approx(sum(scores) / 6)
    assert results["results"]["job"]["score,none"] == results["groups"]["job"]["score,none"]
    assert 0 < results["results"]["job_a"]["score_stderr,none"] < 1
    assert results["mlxrun"]["confidence_intervals"]["job"]["level"] == 0.95
    assert results["config"]["limit"] is None and results["mlxrun"]["complete"] is True
    (pick,) = samples["job_pick"]
    assert pick["arguments"]["gen_args_1"] == {"arg_0": "ab", "arg_1": " xyz"} and pick["metrics"][0] == "acc"
    assert float(pick["filtered_resps"][0][0]) < 0 and len(pick["resps"]) == 2
    right = samples["job_a"][0]
    assert (right["doc_id"], right["doc"]["id"], right["target"]) == (0, "right", "say 7, seven")
    assert right["arguments"]["gen_args_0"] == {"arg_0": "say 7", "arg_1": {"temperature": 0.5}}
    assert right["filtered_resps"] == ["say 7"] and "score" not in right["doc"]["eval"]
    assert "job_pick" in found["whole"]["tables"][0] and "|job" in found["whole"]["tables"][1]
    part = found["part"]["results"]
    assert part["config"]["limit"] == 4 and json.dumps(part["mlxrun"]["complete"]) == "false"
