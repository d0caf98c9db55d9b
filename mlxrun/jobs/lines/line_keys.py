"""Line keys decide whether a stored answer still belongs to a line.

    key = digest(custom_id, url, body, contents of the local files it names, settings, agent)

The settings are the model, its template and all options that change answers. In a server the digest also
takes the batch's id. Ids in answers are made of keys, and no two answers of a server may share one. `eval` is
not included: if only it has changed, the stored answer is scored again.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxrun.api.text.media.media_kinds import BASE64_PDF
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.config.settings import Config, MediaSettings, SchedulerSettings
from mlxrun.core.errors import JobError
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.scoring.eval_spec import EvalSpec

KEY_BYTES = 16
SHORT_BYTES = 8
_SCHEME = re.compile("[A-Za-z][A-Za-z0-9+.-]+:")  # data:, http: and others, which are refused
_EVAL_FORMAT = 4  # of the `eval` in records; answers that were scored by another one are scored again
_URL_PARTS = ("image_url", "video_url", "audio_url")
_FRAMES = ("video_fps", "video_max_frames", "video_max_pixels")  # settings that choose frames
_REMEMBERED = 4096  # image files whose digest is cached while a job is read


def dump_canonical(value: Any) -> bytes:
    """Dump a value as JSON bytes that are equal for equal values, whatever the order of keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def collect_settings(config: Config, model_info: ModelInfo) -> dict[str, Any]:
    """Collect all settings that change an answer."""
    model = {key: asdict(config.model)[key] for key in ("kind", "dtype", "chat_template_args")}
    if model_info.adapters:
        model["adapters"] = dict(model_info.adapters)
    if config.model.pooling is not None:
        model["pooling"] = config.model.pooling
    # What a draft model only drafts is verified.
    names = [name for name in model_info.digests if name != "draft" or config.prefill.sparse != "off"]
    engine: dict[str, Any] = {"reproducible": config.engine.reproducible}
    if config.engine.reproducible:
        engine["chunk"] = config.scheduler.chunk
        budget = config.scheduler.prefill_budget  # a smaller one than usual may limit the chunk
        if config.scheduler.chunk is None and budget < SchedulerSettings().prefill_budget:
            engine["budget"] = budget
        if config.scheduler.max_running != SchedulerSettings().max_running:
            engine["width"] = config.scheduler.max_running  # of a GPU's steps, by which rows round
        if config.model.dequantize != "auto":
            model["dequantize"] = config.model.dequantize
    parts: dict[str, Any] = {
        "model": {**{name: model_info.digests[name] for name in names}, **model},
        "context": model_info.context_length,
        "ends": sorted(model_info.eos_ids),
        "defaults": dict(model_info.defaults),
        "engine": engine,
        "parsers": asdict(config.parsers),
        "sampling": {key: value for key, value in asdict(config.sampling).items() if value is not None},
    }
    if model_info.processor_digest:
        parts["processor"] = model_info.processor_digest.hex()
    if model_info.vision and config.media.pdf_dpi != MediaSettings().pdf_dpi:
        parts["pdf_dpi"] = config.media.pdf_dpi
    if model_info.video_sampling is not None:
        frames = {name: getattr(config.media, name) for name in _FRAMES}
        if frames != {name: getattr(MediaSettings(), name) for name in _FRAMES}:
            parts["video"] = frames
    if config.structured.close_objects:
        parts["structured"] = asdict(config.structured)
    if config.cache.stored_bits is not None and config.cache.backend != "none":
        parts["stored_bits"] = config.cache.stored_bits
    if config.prefill.sparse != "off":
        parts["prefill"] = asdict(config.prefill)
    if config.cache.kv_bits is not None:
        parts["kv"] = {key: getattr(config.cache, f"kv_{key}") for key in ("bits", "group_size", "start")}
    return parts


def digest_settings(settings: Mapping[str, Any]) -> str:
    """Digest the result of `collect_settings` (SHA-256, hex)."""
    return hashlib.sha256(dump_canonical(settings)).hexdigest()


def digest_eval(wanted: EvalSpec | None) -> bytes:
    """Digest an `eval` to SHORT_BYTES bytes, which change if the line has to be scored again."""
    parts = wanted and [_EVAL_FORMAT, *wanted.list_digest_parts()]
    return digest_short(dump_canonical(parts))


def digest_short(data: bytes) -> bytes:
    """Digest data to SHORT_BYTES bytes."""
    return hashlib.blake2b(data, digest_size=SHORT_BYTES).digest()


