"""The files of lm-evaluation-harness with `--log_samples`: results_DATE.json and samples_TASK_DATE.jsonl.

The shapes are those of `lm_eval.result_schema` and of `EvaluationTracker`, in a folder named after the model.
A run with several groups becomes a group of tasks, one for each.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from mlxrun.evals.exports.exported_run import ExportedRun, describe_interval, dump_json, name_metric
from mlxrun.evals.prompt_messages import dump_text
from mlxrun.evals.run_folders.run_line import RunLine
from mlxrun.jobs.scoring.measure import HIGHER
from mlxrun.jobs.scoring.score_groups import ScoreGroup

Json = dict[str, Any]
FILTER = "none"
_VERSION = 1  # of a task


def write_lm_eval_files(run: ExportedRun, folder: Path) -> list[Path]:
    """Write the files below `folder`, and return their paths, the results first."""
    folder = folder / sanitize_model_name(run.model)
    folder.mkdir(parents=True, exist_ok=True)
    date = datetime.fromisoformat(run.ended).replace(tzinfo=None).isoformat().replace(":", "-")
    tasks = name_tasks(run)
    digests = {task: hashlib.sha256() for task in tasks.values()}
    paths = {task: folder / f"samples_{task}_{date}.jsonl" for task in tasks.values()}
    with ExitStack() as files:
        outputs: dict[str, TextIO] = {
            task: files.enter_context(path.open("w", encoding="utf-8")) for task, path in paths.items()
        }
        for line in run.read_lines():
            if not run.has_score(line):
                continue
            task = tasks[str(line.group)]
            sample = build_sample(run, line)
            digests[task].update(
                "".join(sample[f"{name}_hash"] for name in ("doc", "prompt", "target")).encode()
            )
            outputs[task].write(dump_json(sample) + "\n")
    results = build_results(run) | {"task_hashes": {task: each.hexdigest() for task, each in digests.items()}}
    path = folder / f"results_{date}.json"
    path.write_text(dump_json(results, indent=2) + "\n", encoding="utf-8")
    return [path, *paths.values()]


def sanitize_model_name(name: str) -> str:
    """Return the name of a model's folder, as lm-eval makes it."""
    return re.sub(r"[\"<>:/|\\?*\[\]]+", "__", name)


def name_tasks(run: ExportedRun) -> dict[str, str]:
    """Name the task of each group, without characters that separate the parts of file names."""
    task = re.sub(r"[^\w.-]", "_", run.task)
    groups = sorted(run.summary.groups)
    if len(groups) == 1:
        return {groups[0]: task}
    found: dict[str, str] = {}
    for group in groups:
        name = f"{task}_{re.sub(r'[^a-zA-Z0-9.-]', '_', group)}"
        while name in found.values():  # groups that differ in special characters only
            name += "_"
        found[group] = name
    return found


def build_results(run: ExportedRun) -> Json:
    """Build the content of the results file, without the hashes of the samples."""
    tasks, summary = name_tasks(run), run.summary
    names = {tasks[group]: found for group, found in summary.groups.items()}
    whole = re.sub(r"[^\w.-]", "_", run.task)
    if len(names) > 1:
        groups = {whole: _build_task(whole, summary.total)}
        subtasks = {whole: list(names), **{name: [] for name in names}}
    else:
        groups, subtasks = {}, {name: [] for name in names}
    results = {name: _build_task(name, found) for name, found in names.items()}
    counts = {name: found.sample.count for name, found in names.items()}
    config: Json = {"task": run.task, "dataset_path": run.names.dataset or str(run.run.paths.job.absolute())}
    config |= {"output_type": "generate_until", "generation_kwargs": summary.generation or {}}
    configs = {name: {**config, "task": name, "metadata": {"version": _VERSION}} for name in names}
    found = {
        "results": groups | results,
        **({"groups": groups} if groups else {}),
        "group_subtasks": subtasks,
        "configs": configs,
        "versions": dict.fromkeys(names, _VERSION),
        "n-shot": dict.fromkeys(names, 0),
        "higher_is_better": {
            name: {
                metric: name_metric(group) != metric or group.measure.better == HIGHER
                for metric in _list_means(group)
            }
            for name, group in names.items()
        },
        "n-samples": {name: {"original": count, "effective": count} for name, count in counts.items()},
    }
    return found | _build_provenance(run)


