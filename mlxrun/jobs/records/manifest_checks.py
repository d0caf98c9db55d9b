"""Decides by the manifest of earlier runs whether a job may go on in the same output."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlxrun.core.errors import JobError
from mlxrun.jobs.lines.line_keys import digest_settings
from mlxrun.jobs.records.run_paths import JobPaths

UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError)  # errors of a damaged manifest


def check_owner(paths: JobPaths, sha256: str) -> None:
    """JobError if the output belongs to another job; `sha256`: of the job file.

    A job file is the same if it has the same content or the same path, absolute or relative to the output
    (the folder of both may move). An unreadable manifest is ignored.
    """
    try:
        found = json.loads(paths.manifest.read_bytes())
        job, out, digest = found["input"]["path"], found["output"]["path"], found["input"]["sha256"]
        same = digest == sha256 or _relative_to_output(paths.job, paths.out) == _relative_to_output(
            Path(job), Path(out)
        )
        same = same or os.path.realpath(job) == os.path.realpath(paths.job)
        done = f"{found['counts']['done']} of {found['counts']['total']} lines done"
    except UNREADABLE:
        return
    if not same:
        raise JobError(
            f"{paths.out}: is the output of another job, {job} ({done}); give another -o, or start over with "
            f"--fresh, which moves its answers to {paths.earlier}"
        )


def check_settings(paths: JobPaths, settings: Mapping[str, Any], journal: str | None, model: str) -> None:
    """JobError that says what differs if the output has answers of other settings than these, which are what
    `collect_settings` returns. `journal`: the digest in the journal; `model`: the path of the model."""
    try:
        found = json.loads(paths.manifest.read_bytes())
        old, old_model = dict(found["settings"]), str(found["model"]["path"])
        old = old if isinstance(old["model"]["model"], str) else {}
    except UNREADABLE:
        old, old_model = {}, model
    digest = digest_settings(settings)
    known = journal or (digest_settings(old) if old else digest)
    if known == digest or not paths.has_answers():
        return
    what = "; ".join(describe_changes(old, settings, old_model, model)) if old else "or on another model"
    raise JobError(
        f"{paths.out}: its answers were computed with other settings ({what}); give another -o, or start "
        f"over with --fresh, which moves them to {paths.earlier}"
    )


def describe_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], old_model: str, new_model: str
) -> Iterator[str]:
    """What differs between two settings. If the model does, its template, limits and so on are not listed."""
    if old.get("model", {}).get("model") != new["model"]["model"]:
        other = old_model if old_model != new_model else "the same path with other files"
        yield f"model.path is {new_model}, was {other}"
        old = {"model": new["model"], **{key: old.get(key) for key in _OWN_SETTINGS}}
        new = {"model": new["model"], **{key: new.get(key) for key in _OWN_SETTINGS}}
    was, now = flatten_settings(old), flatten_settings(new)
    for key in sorted(was.keys() | now.keys()):
        if was.get(key) != now.get(key):
            name = _SETTING_NAMES.get(key, key)
            values = (json.dumps(each.get(key), ensure_ascii=False)[:60] for each in (now, was))
            yield f"{name} has changed" if key in _DIGESTS else "{} is {}, was {}".format(name, *values)


_OWN_SETTINGS = (
    "engine",
    "parsers",
    "sampling",
    "stored_bits",
    "kv",
    "prefill",
    "structured",
)  # those that do not depend on the model
_SETTING_NAMES = {
    "model.template": "the chat template",
    "model.tokenizer": "the tokenizer",
    "processor": "the image processor",
    "pdf_dpi": "media.pdf_dpi",
    "video.video_fps": "media.video_fps",
    "video.video_max_frames": "media.video_max_frames",
    "video.video_max_pixels": "media.video_max_pixels",
    "context": "the context length",
    "ends": "the end tokens",
    "engine.chunk": "scheduler.chunk",
    "stored_bits": "cache.stored_bits",
    **{f"kv.{key}": f"cache.kv_{key}" for key in ("bits", "group_size", "start")},
}
_DIGESTS = ("model.model", "model.draft", "model.template", "model.tokenizer", "processor")


def flatten_settings(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A mapping of mappings with dotted keys; null is the same as a missing key."""
    found: dict[str, Any] = {}
    for key, each in value.items():
        if isinstance(each, Mapping):
            found |= flatten_settings(each, f"{prefix}{key}.")
        elif each is not None:
            found[prefix + key] = each
    return found


def _relative_to_output(job: Path, out: Path) -> str:
    """The job's path as seen from the folder of its output."""
    return os.path.relpath(job, out.parent)
