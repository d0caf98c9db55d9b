"""Records of Every Eval Ever, checked by its own schemas (in every_eval_ever/, with their licence)."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator, ValidationError

from mlxrun.evals.exports.every_eval_ever import SCHEMA_VERSION, TOTAL, write_every_eval_ever
from mlxrun.evals.exports.exported_run import ExportedRun, ExportNames
from mlxrun.evals.run_folders.run_folder import RunFolder
from tests.helpers.batch_fakes import Bench, chats, write_job
from tests.helpers.export_fakes import SCORED, finish_rich_job

SCHEMAS = Path(__file__).parent / "every_eval_ever"


def make_validator(name: str) -> Draft7Validator:
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    assert schema["version"] == SCHEMA_VERSION
    return Draft7Validator(schema)


def read_files(paths: list[Path]) -> tuple[Any, list[Any]]:
    """Both files, after the schemas have accepted them."""
    whole, lines = paths
    record = json.loads(whole.read_text())
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    make_validator("eval").validate(record)
    check = make_validator("instance_level_eval")
    for row in rows:
        check.validate(row)
    return record, rows


async def test_the_schemas_accept_a_run(tmp_path: Path) -> None:
    run = await finish_rich_job(tmp_path, organization="acme", dataset="acme/sums@abc")
    record, rows = read_files(write_every_eval_ever(run, tmp_path / "out"))
    results = {each["evaluation_result_id"]: each for each in record["evaluation_results"]}
    assert {TOTAL, "a", "a b", "pick", "total/pass@2"} <= set(results)
    total = results[TOTAL]
    assert total["score_details"]["score"] == pytest.approx(run.summary.total.scores.value)
    interval = run.summary.total.interval
    assert interval is not None
    uncertainty = total["score_details"]["uncertainty"]
    assert uncertainty["num_samples"] == len(SCORED)
    assert uncertainty["confidence_interval"] == {
        "lower": interval.low,
        "upper": interval.high,
        "confidence_level": 0.95,
        "method": interval.method,
    }
    assert total["source_data"] == {
        "dataset_name": "job",
        "source_type": "hf_dataset",
        "hf_repo": "acme/sums",
        "samples_number": len(SCORED),
        "additional_details": {"revision": "abc"},
    }
    assert record["model_info"]["developer"] == "acme"
    assert record["source_metadata"]["source_organization_name"] == "acme"
    assert record["eval_library"]["additional_details"]["status"] == "complete"
    assert [row["sample_id"] for row in rows] == list(SCORED)


async def test_lines(tmp_path: Path) -> None:
    run = await finish_rich_job(tmp_path)
    _, found = read_files(write_every_eval_ever(run, tmp_path / "out"))
    rows = {row["sample_id"]: row for row in found}
    right = rows["right"]
    assert right["input"] == {"raw": "say 7", "reference": ["say 7", "seven"]}
    assert right["evaluation"] == {"score": 1, "is_correct": True}
    assert right["answer_attribution"][0]["extraction_method"] == "contains"
    assert right["answer_attribution"][0]["extracted_value"] == "say 7"
    assert rows["letter"]["input"]["choices"] == ["one", "two"]
    assert rows["long"]["error"].startswith("the engine got") and rows["long"]["output"] == {"raw": []}
    assert rows["long"]["evaluation"] == {"score": 0, "is_correct": False}


async def test_files_are_where_the_datastore_wants_them(tmp_path: Path) -> None:
    """At data/COLLECTION/DEVELOPER/MODEL/, named by a UUID of version 4, and they refer to each other."""
    run = await finish_rich_job(tmp_path, task="my sums/1")
    whole, lines = write_every_eval_ever(run, tmp_path)
    place = whole.relative_to(tmp_path).as_posix()
    assert re.fullmatch(r"data/my_sums_1/acme/tiny/[0-9a-f-]{14}4[0-9a-f-]{21}\.json", place)
    record, rows = read_files([whole, lines])
    details = record["detailed_evaluation_results"]
    assert tmp_path / details["file_path"] == lines and details["total_rows"] == len(rows)
    assert details["checksum"] == hashlib.sha256(lines.read_bytes()).hexdigest()
    assert {row["evaluation_id"] for row in rows} == {record["evaluation_id"]}
    assert {row["model_id"] for row in rows} == {record["model_info"]["id"]}
    assert write_every_eval_ever(run, tmp_path) == [whole, lines]


async def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, chats(9)))
    await bench.run(limit=4)
    run = ExportedRun.check(RunFolder.open(bench.job), ExportNames(), partial=True)
    record, _ = read_files(write_every_eval_ever(run, tmp_path))
    assert record["eval_library"]["additional_details"]["status"] == "partial: 4 of 9 lines"
    assert record["model_info"]["developer"] == "unknown"


async def test_the_schema_refuses_a_wrong_record(tmp_path: Path) -> None:
    """The twin: a score that is text is no score."""
    whole, lines = write_every_eval_ever(await finish_rich_job(tmp_path), tmp_path)
    record = json.loads(whole.read_text())
    record["evaluation_results"][0]["score_details"]["score"] = "1"
    whole.write_text(json.dumps(record))
    with pytest.raises(ValidationError):
        read_files([whole, lines])
