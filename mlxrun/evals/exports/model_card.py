"""Scores for a model's page on the Hugging Face hub, in one of its two formats.

README.md's metadata has a `model-index`, described by `huggingface_hub.EvalResult`. `.eval_results/NAME.yaml`
has entries described by `huggingface_hub.EvalResultEntry`, for benchmarks that are data sets of the hub.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from mlxrun.core.durable_writes import write_atomically
from mlxrun.core.errors import JobError
from mlxrun.evals.exports.exported_run import ExportedRun, name_metric
from mlxrun.jobs.scoring.intervals import CONFIDENCE
from mlxrun.jobs.scoring.score_groups import ScoreGroup

Json = dict[str, Any]
SUFFIXES = (".md", ".yaml", ".yml")
_TASK_TYPE = "text-generation"
_DIGITS = 4
_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_MODEL_INDEX = re.compile(r"^model-index:.*\n(?:(?:[ \t-].*)?\r?\n)*", re.MULTILINE)


def write_model_card(runs: Sequence[ExportedRun], path: Path) -> None:
    """Write the results of runs: a README's metadata if `path` ends in .md, else the newer format. In an
    existing README only the `model-index` is replaced; a file of the newer format is replaced whole. JobError
    for another suffix, a missing name, runs of several models, or a README that cannot be changed."""
    if path.suffix not in SUFFIXES:
        raise JobError(f"{path}: the name of a model card's scores ends in {', '.join(SUFFIXES)}")
    if path.suffix == ".md":
        text = _merge_index(path, _dump(build_model_index(runs)))
    else:
        text = _dump([build_entry(run) for run in runs])
    write_atomically(path, text.encode())


def _merge_index(path: Path, index: str) -> str:
    """The text of the card at `path`, if there is one, with `index` in place of its `model-index`: everything
    else stays as it is. JobError if its front matter cannot be read."""
    try:
        old = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return f"---\n{index}---\n"
    except UnicodeDecodeError as error:
        raise JobError(f"{path}: is not UTF-8: {error}; give another -o") from error
    found = _FRONT_MATTER.match(old)
    if found is None:
        return f"---\n{index}---\n{old}"
    before = _load_front_matter(path, found[1])
    text = _MODEL_INDEX.sub("", f"{found[1]}")
    merged = f"{text}{index}"
    kept = {key: value for key, value in before.items() if key != "model-index"}
    if _load_front_matter(path, merged) != kept | yaml.safe_load(index):
        raise JobError(
            f"{path}: its model-index cannot be replaced where it is; remove it, or give another -o"
        )
    return f"{old[: found.start(1)]}{merged}{old[found.end(1) :]}"


def _load_front_matter(path: Path, text: str) -> Json:
    try:
        found = yaml.safe_load(text) or {}
    except RecursionError as error:
        raise JobError(f"{path}: its front matter is nested too deeply; give another -o") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: of a date or a number that is none
        reason = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
        raise JobError(f"{path}: its front matter is not YAML: {reason}; give another -o") from error
    if not isinstance(found, dict):
        raise JobError(f"{path}: its front matter is no mapping; give another -o")
    return found


def build_model_index(runs: Sequence[ExportedRun]) -> Json:
    """Build the `model-index` of runs of one model. JobError if the runs are of several models."""
    models = sorted({run.model for run in runs})
    if len(models) > 1:
        raise JobError(
            f"a model card is of one model, and these runs are of {', '.join(models)}; export each"
        )
    results = []
    for run in runs:
        dataset, revision = run.names.split_dataset()
        results.append(
            {
                "task": {"type": _TASK_TYPE, "name": run.task},
                "dataset": {"type": dataset or run.task, "name": run.task} | revision,
                "metrics": _list_metrics(run),
            }
        )
    return {"model-index": [{"name": models[0], "results": results}]}


def _list_metrics(run: ExportedRun) -> list[Json]:
    """The score of all lines, the named metrics, and the score of each group if there are several."""
    summary = run.summary
    found = [_build_metric(run, summary.total, name_metric(summary.total))]
    for name, scores in summary.total.metrics.items():
        failed, unscored = summary.total.failed, summary.total.unscored
        metric = ScoreGroup(scores=scores, matches={name}, failed=failed, unscored=unscored)
        found.append(_build_metric(run, metric, name))
    if len(summary.groups) > 1:
        found += [
            _build_metric(run, group, f"{name_metric(group)} ({name})")
            for name, group in sorted(summary.groups.items())
        ]
    return found


def _build_metric(run: ExportedRun, group: ScoreGroup, name: str) -> Json:
    facts: Json = {"lines": group.sample.count, "failed": group.failed}
    if group.unscored:
        facts["unscored"] = group.unscored
    if (error := group.sample.compute_standard_error()) is not None:
        facts["stderr"] = round(error, _DIGITS)
    if group.interval is not None:
        facts["confidence_interval"] = _round_interval(group)
        facts |= {"confidence_level": CONFIDENCE, "interval_method": group.interval.method}
    facts["mlxrun"] = run.versions.get("mlxrun")
    if run.cell is not None:
        facts["cell"] = run.cell
    if not run.is_complete:
        facts["lines_of_the_job"] = run.run.total
    metric, value = name_metric(group), _round(group.value)
    return {"type": metric, "value": value, "name": name, "args": facts}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


def _round_interval(group: ScoreGroup) -> list[float]:
    assert group.interval is not None
    return [round(group.interval.low, _DIGITS), round(group.interval.high, _DIGITS)]


def build_entry(run: ExportedRun) -> Json:
    """Build the entry of a run in .eval_results/NAME.yaml. JobError without the hub id of the benchmark."""
    dataset, revision = run.names.split_dataset()
    if "/" not in dataset:
        raise JobError(
            f"{run.run.paths.out}: this format names a benchmark of the hub: give its --dataset OWNER/NAME "
            "and --task, or an output whose name ends in .md for a README's metadata"
        )
    total = run.summary.total
    texts = [f"{total.sample.count} lines", f"mlxrun {run.versions.get('mlxrun', '')}".strip()]
    if total.interval is not None:
        low, high = _round_interval(total)
        texts.insert(1, f"{CONFIDENCE:.0%} interval {low} to {high} ({total.interval.method})")
    if total.failed:
        texts.append(f"{total.failed} failed")
    if total.unscored:
        texts.append(f"{total.unscored} unscored")
    if not run.is_complete:
        texts.append(f"partial: of {run.run.total} lines")
    found = {"id": dataset, "task_id": run.task} | revision
    value = _round(total.value)
    return {"dataset": found, "value": value, "date": run.ended, "notes": "; ".join(texts)}


def _dump(value: Any) -> str:
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1000))
