"""What scoring one answer finds, and who can find it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Verdict:
    """The score of one answer, from 0 to 1. `extracted`: what was compared in it, None if there was nothing;
    `note`: why it could not be scored, if it could not; `scores`: further ones by name; `comment`: what a
    scorer says of an answer that it has scored."""

    score: float
    extracted: Any = None
    note: str | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    comment: str | None = None


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """An answer with what it belongs to. `text`: without reasoning; `index`: of its choice; `line`: the job
    line as data; `body`: the response body without reasoning."""

    text: str
    index: int
    expected: Any
    line: Mapping[str, Any]
    body: Mapping[str, Any]


class Scorer(Protocol):
    """Scores answers in place of a match. `name` and `digest` (of what decides the scores) are recorded."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str: ...

    def score(self, answer: ScoredAnswer) -> Verdict:
        """Score one answer; a failure becomes a note. ScorerEnded if a process of the scorer was ended."""


@dataclass(frozen=True, slots=True)
class UnloadedScorer:
    """Stands for a scorer where lines are read and not scored."""

    name: str
    digest: str = ""

    def score(self, answer: ScoredAnswer) -> Verdict:
        return Verdict(0, note=f"the scorer {self.name} was not loaded")
