"""What is asked of a model that transcribes sound, and what it gives: segments of text with their times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class SpeechModel:
    """A model that transcribes. `rate`: samples a second that it takes; `languages`: the names of languages
    by code, empty if it only knows English; `context_length`: tokens of a window and the text before it."""

    rate: int
    languages: Mapping[str, str]
    context_length: int


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A sound to transcribe, and how. `samples`: float32 [n], one channel, at the model's rate; `language`: a
    code, None to detect it; `prompt`: text before its first window; `words`: whether words get times.

    `temperature` 0 is greedy. A window that comes out badly is then tried again at higher ones.
    """

    samples: Any
    language: str | None = None
    prompt: str = ""
    temperature: float = 0.0
    words: bool = False


class TimedWord(NamedTuple):
    """A word with its punctuation. Times are in seconds."""

    word: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class TranscriptSegment:
    """A phrase. `seek`: the hundredths of a second at which its window begins; times are in seconds. Numbers
    that the model does not give are None."""

    seek: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float | None
    compression_ratio: float | None
    no_speech_prob: float | None
    words: tuple[TimedWord, ...] = ()


class Transcript(NamedTuple):
    """A transcript, or the part of one that was made since the last event. `language`: a code, empty if it is
    not known yet."""

    text: str = ""
    language: str = ""
    segments: tuple[TranscriptSegment, ...] = ()

    def join(self, later: Transcript) -> Transcript:
        """Return this part followed by `later`."""
        return Transcript(
            self.text + later.text, later.language or self.language, self.segments + later.segments
        )
