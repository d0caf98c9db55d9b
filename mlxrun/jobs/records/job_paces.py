"""How fast jobs ran on this machine, in a small file of their own, and an estimate of the next job's time.

A run takes the time of its prompt tokens and of its output tokens, and nobody knows how it was shared between
the two. Another job has other numbers of both. Whatever the shares were, its time grows at least by the
smaller of the two ratios and at most by the larger one. So the estimate is a range.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mlxrun.core.durable_writes import write_atomically

log = logging.getLogger(__name__)

MOST_STORED = 200  # runs of all models; older ones are dropped
MOST_USED = 5  # newest runs of a model, for an estimate


@dataclass(frozen=True, slots=True)
class JobPace:
    """One run of a job. `model`: the digest of its files; `ended`: seconds since 1970; `seconds`: without
    loading the model; `lines`: answered ones; `prompt_tokens`: those found in the cache included."""

    model: str
    ended: int
    seconds: float
    lines: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    def describe(self) -> dict[str, Any]:
        """The line of the file: the counts, and the prompt and output tokens per second of the whole run."""
        computed = self.prompt_tokens - self.cached_tokens
        rates = {"prefill_rate": computed / self.seconds, "decode_rate": self.output_tokens / self.seconds}
        return asdict(self) | {name: round(rate, 1) for name, rate in rates.items()}


def note_pace(path: Path, pace: JobPace) -> None:
    """Add a run to the file. A file that cannot be written is named in the log."""
    lines = [json.dumps(each.describe()) for each in (*_read_file(path), pace)][-MOST_STORED:]
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, "".join(f"{line}\n" for line in lines).encode(), durable=False)
    except OSError as error:
        log.warning("%s: the speed of this job could not be noted: %s", path, error.strerror)


def read_paces(path: Path, model: str) -> list[JobPace]:
    """The newest runs of a model, the oldest first; none if nothing can be read."""
    return [pace for pace in _read_file(path) if pace.model == model][-MOST_USED:]


def _read_file(path: Path) -> list[JobPace]:
    """The runs of the file. Lines that are none are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    return [pace for line in lines if (pace := _parse_line(line)) is not None]


def _parse_line(line: str) -> JobPace | None:
    try:
        found = json.loads(line)
        pace = JobPace(**{field.name: found[field.name] for field in fields(JobPace)})
        counts = pace.lines, pace.prompt_tokens, pace.cached_tokens, pace.output_tokens
        is_sound = pace.seconds > 0 and pace.lines > 0 and min(counts) >= 0 and max(counts) < 2**63
        return pace if is_sound and isinstance(pace.model, str) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def estimate_seconds(
    paces: Sequence[JobPace], lines: int, prompt_tokens: int, max_tokens: int
) -> tuple[float, float] | None:
    """The least and the most seconds of a job, by earlier runs; None without any. Answers count as long as
    they were in each of these runs, but not longer than `max_tokens` in total."""
    found = [_scale(pace, lines, prompt_tokens, max_tokens) for pace in paces]
    bounds = [each for each in found if each]
    if not bounds:
        return None
    return min(map(min, bounds)), max(map(max, bounds))


def _scale(pace: JobPace, lines: int, prompt_tokens: int, max_tokens: int) -> list[float]:
    """The seconds of a job if it were like this run: by the ratio of prompt tokens, and of output tokens."""
    output = min(pace.output_tokens / pace.lines * lines, max_tokens)
    pairs = (prompt_tokens, pace.prompt_tokens), (output, pace.output_tokens)
    return [pace.seconds * wanted / had for wanted, had in pairs if had]
