"""What differs between two runs beside their answers: model, template, settings, seeds, versions, device."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlxrun.evals.comparisons.comparison_lines import PairedLines
from mlxrun.evals.run_folders.run_folder import RunFolder
from mlxrun.jobs.records.manifest_checks import describe_changes, flatten_settings
from mlxrun.jobs.records.manifest_environment import RunEnvironment
from mlxrun.jobs.run.progress import pluralize

# What a model brings along. `describe_changes` leaves it out where the model is another one.
_OF_MODEL = {
    "model.template": "the chat template",
    "model.tokenizer": "the tokenizer",
    "processor": "the image processor",
}


def list_differences(runs: Sequence[tuple[RunFolder, RunFolder]], lines: PairedLines) -> list[str]:
    """Phrases such as `model.path is B, was A`, each once; `was` is the first side. `lines`: of the runs."""
    found: dict[str, None] = {}
    for first, second in runs:
        found |= dict.fromkeys(_compare_manifests(first.manifest, second.manifest))
    for key, count in sorted(lines.settings.items()):
        was, now = (json.dumps(value, ensure_ascii=False)[:60] for value in lines.examples[key])
        found[f"`{key}` of {pluralize(count, 'line')} is {now}, was {was}"] = None
    return list(found)


def _compare_manifests(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    settings = old["settings"], new["settings"]
    yield from describe_changes(*settings, str(old["model"]["path"]), str(new["model"]["path"]))
    if settings[0]["model"]["model"] != settings[1]["model"]["model"]:
        was, now = (flatten_settings(each) for each in settings)
        for key, name in _OF_MODEL.items():
            if was.get(key) != now.get(key):
                yield f"{name} is another one"
        for key in ("model.dtype", "model.kind", "context"):
            if was.get(key) != now.get(key):
                yield f"{key} is {now.get(key)}, was {was.get(key)}"
    seeds = [each.get("seeds", {}).get("base") for each in (old, new)]
    if seeds[0] != seeds[1]:
        yield f"the base of the seeds is {seeds[1]}, was {seeds[0]}"
    yield from RunEnvironment.parse(old).list_differences(RunEnvironment.parse(new))
    if old.get("scoring") != new.get("scoring"):
        texts = [json.dumps(each.get("scoring"), ensure_ascii=False)[:60] for each in (old, new)]
        yield f"scoring is {texts[1]}, was {texts[0]}"
    for which, manifest in (("first", old), ("second", new)):
        if manifest.get("mixed"):
            yield f"the {which} run has answers of several versions or devices"