def _build_provenance(run: ExportedRun) -> Json:
    """Which model, settings and versions, and when."""
    started, ended = datetime.fromisoformat(run.started), datetime.fromisoformat(run.ended)
    return {
        "config": {
            "model": "mlxrun",
            "model_args": {"path": run.model},
            "model_sha": run.manifest["model"].get("fingerprint"),
            "batch_size": None,
            "batch_sizes": [],
            "device": dump_text(run.manifest.get("device") or {}),
            "use_cache": None,
            "limit": None if run.is_complete else run.summary.lines,
            "gen_kwargs": run.summary.generation or {},
            "random_seed": run.manifest["seeds"]["base"],
        },
        "date": started.timestamp(),
        "transformers_version": run.versions.get("transformers", "N/A"),
        "model_source": "mlxrun",
        "model_name": run.model,
        "model_name_sanitized": sanitize_model_name(run.model),
        "chat_template_sha": run.manifest["model"].get("template_sha256"),
        "total_evaluation_time_seconds": str((ended - started).total_seconds()),
        "mlxrun": run.facts | {"versions": run.versions, "confidence_intervals": _list_intervals(run)},
    }


def _list_intervals(run: ExportedRun) -> Json:
    """The interval of each group's score, for which lm-eval has no place."""
    found = {group: each.interval for group, each in run.summary.groups.items()}
    found[run.task] = run.summary.total.interval
    return {name: describe_interval(each) for name, each in found.items() if each is not None}


def _list_means(group: ScoreGroup) -> Json:
    """The means of a group by metric; the score goes first, and again under its own name."""
    return {name_metric(group): group.sample} | {
        name: scores for name, scores in group.metrics.items() if name != name_metric(group)
    }


def _build_task(name: str, group: ScoreGroup) -> Json:
    found: Json = {"name": name, "alias": name, "sample_len": group.sample.count}
    for metric, scores in _list_means(group).items():
        error = scores.compute_standard_error()
        found[f"{metric},{FILTER}"] = scores.value
        if error is not None:
            found[f"{metric}_stderr,{FILTER}"] = error
    return found


def build_sample(run: ExportedRun, line: RunLine) -> Json:
    """Build one line of a samples file."""
    group = run.summary.groups[str(line.group)]
    of_answer = ("score", "extracted", "scores", "choices", "note", "comment")
    wanted = {name: value for name, value in line.eval.items() if name not in of_answer}
    doc: Json = {"id": line.id, "body": line.body, "eval": wanted}
    target = ", ".join(line.targets)
    arguments = list(_list_arguments(line))
    filtered = [response[0] for _, _, response in arguments]
    if not line.option_logprobs and line.extracted is not None:
        filtered = [line.extracted]
    is_lost = line.error is not None or "note" in line.eval
    zeros = dict.fromkeys(group.metrics, 0.0) if is_lost else {}
    scores = {name_metric(group): line.score, **zeros, **line.metrics}
    return {
        "doc_id": (line.number or 0) - 1,
        "doc": doc,
        "target": target,
        "arguments": {
            f"gen_args_{at}": {"arg_0": prompt, "arg_1": rest}
            for at, (prompt, rest, _) in enumerate(arguments)
        },
        "resps": [response for _, _, response in arguments],
        "filtered_resps": filtered,
        "filter": FILTER,
        "metrics": list(scores),
        "doc_hash": _hash(dump_json(doc)),
        "prompt_hash": _hash(arguments[0][0]),
        "target_hash": _hash(target),
        **scores,
    }


def _list_arguments(line: RunLine) -> Iterator[tuple[str, Any, list[Any]]]:
    """For each request: the prompt, the continuation or the settings, and the responses. What is scored by
    logprobs has a request for each option; whether a continuation is the greedy one is not known."""
    options = line.option_logprobs
    for context, continuation, logprob in options:
        yield context, continuation, [[str(logprob), "unknown"]]
    if not options:
        yield line.prompt, line.generation, line.answers or [""]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
