"""The report of the load check: its comparisons, and how the model is computed because of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mlxrun.core.media_names import PLURALS, MediaKind
from mlxrun.model.hooks.install import InstalledHook
from mlxrun.model.hooks.weight_form import PLAIN_WEIGHTS, WeightForm
from mlxrun.model.load_check.rounding import LogitDifference
from mlxrun.model.run.compute_methods import ComputeMethods

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadCheck:
    """One comparison. `difference`: largest |logits - reference| / std; None if the method raised `error`.
    `limit`: the largest difference that passes. `instead`: what is done if it did not pass."""

    name: str
    passed: bool
    difference: float | None = None
    error: str | None = None
    limit: float | None = None
    instead: str = ""

    def describe(self) -> str:
        """The result as words: the error, or the difference and its limit."""
        if self.difference is None:
            return str(self.error)
        limit = "" if self.limit is None else f" (limit {self.limit:g})"
        return f"logits differ by {self.difference:.1e} standard deviations{limit}"

    def describe_instead(self) -> str:
        """The end of a message about a failed check; empty if nothing replaces the method."""
        return f"; instead: {self.instead}" if self.instead else ""


def run_check(
    name: str, compare: Callable[[], LogitDifference], limit: float, instead: str = ""
) -> LoadCheck:
    """The check of the difference that `compare` returns. It fails with this `limit` if that raises, as a
    library may for unexpected input. `instead`: what is done if it fails."""
    try:
        found = compare()
    except Exception as error:
        log.debug("load check: %s raised", name, exc_info=True)
        return LoadCheck(name, False, None, f"{type(error).__name__}: {error}", limit, instead)
    return LoadCheck(name, found.passed, found.difference, None, found.limit, "" if found.passed else instead)


@dataclass(frozen=True, slots=True)
class ComparedWindow:
    """A sliding window of the model, in tokens. `compared`: its size in the load check, whose prompts are
    longer."""

    size: int
    compared: int


@dataclass(frozen=True, slots=True)
class LoadCheckReport:
    """How the model is computed, and the comparisons that led there.

    `weights`: their form in memory. `long_rows`: why no row of many tokens was compared, empty if one was.
    `images`, `videos`, `audio`: why they were not compared, or are refused; else empty, also if the model
    takes none.
    `refused`, `features_cached`, `separate` (whether each of a kind is encoded by a call of its own): passed
    to other callers of the same model (`follow`). `seconds`: duration of the comparisons, None if there were
    none. `hooks`: the changes to the library's model. `compared`: the time of the comparisons, in seconds
    since 1970; `kept`: they are those of an earlier start. `surprise`: what a later comparison found against
    the methods in use, empty if nothing. `peak`: bytes that the comparisons took beside the weights, at most.
    """

    methods: ComputeMethods
    checks: tuple[LoadCheck, ...]
    weights: WeightForm = PLAIN_WEIGHTS
    windows: tuple[ComparedWindow, ...] = ()
    long_rows: str = ""
    images: str = ""
    videos: str = ""
    audio: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    features_cached: bool = True
    separate: tuple[MediaKind, ...] = ()
    seconds: float | None = None
    hooks: tuple[InstalledHook, ...] = ()
    compared: float = 0.0
    kept: bool = False
    surprise: str = ""
    peak: int = 0

    def add(self, checks: Sequence[LoadCheck], **changes: Any) -> LoadCheckReport:
        """The report with more checks, and with other values of its fields."""
        return replace(self, checks=(*self.checks, *checks), **changes)

    def log_failures(self) -> None:
        """Log a warning for each method that is not used."""
        for check in self.checks:
            if not check.passed:
                text = "load check: %s is not used for this model: %s%s"
                log.warning(text, check.name, check.describe(), check.describe_instead())

    def describe(self) -> dict[str, Any]:
        """The report as JSON values, for /v1/status."""
        found = [{"name": check.name, **describe_check(check)} for check in self.checks]
        windows = [asdict(window) for window in self.windows]
        notes = {name: getattr(self, name) for name in ("long_rows", *PLURALS.values())}
        took = {"seconds": self.seconds, "hooks": {hook.name: hook.places for hook in self.hooks}}
        age = {"kept": self.kept, "age": self.compute_age(), "surprise": self.surprise or None}
        return {**describe_methods(self.methods), "checks": found, "windows": windows, **notes, **took, **age}

    def describe_time(self) -> str:
        """How long the comparisons took, and when that was if it was at an earlier start."""
        age = (self.compute_age() or 0.0) / 3600
        when = f" at an earlier start, {age:.1f} hours ago" if self.kept else ""
        return f"{self.seconds or 0.0:.1f} s{when}"

    def compute_age(self) -> float | None:
        """Seconds since the comparisons; None if there were none."""
        return None if self.seconds is None else round(max(time.time() - self.compared, 0.0), 1)


def describe_check(check: LoadCheck) -> dict[str, Any]:
    """The result of a check without its name, as JSON values."""
    names = ("passed", "difference", "limit", "error", "instead")
    return {name: getattr(check, name) for name in names}


def describe_methods(methods: ComputeMethods) -> dict[str, Any]:
    """How the model is computed, as JSON values."""
    quantization = methods.quantization
    kept = {} if quantization is None else {f"kv_{k}": value for k, value in quantization._asdict().items()}
    return {
        "decode": methods.decode,
        "attention": methods.attention,
        "fused_prompts": methods.fused_prompts,
        "prefill_rows": methods.sharing.max_rows,
        "padded": methods.sharing.max_padded,
        "library_chunks": methods.library_chunks,
        "snapshots": methods.snapshots,
        **kept,
    }
