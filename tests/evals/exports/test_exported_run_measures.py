"""Runs whose scores have a unit, in each format: value, direction and interval are those of the measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxrun.core.errors import JobError
from mlxrun.evals.exports.every_eval_ever import write_every_eval_ever
from mlxrun.evals.exports.exported_run import ExportedRun, ExportNames
from mlxrun.evals.exports.inspect_log import build_header, build_sample
from mlxrun.evals.exports.lm_eval_files import build_results, write_lm_eval_files
from mlxrun.evals.exports.model_card import build_model_index
from mlxrun.evals.run_folders.run_folder import RunFolder
from tests.evals.exports.test_every_eval_ever import read_files
from tests.helpers.batch_fakes import chats
from tests.helpers.eval_runs import run_lines

FIELDS = {"prompt_windows": {}, "echo": True, "logprobs": 0, "max_tokens": 0}
TEXTS = [
    {"id": f"t{at}", "prompt": f"Text {at}. " * (at + 1), **FIELDS, "eval": {"match": "perplexity"}}
    for at in range(5)
]


async def export(folder: Path, lines: list[object]) -> ExportedRun:
    return ExportedRun.check(RunFolder.open(await run_lines(folder, lines)), ExportNames(model="acme/tiny"))


async def test_bits_per_byte_in_every_format(tmp_path: Path) -> None:
    run = await export(tmp_path, [*TEXTS])
    total = run.summary.total
    value, interval = total.value, total.interval
    assert value is not None and interval is not None
    record, rows = read_files(write_every_eval_ever(run, tmp_path / "eee"))
    [result] = record["evaluation_results"]
    config, details = result["metric_config"], result["score_details"]
    assert (config["metric_unit"], config["lower_is_better"]) == ("bits/byte", True)
    assert details["score"] == value and config["min_score"] <= value <= config["max_score"]
    assert details["uncertainty"]["confidence_interval"]["method"] == "jackknife"
    assert not any(row["evaluation"]["is_correct"] for row in rows) and len(rows) == 5

    found = build_results(run)
    assert found["results"]["job"]["perplexity,none"] == value
    assert found["results"]["job"]["perplexity_stderr,none"] == total.sample.compute_standard_error()
    assert found["higher_is_better"] == {"job": {"perplexity": False}}
    assert found["mlxrun"]["confidence_intervals"]["job"]["lower"] == interval.low

    [metric] = build_model_index([run])["model-index"][0]["results"][0]["metrics"]
    assert metric["value"] == pytest.approx(value, abs=1e-4) and metric["args"]["lines"] == 5
    [scored] = build_header(run)["results"]["scores"]
    assert scored["metrics"]["bits / bytes"]["value"] == value and scored["scored_samples"] == 5
    line = next(run.read_lines())
    assert build_sample(run, line)["scores"]["perplexity"]["value"] == line.score


async def test_a_line_that_failed_has_no_score(tmp_path: Path) -> None:
    run = await export(tmp_path, [*TEXTS, {**TEXTS[0], "id": "long", "max_tokens": 9}])
    _, rows = read_files(write_every_eval_ever(run, tmp_path / "eee"))
    assert len(rows) == 5 and run.summary.total.failed == 1
    samples = [build_sample(run, line) for line in run.read_lines()]
    assert [bool(sample["scores"]) for sample in samples].count(False) == 1
    texts = [path for path in write_lm_eval_files(run, tmp_path) if path.name.startswith("samples")]
    assert len(texts[0].read_text().splitlines()) == 5


async def test_several_units_are_no_one_figure(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="its lines have no score in one unit, which the formats need"):
        await export(tmp_path, [*TEXTS, *chats(2)])