class LineKeys:
    """Computes line keys for one job and one set of settings. `base`: the folder of relative image paths,
    None to refuse paths and read no file; `max_image`, `max_video`, `max_audio`: the largest files that
    are read, in bytes, None for any; `batch_id`: the id of a server's batch, empty for a command."""

    def __init__(
        self,
        settings: str,
        base: Path | None,
        max_image: int,
        batch_id: str = "",
        *,
        max_video: int | None = None,
        max_audio: int | None = None,
    ) -> None:
        self._settings = settings
        self._batch_id = batch_id
        self._base = base
        self._most = {"image_url": max_image, "video_url": max_video, "audio_url": max_audio}
        self._seen: dict[Path, tuple[tuple[int, int], str]] = {}

    def compute_key(self, line: JobLine) -> bytes:
        """Compute the key of a valid line, of KEY_BYTES bytes."""
        images = [self._digest_file(path, part) for path, part in _find_local_files(line.body)]
        parts = [self._settings, line.custom_id, line.url, line.body, images]
        return self._digest(dump_canonical(parts if line.agent is None else [*parts, line.agent]))

    def compute_bad_key(self, data: bytes, reason: str) -> bytes:
        """Compute the key of a bad line."""
        return self._digest(reason.encode("utf-8", "surrogatepass") + b"\0" + data)

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=KEY_BYTES, key=self._batch_id.encode()[:64]).digest()

    def _digest_file(self, name: str, part: str) -> str:
        """Digest of a file's bytes, or why the file is refused in a part of this kind."""
        if self._base is None:
            return "refused"
        path = self._base / name
        try:
            info = path.stat()
            most = self._most[part]
            if not stat.S_ISREG(info.st_mode) or (most is not None and info.st_size > most):
                return f"refused {info.st_size}"
            stamp = (info.st_size, info.st_mtime_ns)
            known = self._seen.get(path)
            if known is None or known[0] != stamp:
                with path.open("rb") as file:
                    known = stamp, hashlib.file_digest(file, "sha256").hexdigest()
                if len(self._seen) >= _REMEMBERED:
                    self._seen.clear()
                self._seen[path] = known
            return known[1]
        except (OSError, ValueError) as error:
            return f"unreadable {type(error).__name__}"


def is_local_path(url: str) -> bool:
    """Whether the URL of a medium is a path."""
    return not (_SCHEME.match(url) or url.startswith(BASE64_PDF))


def find_local_images(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the URLs of media in a line's body that are local paths, in order."""
    yield from (url for url, _ in _find_local_files(body))


def _find_local_files(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Those of messages and items, and the file of a transcription, each with the part that has its limit."""
    for name in ("messages", "input"):
        yield from _find_local_media(body.get(name))
    if isinstance(body.get("file"), str):
        yield from _find_local_media({"audio_url": body["file"]})


def _find_local_media(value: Any) -> Iterator[tuple[str, str]]:
    """The local files that messages or items name, in order, each with the part that has its limit."""
    if isinstance(value, list):
        for item in value:
            yield from _find_local_media(item)
    elif isinstance(value, dict):
        named = {name: value.get(name) for name in _URL_PARTS}
        urls = [(each.get("url") if isinstance(each, dict) else each, name) for name, each in named.items()]
        file = value.get("file")
        data = (file if isinstance(file, dict) else value).get("file_data")
        for url, name in (*urls, (data, "image_url"), (value.get("file_url"), "image_url")):
            if isinstance(url, str) and is_local_path(url):
                yield url, name
        for name in ("content", "output"):  # of a message, of a tool's result
            yield from _find_local_media(value.get(name))


def make_run_keys(manifest: Mapping[str, Any], settings: str, base: Path | None, batch: str = "") -> LineKeys:
    """Make what computes the line keys of an earlier run again, with the limits of media in its manifest. The
    other parameters are those of LineKeys. JobError if the manifest lacks these limits."""
    try:
        media = dict(manifest["config"]["media"])
        limits = {f"max_{kind}": media.get(f"{kind}_max_bytes") for kind in ("video", "audio")}
        return LineKeys(settings, base, int(media["max_bytes"]), batch, **limits)
    except (LookupError, TypeError, ValueError) as error:
        out = manifest["output"]["path"]
        raise JobError(f"the manifest of {out} is damaged: its config has no limits of media") from error
