"""Records of Every Eval Ever (https://github.com/evaleval/every_eval_ever), schema 0.3.0.

A run becomes one aggregate file and one file with its lines, at the places that the project's datastore
prescribes: data/TASK/DEVELOPER/MODEL/UUID.json and UUID_samples.jsonl.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from mlxrun.evals.exports.exported_run import (
    ExportedRun,
    build_usage,
    describe_interval,
    dump_json,
    name_metric,
)
from mlxrun.evals.prompt_messages import dump_text
from mlxrun.evals.run_folders.run_line import RunLine
from mlxrun.jobs.records.manifest import hash_file
from mlxrun.jobs.scoring.intervals import ScoreMean
from mlxrun.jobs.scoring.measure import LOWER, SHARE, MeasuredLines
from mlxrun.jobs.scoring.score_groups import ScoreGroup

Json = dict[str, Any]
SCHEMA_VERSION = "0.3.0"
TOTAL = "total"
UNKNOWN = "unknown"
_NUMBERS = ("temperature", "top_p", "top_k")  # of a generation config that have a field of their own


def write_every_eval_ever(run: ExportedRun, folder: Path) -> list[Path]:
    """Write both files below `folder`, and return their paths, the aggregate first."""
    name = uuid.UUID(bytes=bytes.fromhex(run.digest[:32]), version=4)
    # Names become parts of a path on any system.
    names = [re.sub(r"[^\w.+-]", "_", each).rstrip(".") for each in (run.task, *split_model_name(run))]
    place = Path("data", *(each or "_" for each in names))
    (folder / place).mkdir(parents=True, exist_ok=True)
    lines = place / f"{name}_samples.jsonl"
    rows = 0
    with (folder / lines).open("w", encoding="utf-8") as file:
        for row in list_rows(run):
            file.write(dump_json(row) + "\n")
            rows += 1
    record = build_record(run)
    record["detailed_evaluation_results"] = {
        "format": "jsonl",
        "file_path": lines.as_posix(),
        "hash_algorithm": "sha256",
        "checksum": hash_file(folder / lines),
        "total_rows": rows,
    }
    whole = folder / place / f"{name}.json"
    whole.write_text(dump_json(record, indent=2) + "\n", encoding="utf-8")
    return [whole, folder / lines]


def split_model_name(run: ExportedRun) -> tuple[str, str]:
    """Return the developer and the name of the model, as in a hub id."""
    developer, _, name = run.model.rpartition("/")
    return developer.rpartition("/")[2] or UNKNOWN, name


def build_record(run: ExportedRun) -> Json:
    """Build the aggregate, without the reference to its lines."""
    ended = _get_timestamp(run.ended)
    groups, total = run.summary.groups, run.summary.total
    results = [_build_result(run, TOTAL, total, total.sample, None)]
    results += [_build_result(run, TOTAL, total, scores, name) for name, scores in total.metrics.items()]
    several = sorted(groups.items()) if len(groups) > 1 else ()
    results += [_build_result(run, name, group, group.sample, None) for name, group in several]
    status = "complete" if run.is_complete else f"partial: {run.summary.lines} of {run.run.total} lines"
    details = {key: dump_text(value) for key, value in run.facts.items() if value is not None}
    return {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": name_evaluation(run),
        "evaluation_timestamp": ended,
        "retrieved_timestamp": ended,
        "source_metadata": {
            "source_name": "mlxrun",
            "source_type": "evaluation_run",
            "source_organization_name": run.names.organization or UNKNOWN,
            "evaluator_relationship": "other",
        },
        "eval_library": {
            "name": "mlxrun",
            "version": run.versions.get("mlxrun", UNKNOWN),
            "additional_details": {**run.versions, **details, "status": status},
        },
        "model_info": _build_model(run),
        "evaluation_results": results,
    }


def name_evaluation(run: ExportedRun) -> str:
    """Return the id of the evaluation, to which its lines refer."""
    return f"{run.task}/{run.model}/{_get_timestamp(run.ended)}"


def _get_timestamp(time: str) -> str:
    return str(int(datetime.fromisoformat(time).timestamp()))


def _build_model(run: ExportedRun) -> Json:
    developer, _ = split_model_name(run)
    model = run.manifest["settings"].get("model", {})
    details = {key: dump_text(model[key]) for key in ("kind", "dtype") if model.get(key) is not None}
    return {
        "name": run.model,
        "id": run.model,
        "developer": developer,
        "inference_engine": {"name": "mlxrun", "version": run.versions.get("mlxrun", UNKNOWN)},
        "additional_details": {
            **details,
            "deployment_type": "self_deployed",
            "model_availability": "open_weights" if "/" in run.model else UNKNOWN,
        },
    }


def _build_result(
    run: ExportedRun, name: str, group: ScoreGroup, scores: ScoreMean | MeasuredLines, metric: str | None
) -> Json:
    """One aggregate result: of a group's score, or of one of the named metrics of all lines."""
    shown, measure = metric or name_metric(group), SHARE if metric else group.measure
    what, bounds = "Mean", (0.0, 1.0)
    if not measure.is_share:
        own = [score for lines in group.measured.values() for score in (*lines.scores, lines.value or 0.0)]
        what, bounds = measure.aggregate, (min(own), max(own))
    return {
        "evaluation_result_id": name if metric is None else f"{name}/{metric}",
        "evaluation_name": run.task if name == TOTAL else f"{run.task}/{name}",
        "source_data": _build_source(run, scores.count),
        "evaluation_timestamp": _get_timestamp(run.ended),
        "metric_config": {
            "evaluation_description": f"{what} over the lines, each scored by {shown}",
            "metric_id": shown,
            "metric_name": shown,
            "metric_unit": "proportion" if measure.is_share else measure.unit or "number",
            "lower_is_better": measure.better == LOWER,
            "score_type": "continuous",
            "min_score": bounds[0],
            "max_score": bounds[1],
        },
        "score_details": {
            "score": scores.value,
            "details": {
                "failed_lines": str(group.failed),
                "unscored_lines": str(group.unscored),
                "matches": ", ".join(sorted(group.matches)),
            },
            "uncertainty": _build_uncertainty(scores),
        },
        "generation_config": _build_generation(run),
    }


