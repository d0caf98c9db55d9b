"""Keeps verdicts of the load check between starts: FOLDER/<key, hex>.json in mlxrun's cache folder.

A verdict has what was compared, and how the model is computed because of that. It also has the times of
products by which the form of weights was chosen. A file that is damaged, or of another format, is ignored,
and the model is compared again. Models that are refused have no verdict.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mlxrun.core import cache_home
from mlxrun.core.durable_writes import write_atomically
from mlxrun.core.limited_json import load_json
from mlxrun.model.hooks.weight_form import WeightForm
from mlxrun.model.kv.ragged.quantized_buffer import KVQuantization
from mlxrun.model.load_check.report import ComparedWindow, LoadCheck, LoadCheckReport
from mlxrun.model.load_check.verdict_key import FORMAT
from mlxrun.model.run.chunk_grouping import PrefillSharing
from mlxrun.model.run.compute_methods import ComputeMethods

log = logging.getLogger(__name__)
DAY = 86400  # seconds
# Fields of a report that belong to the load itself; the others are kept.
_OWN = ("weights", "hooks", "kept", "surprise")


@dataclass(frozen=True, slots=True)
class KeptVerdict:
    """A verdict. `form`: the weights' form, for which alone it holds (`describe_form`); `seconds`: times of
    products, as in WeightForm. `report`: without the weights and the hooks of a load."""

    form: str
    seconds: Mapping[str, Mapping[int, float]]
    report: LoadCheckReport


class VerdictFile:
    """The file of a key. Other files may be there of other keys."""

    def __init__(self, key: str, folder: Path | None = None) -> None:
        self._key = key
        self._path = (folder or cache_home.find_cache_home() / "load-checks") / f"{key}.json"

    def read(self) -> KeptVerdict | None:
        """The verdict; None if there is none that can be used."""
        try:
            content = self._path.read_bytes()
        except OSError:
            return None
        try:
            verdict = _decode(content, self._key)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            text = "load check: %s is ignored, and the model is compared again: %s"
            log.warning(text, self._path, str(error) or type(error).__name__)
            return None
        return verdict if 0 <= time.time() - verdict.report.compared < cache_home.KEPT_DAYS * DAY else None

    def write(self, verdict: KeptVerdict) -> None:
        """Keep a verdict, and remove what is too old. A folder that cannot be written to is not used."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(self._path, _encode(verdict, self._key), durable=False)
            self._remove_old()
        except OSError as error:
            log.debug("load check: %s: not kept: %s", self._path, error)

    def remove(self) -> None:
        """Keep the verdict no more."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _remove_old(self) -> None:
        oldest = time.time() - cache_home.KEPT_DAYS * DAY
        for path in self._path.parent.glob("*.json"):
            with suppress(OSError):
                if path.stat().st_mtime < oldest:
                    path.unlink()


def describe_form(form: WeightForm) -> str:
    """The form of weights without measured times, which differ each time they are measured."""
    return json.dumps(asdict(replace(form, seconds={}, reason="")), sort_keys=True)


def _encode(verdict: KeptVerdict, key: str) -> bytes:
    report = {name: value for name, value in asdict(verdict.report).items() if name not in _OWN}
    body = {"key": key, "form": verdict.form, "seconds": verdict.seconds, "report": report}
    text = json.dumps(body)
    return json.dumps({"format": FORMAT, "digest": _digest(text), "body": text}).encode()


def _decode(content: bytes, key: str) -> KeptVerdict:
    """ValueError or another error if this is no verdict of this key."""
    outer = load_json(content)
    if outer["format"] != FORMAT:
        raise ValueError(f"it has the format {outer['format']}, and not {FORMAT}")
    if outer["digest"] != _digest(outer["body"]):
        raise ValueError("its checksum is wrong: it was changed or damaged")
    body = load_json(outer["body"])
    if body["key"] != key:
        raise ValueError("it is the verdict of something else")
    seconds = {name: {int(rows): each for rows, each in t.items()} for name, t in body["seconds"].items()}
    return KeptVerdict(body["form"], seconds, _build_report(body["report"]))


def _build_report(fields: dict[str, Any]) -> LoadCheckReport:
    methods = dict(fields.pop("methods"))
    methods["sharing"] = PrefillSharing(**methods["sharing"])
    methods["narrow_widths"] = tuple(methods["narrow_widths"])
    if methods["quantization"] is not None:
        methods["quantization"] = KVQuantization(*methods["quantization"])
    return LoadCheckReport(
        ComputeMethods(**methods),
        tuple(LoadCheck(**check) for check in fields.pop("checks")),
        separate=tuple(fields.pop("separate")),
        windows=tuple(ComparedWindow(**window) for window in fields.pop("windows")),
        **fields,
        kept=True,
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
