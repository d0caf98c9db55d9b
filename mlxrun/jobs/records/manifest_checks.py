"""Decides, by the manifest of earlier runs, whether a job may go on in the same output. The job, its settings
and its environment must be the same.

The environment is what a run was computed with: versions of libraries, device, BLAS and its threads. Two runs
with different environments may give other bytes, so `--mixed` is needed to have their answers in one output.
Facts that change no answer (free memory, the version of Python) are recorded and not compared.

Without engine.reproducible and engine.blas_threads, the process's environment decides the number of BLAS
threads. That number is named where bytes are compared. It stops no run, as answers depend on their batch
anyway.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlxrun.core.errors import JobError
from mlxrun.core.text_files import read_json
from mlxrun.jobs.lines.line_keys import digest_settings
from mlxrun.jobs.records.run_paths import JobPaths

_LIBRARIES = (
    "mlxrun",
    "mlx",
    "mlx-cpu",
    "mlx-cuda-12",
    "mlx-cuda-13",
    "nvidia-cublas-cu12",
    "nvidia-cublas",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvrtc",
    "mlx-lm",
    "mlx-vlm",
    "transformers",
    "tokenizers",
    "numpy",
    "llguidance",
    "pillow",
    # What makes prompts and pixels.
    "jinja2",
    "sentencepiece",
    "tiktoken",
    "pypdfium2",
    "opencv-python",
)
_NOT_COMPARED = ("python",)
# The facts on which results depend (DECISIVE in model/machine/device.py), as messages call them.
_DEVICE = {
    "backend": "the backend",
    "name": "the device",
    "architecture": "the architecture",
    "compile": "compiling (MLX_DISABLE_COMPILE, or g++ on a CPU)",
    "tf32": "TF32 (MLX_ENABLE_TF32)",
    "libc": "the C library",
    "blas": "the BLAS library",
    "blas_version": "the version of BLAS",
    "blas_kernel": "the BLAS kernel (OPENBLAS_CORETYPE)",
    "blas_threads": "the number of BLAS threads (engine.blas_threads)",
}
_THREADS, _FIXED, _VARIABLES = "blas_threads", "blas_threads_fixed", "variables"
_AS_FACTS = ("MLX_DISABLE_COMPILE", "MLX_ENABLE_TF32")  # variables whose effect is a fact of the device


def list_versions() -> dict[str, str]:
    """Return the versions of the libraries that compute the answers, without importing them."""
    return {"python": platform.python_version(), **_read_versions()}


@functools.cache  # all metadata of a package is parsed for it, 5 ms each, and suites ask for each cell
def _read_versions() -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # run from a source tree, or not needed on this platform
    return found


@dataclass(frozen=True, slots=True)
class RunEnvironment:
    """Versions and device of one run. None: unknown, as in files of earlier versions of mlxrun."""

    versions: Mapping[str, str] | None
    device: Mapping[str, Any] | None

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> RunEnvironment:
        """Parse the environment of a run, or of a whole manifest of format 1. Values of other types count as
        unknown."""
        versions, device = found.get("versions"), found.get("device")
        return cls(
            versions if isinstance(versions, Mapping) else None,
            device if isinstance(device, Mapping) else None,
        )

    def list_differences(self, new: RunEnvironment) -> list[str]:
        """List phrases that name what differs in `new`, such as `mlx is 0.31.0, was 0.30.1`. Facts that one
        of the two does not know are left out."""
        versions = {name: name for name in self.versions or () if name not in _NOT_COMPARED}
        of_versions = _compare(self.versions, new.versions, versions)
        of_variables = _compare_variables(self.device or {}, new.device or {})
        return [*of_versions, *_compare(self.device, new.device, _DEVICE), *of_variables]

    def list_obstacles(self, new: RunEnvironment) -> list[str]:
        """List the differences that forbid mixing lines. A number of threads that is not fixed is none, nor
        are variables: those that decide digits are facts of the device too."""
        return _leave_out_free(self).list_differences(_leave_out_free(new))


def _compare(
    old: Mapping[str, Any] | None, new: Mapping[str, Any] | None, names: Mapping[str, str]
) -> Iterator[str]:
    for key, name in names.items():
        if old and new and key in old and key in new and old[key] != new[key]:
            yield f"{name} is {_show(new[key])}, was {_show(old[key])}"


def _compare_variables(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """The variables of MLX that differ, where both sides know them."""
    was, now = old.get(_VARIABLES), new.get(_VARIABLES)
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for name in sorted((was.keys() | now.keys()) - {*_AS_FACTS}):
            values = ["not set" if each is None else repr(each) for each in (now.get(name), was.get(name))]
            if values[0] != values[1]:
                yield f"the variable {name} is {values[0]}, was {values[1]}"


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value or "not known")


def _leave_out_free(found: RunEnvironment) -> RunEnvironment:
    if found.device is None:
        return found
    left_out = {_VARIABLES} if found.device.get(_FIXED, True) else {_VARIABLES, _THREADS}
    return replace(found, device={key: each for key, each in found.device.items() if key not in left_out})


# What reading a damaged manifest, or another of mlxrun's files, raises.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


def check_owner(paths: JobPaths, sha256: str) -> None:
    """Raise JobError if the output belongs to another job. `sha256`: digest of the job file. It is the same
    job if the content or the path is the same. The path may be the same relative to the output, as the folder
    of both may move. An unreadable manifest is ignored."""
    try:
        found = read_json(paths.manifest)
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


def check_errors_file(paths: JobPaths) -> None:
    """Raise JobError if the failed lines of another job are in this job's file of errors. A job that an
    earlier version began beside such a job goes on as long as the other one has no failed lines."""
    twin = paths.find_twin()
    if twin is None or (paths.manifest.exists() and not _count_failed(twin)):
        return
    out = twin.parent.with_suffix("")
    raise JobError(f"{paths.errors}: is the file of failed lines of {out}, another output; give another -o")


def _count_failed(manifest: Path) -> int:
    try:
        return int(read_json(manifest)["counts"]["failed"])
    except UNREADABLE:
        return 0


def check_settings(paths: JobPaths, settings: Mapping[str, Any], journal: str | None, model: str) -> None:
    """Raise JobError that says what differs if the output has answers of other settings. `settings`: the
    result of `collect_settings`; `journal`: the settings digest in the journal; `model`: the model's path."""
    try:
        found = read_json(paths.manifest)
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
    """Yield what differs between two settings. If the models differ, what follows from the model (template,
    limits) is not listed."""
    if old.get("model", {}).get("model") != new["model"]["model"]:
        other = old_model if old_model != new_model else "the same path with other files"
        yield f"model.path is {new_model}, was {other}"
        old = {"model": new["model"], **{key: old.get(key) for key in _OWN_SETTINGS}}
        new = {"model": new["model"], **{key: new.get(key) for key in _OWN_SETTINGS}}
    was, now = flatten_settings(old), flatten_settings(new)
    for key in sorted(was.keys() | now.keys()):
        if was.get(key) != now.get(key):
            name = SETTING_NAMES.get(key, key)
            changed = f"{name} has changed"
            yield changed if key in _DIGESTS else describe_change(name, was.get(key), now.get(key))


def describe_change(name: str, was: object, now: object) -> str:
    """Describe a value that has changed, by the beginnings of both, where these differ."""
    old, new = (json.dumps(each, ensure_ascii=False)[:_SHOWN_VALUE] for each in (was, now))
    return f"{name} has changed" if old == new else f"{name} is {new}, was {old}"


_SHOWN_VALUE = 60  # characters
# Those that do not depend on the model.
_OWN_SETTINGS = ("engine", "parsers", "sampling", "stored_bits", "kv", "prefill", "structured", "user")
# Settings as messages call them, where that is not their key.
SETTING_NAMES = {
    "user.model.model": "the model of the user (batch.user_model)",
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
    "engine.budget": "scheduler.prefill_budget",
    "stored_bits": "cache.stored_bits",
    **{f"kv.{key}": f"cache.kv_{key}" for key in ("bits", "group_size", "start")},
}
_DIGESTS = (
    "model.model",
    "model.draft",
    "model.template",
    "model.tokenizer",
    "processor",
    "user.model.model",
)


def flatten_settings(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a mapping of mappings to dotted keys. Null is the same as a missing key."""
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
