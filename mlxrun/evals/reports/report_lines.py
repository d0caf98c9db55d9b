"""The lines of runs as a report shows them, with small copies of their prompts' images. Lines of several runs
with the same id are one row.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path
from typing import Any

from mlxrun.api.text.media.media_kinds import AUDIO, find_sound_kind
from mlxrun.config.settings import MediaSettings
from mlxrun.core.errors import MediaError
from mlxrun.evals.prompt_messages import PromptMessage, dump_text, list_messages
from mlxrun.evals.run_folders.run_line import RunLine
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.records.journal import LineTiming
from mlxrun.jobs.scoring.answer_text import is_cut

RIGHT, PARTLY, WRONG, MEASURED, FAILED, UNSCORED, ABSENT = (
    "c",
    "p",
    "w",
    "m",
    "f",
    "u",
    "-",
)  # marks of a line in a run
CUT, EMPTY, FLIP = 1, 2, 4  # flags; FLIP: of all runs of a line that they score differently
MAX_TEXT = 6000  # characters of a text that are shown without `--full`
PREVIEW = 90  # characters of an answer in the table
SIDE = 320  # pixels of a thumbnail's longer side
FULL_SIDE = 1024  # with `--full`
MAX_BYTES = 30_000_000  # of all thumbnails and sounds of a report
MAX_SOUND = 3_000_000  # bytes of one sound


@dataclass(slots=True)
class RunAnswer:
    """One run's answer to a line. `output`: tokens; `took`: seconds; `shown`: what the page shows as
    details."""

    mark: str
    flags: int
    score: float | None
    answer: str
    expected: str
    output: int
    took: float | None
    shown: dict[str, Any]


# Of each message its role, its text (which may be cut), and its media: data URL and name. Messages of a
# transcript have a fourth part: `reasoning`, `calls` and `tool`.
Prompt = list[Any]


@dataclass(slots=True)
class LineRow:
    """One line by id, with an answer for each run that has it. `prompt`: None if it is unknown; `digest`:
    digest of the whole prompt."""

    id: str
    task: int
    group: str | None
    prompt: Prompt | None = None
    digest: bytes = b""
    answers: dict[int, RunAnswer] = field(default_factory=dict)

    @property
    def marks(self) -> set[str]:
        return {answer.mark for answer in self.answers.values()}

    @property
    def is_flip(self) -> bool:
        """Whether runs score the line differently."""
        return len({answer.score for answer in self.answers.values() if answer.score is not None}) > 1


def cut_text(text: str, full: bool) -> str | list[Any]:
    """Cut the middle out of a long text. The result has the beginning, the number of missing characters, and
    the end. A short text, or any with `full`, is returned as it is."""
    if full or len(text) <= MAX_TEXT:
        return text
    head, tail = MAX_TEXT * 2 // 3, MAX_TEXT // 3
    return [text[:head], len(text) - head - tail, text[-tail:]]


class Thumbnails:
    """Makes thumbnails of images below `folder`, and of data URLs. Nothing is fetched. Thumbnails are kept,
    as many lines may have the same image."""

    def __init__(self, folder: Path, media: Mapping[str, Any], *, full: bool = False) -> None:
        """`media`: that section of the run's config. Images may be wherever the run could read them."""
        from mlxrun.api.text.media.media_sources import MediaSources

        known = {key: media[key] for key in ("roots", "max_bytes", "max_pixels") if key in media}
        settings = MediaSettings(**known)
        self._sources, self._max_pixels = MediaSources(settings, folder), settings.max_pixels
        self._side = FULL_SIDE if full else SIDE
        self._made: dict[bytes, tuple[str, str]] = {}
        self._bytes = 0

    def make(self, source: str, *, is_sound: bool = False) -> tuple[str, str]:
        """Return the thumbnail of a data URL or path as a data URL, and a name for the image; of a sound all
        of it. If that fails, the first is empty and the second gives the reason."""
        key = hashlib.sha256(f"{is_sound}{source}".encode("utf-8", "surrogatepass")).digest()
        if key not in self._made:
            kind = "sound" if is_sound else "image"
            name = f"inline {kind}" if source.startswith("data:") else source[:200]
            try:
                self._made[key] = self._encode(source, is_sound), name
            except MediaError as error:
                self._made[key] = "", f"{name} ({error})"
        return self._made[key]

    def _encode(self, source: str, is_sound: bool) -> str:
        if self._bytes >= MAX_BYTES:
            raise MediaError(f"the media of this report have more than {MAX_BYTES // 10**6} MB")
        url = self._encode_sound(source) if is_sound else self._encode_image(source)
        self._bytes += len(url)
        return url

    def _encode_image(self, source: str) -> str:
        from mlxrun.api.text.media.image_decoding import decode_image, read_header

        data = self._sources.read_local(source)
        header = read_header(data, self._max_pixels)
        image = decode_image(data, max(1, min(header.width, header.height) // (4 * self._side)))
        image.thumbnail((self._side, self._side))
        file = io.BytesIO()
        image.save(file, "WEBP", quality=80)
        return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()

    def _encode_sound(self, source: str) -> str:
        """A sound as it is, if its beginning is that of a known kind."""
        data = self._sources.read_local(source, AUDIO)
        kind = find_sound_kind(data)
        if kind is None or len(data) > MAX_SOUND:
            raise MediaError(
                "no WAV, MP3, FLAC, M4A, Ogg or WebM file" if kind is None else "too large for a report"
            )
        return f"data:audio/{kind};base64," + base64.b64encode(data).decode()


class LineRows:
    """Collects the lines of all runs. With `full`, texts are kept whole."""

    def __init__(self, *, full: bool = False) -> None:
        self.rows: dict[tuple[int, str], LineRow] = {}
        self._full = full

    def add(
        self,
        run: int,
        task: int,
        line: RunLine,
        timing: LineTiming | None = None,
        thumbnails: Thumbnails | None = None,
    ) -> RunAnswer:
        """Add a line of one run. `task`: the number of its task in a suite. The prompt is shown once, unless
        another run has another prompt."""
        row = self.rows.get((task, line.id))
        if row is None:
            row = self.rows[task, line.id] = LineRow(line.id, task, line.group)
        answer = build_answer(line, timing, lambda text: cut_text(text, self._full))
        if isinstance(line.line, JobLine):
            prompt, digest = self._build_prompt(line.line, thumbnails)
            if row.prompt is None:
                row.prompt, row.digest = prompt, digest
            elif digest != row.digest:
                answer.shown["prompt"] = prompt
        if turns := self._build_turns(line, thumbnails):
            answer.shown["transcript"] = turns
        row.answers[run] = answer
        return answer

    def _build_prompt(self, line: JobLine, thumbnails: Thumbnails | None) -> tuple[Prompt, bytes]:
        """The prompt as it is shown, and a digest of all of it. Images become thumbnails here, so that a
        report does not hold those of all lines."""
        prompt, digest = [], hashlib.sha256()
        for message in list_messages(line.body):
            media = _make_media(message, thumbnails)
            digest.update(repr((message.role, message.text, media)).encode("utf-8", "surrogatepass"))
            prompt.append((message.role, cut_text(message.text, self._full), media))
        return prompt, digest.digest()

    def _build_turns(self, line: RunLine, thumbnails: Thumbnails | None) -> Prompt:
        """The transcript after the prompt, as it is shown."""
        shown = {(each.role, each.text) for each in line.messages} if line.turns else set()
        turns = list(dropwhile(lambda turn: (turn.message.role, turn.message.text) in shown, line.turns))
        if turns and turns[-1].message.text == line.answer and not (turns[-1].calls or turns[-1].reasoning):
            turns.pop()  # it is shown as the answer
        found = []
        for turn in turns:
            more = {
                "reasoning": cut_text(turn.reasoning, self._full),
                "calls": [(name, cut_text(text, self._full)) for name, text in turn.calls],
                "tool": turn.tool,
            }
            more = {key: value for key, value in more.items() if value}
            text, media = cut_text(turn.message.text, self._full), _make_media(turn.message, thumbnails)
            found.append((turn.message.role, text, media, more))
        return found


def _make_media(message: PromptMessage, thumbnails: Thumbnails | None) -> list[tuple[str, str]]:
    """The images and sounds of a message, each as a data URL with its name."""
    if thumbnails is None:
        return [("", "")] * (len(message.images) + len(message.sounds))
    images = [thumbnails.make(url) for url in message.images]
    return images + [thumbnails.make(url, is_sound=True) for url in message.sounds]


def build_answer(line: RunLine, timing: LineTiming | None, cut: Callable[[str], Any]) -> RunAnswer:
    """Build what a report shows of one line of one run."""
    text, result = line.answer, line.eval
    flags = 0 if text is None else CUT * is_cut(line.response) + EMPTY * (not text.strip())
    prompt, output = line.tokens
    talk = line.record.get("agent")
    details: dict[str, Any] = {
        "agent": {key: cut(dump_text(value)) for key, value in talk.items()}
        if isinstance(talk, dict)
        else None,
        "answer": None if text is None else cut(text),
        "reasoning": cut(line.reasoning) if line.reasoning else None,
        "error": None if line.error is None else cut(line.error),
        "choices": [cut(each) for each in line.answers[1:]] or None,
        "finish": line.finish,
        "cut": bool(flags & CUT) or None,
        "empty": bool(flags & EMPTY) or None,
        "tokens": [prompt, output] if prompt or output else None,
        "times": timing and [timing.waited, timing.first, timing.took, timing.reused],
    }
    shown = {key: value for key, value in details.items() if value is not None}
    shown |= _describe_score(line, result)
    expected = result.get("expected")
    return RunAnswer(
        mark=_choose_mark(line),
        flags=flags,
        score=line.score,
        answer=make_preview(line.error or text or ""),
        expected="" if expected is None else make_preview(dump_text(expected)),
        output=output,
        took=None if timing is None else timing.took,
        shown=shown,
    )


def _describe_score(line: RunLine, result: Mapping[str, Any]) -> dict[str, Any]:
    """The result of scoring; `expected` and `extracted` may be any JSON value, null too."""
    if not result:
        return {}
    found = {key: result.get(key) for key in ("match", "expected", "extracted")}
    optional = {
        "note": str(note)[:MAX_TEXT] if (note := result.get("note") or result.get("comment")) else None,
        "scores": result.get("scores"),
        "choice_scores": result.get("choices"),
        "score": line.score,
    }
    return found | {key: value for key, value in optional.items() if value is not None}


def _choose_mark(line: RunLine) -> str:
    if line.error is not None:
        return FAILED
    if line.score is None or "note" in line.eval:
        return UNSCORED
    if "measure" in line.eval:
        return MEASURED
    return RIGHT if line.score == 1 else PARTLY if line.score > 0 else WRONG


def make_preview(text: str) -> str:
    """Return the beginning of a text, on one line."""
    return " ".join(text[: 2 * PREVIEW].split())[:PREVIEW]
