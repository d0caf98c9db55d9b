"""Reads exported runs with Inspect's and lm-eval's own functions, and prints what they found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from inspect_ai.log import read_eval_log, read_eval_log_sample, read_eval_log_sample_summaries
from lm_eval.result_schema import EvalResults, SampleResult
from lm_eval.utils import (
    get_file_task_name,
    get_results_filenames,
    get_sample_results_filenames,
    hash_string,
    make_table,
)
from pydantic import TypeAdapter

# Their types in lm-eval are narrower than what it writes itself: a task's config has objects too.
UNCHECKED = "configs"


def read_inspect(path: str) -> Any:
    log, header = read_eval_log(path), read_eval_log(path, header_only=True)
    assert log.samples and log.results and header.results and header.samples is None
    assert header.results == log.results and header.eval == log.eval
    last = log.samples[-1]
    assert read_eval_log_sample(path, last.id, last.epoch).messages == last.messages
    summaries = read_eval_log_sample_summaries(path)
    (score,) = log.results.scores
    return {
        "status": log.status,
        "version": log.version,
        "model": log.eval.model,
        "task": log.eval.task,
        "packages": log.eval.packages,
        "metadata": log.eval.metadata,
        "dataset": log.eval.dataset.samples,
        "config": log.plan.config.model_dump(exclude_none=True),
        "counts": [log.results.total_samples, log.results.completed_samples],
        "scored": [score.scored_samples, score.unscored_samples],
        "metrics": {key: metric.model_dump() for key, metric in score.metrics.items()},
        "samples": {sample.id: describe_sample(sample) for sample in log.samples},
        "summaries": [
            [each.id, each.error, each.input if isinstance(each.input, str) else None] for each in summaries
        ],
        "usage": {name: usage.total_tokens for name, usage in log.stats.model_usage.items()},
    }


def describe_sample(sample: Any) -> Any:
    return {
        "messages": [[message.role, message.text] for message in sample.messages],
        "calls": [
            [call.function, call.arguments, call.parse_error]
            for message in sample.messages
            if message.role == "assistant"
            for call in message.tool_calls or ()
        ],
        "choices": [[one.message.text, one.stop_reason] for one in sample.output.choices],
        "options": sample.choices,
        "target": sample.target,
        "scores": {key: [score.value, score.answer] for key, score in (sample.scores or {}).items()},
        "error": sample.error and sample.error.message,
        "usage": sample.output.usage.total_tokens,
    }


def read_lm_eval(folder: str) -> Any:
    names = [str(path) for path in Path(folder).rglob("*.json*")]
    (path,) = get_results_filenames(names)
    results = json.loads(Path(path).read_text())
    checked = {key: value for key, value in results.items() if key != UNCHECKED}
    TypeAdapter(EvalResults).validate_python(checked)
    check = TypeAdapter(SampleResult)
    samples = {}
    for name in get_sample_results_filenames(names):
        rows = [json.loads(line) for line in Path(name).read_text().splitlines()]
        for row in rows:
            check.validate_python(row, strict=True)
        task = get_file_task_name(Path(name).name)
        samples[task] = rows
        hashes = "".join(row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in rows)
        assert results["task_hashes"][task] == hash_string(hashes)
        assert all(row["target_hash"] == hash_string(row["target"]) for row in rows)
    return {
        "results": results,
        "samples": samples,
        "tables": [make_table(results), make_table(results, "groups")],
    }


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    found = {
        "inspect": {path: read_inspect(path) for path in given["inspect"]},
        "lm_eval": {folder: read_lm_eval(folder) for folder in given["lm_eval"]},
    }
    print(json.dumps(found), flush=True)


main()