def _build_source(run: ExportedRun, count: int) -> Json:
    dataset, revision = run.names.split_dataset()
    if not dataset:
        path = str(run.run.paths.job.absolute())
        details = {"path": path, "sha256": run.facts["job_sha256"], "samples": str(count)}
        return {"dataset_name": run.task, "source_type": "other", "additional_details": details}
    found = {"dataset_name": run.task, "source_type": "hf_dataset", "hf_repo": dataset}
    return {**found, "samples_number": count, **({"additional_details": revision} if revision else {})}


def _build_uncertainty(scores: ScoreMean | MeasuredLines) -> Json:
    found: Json = {"num_samples": scores.count}
    error, interval = scores.compute_standard_error(), scores.compute_interval()
    if error is not None:
        found["standard_error"] = {"value": error, "method": "analytic"}
    if interval is not None:
        found["confidence_interval"] = describe_interval(interval, "confidence_level")
    return found


def _build_generation(run: ExportedRun) -> Json:
    """The settings that all lines share; the defaults of the config fill in what no line sets."""
    sampling = {key: value for key, value in run.manifest["config"]["sampling"].items() if value is not None}
    shared = sampling | (run.summary.generation or {})
    most = shared.pop("max_tokens", shared.pop("max_completion_tokens", None))
    arguments = {key: shared.pop(key) for key in _NUMBERS if key in shared}
    if isinstance(most, int) and most > 0:
        arguments["max_tokens"] = most
    return {
        "generation_args": arguments,
        "additional_details": {key: dump_text(value) for key, value in shared.items()},
    }


def list_rows(run: ExportedRun) -> Iterator[Json]:
    """Yield the scored lines; each refers to the result of all lines."""
    for line in run.read_lines():
        if run.has_score(line):
            yield build_row(run, line)


def build_row(run: ExportedRun, line: RunLine) -> Json:
    """Build the row of one line. It always has one turn, as earlier turns are a part of its input."""
    prompt, targets = line.prompt, line.targets
    row: Json = {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": name_evaluation(run),
        "model_id": run.model,
        "evaluation_name": run.task,
        "evaluation_result_id": TOTAL,
        "sample_id": line.id,
        "sample_hash": hashlib.sha256((prompt + "".join(targets)).encode("utf-8", "replace")).hexdigest(),
        "interaction_type": "single_turn",
        "input": {"raw": prompt, "reference": targets},
        "output": {"raw": line.answers},
        "answer_attribution": [],
        "evaluation": {"score": line.score, "is_correct": line.score == 1 and "measure" not in line.eval},
        "token_usage": build_usage(*line.tokens),
        "metadata": {"group": line.group, "finish": str(line.finish)},
    }
    if line.options:
        row["input"]["choices"] = line.options
    if line.reasoning:
        row["output"]["reasoning_trace"] = [line.reasoning]
    if line.extracted is not None:
        found = {"turn_idx": 0, "source": "output.raw", "extracted_value": line.extracted}
        row["answer_attribution"] = [{**found, "extraction_method": line.match, "is_terminal": True}]
    if line.error is not None:
        row["error"] = line.error
    return row
