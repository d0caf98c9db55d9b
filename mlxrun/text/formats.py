"""How an answer is split into text, thought and tool calls: what the text side needs of the parsers package.

`Formats` belongs to a model, a `Parser` to one answer. Without formats all is text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Kind = Literal["text", "reasoning", "call"]


class Delta(Protocol):
    """A piece of an answer; see parsers/delta.py for what the fields mean."""

    @property
    def kind(self) -> Kind: ...
    @property
    def text(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...


class Parser(Protocol):
    """One answer's state."""

    @property
    def markers(self) -> Collection[str]:
        """Texts of special tokens that it reads: they are no content, but must reach it."""

    def feed(self, text: str) -> Sequence[Delta]: ...
    def finish(self) -> Sequence[Delta]: ...


class Thinking(Protocol):
    """How a model writes thoughts: see parsers.family.Thinking."""

    @property
    def bounds(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """What begins a thought, and what may end it."""

    @property
    def anywhere(self) -> bool:
        """Whether one may begin in the middle of text; else only where text begins."""

    @property
    def closing(self) -> str:
        """What ends one early."""

    def opened(self, prompt: str) -> bool:
        """Whether a prompt leaves one open."""


class AnswerFormats(Protocol):
    """The formats that a model writes."""

    def parser(self, tools: Sequence[Mapping[str, Any]] | None, prompt: str, name: str) -> Parser:
        """A parser for one answer to the rendered `prompt`, in which `tools` may be called; ids of calls
        follow from `name`."""

    def frame(self, name: str) -> tuple[str, str] | None:
        """The text before and after the JSON of the arguments of a call; None: the format is another."""

    def thought(self, prompt: str) -> tuple[str, str] | None:
        """What begins and what ends a thought that may come first in an answer to `prompt`; an empty
        beginning: the prompt has begun it. None: there is none."""

    @property
    def thinking(self) -> Thinking | None:
        """How thoughts are written; None: not known."""

    @property
    def opener(self) -> str:
        """What every call begins with, and nothing else does; empty if the format has no such marker."""

    @property
    def between(self) -> str | None:
        """Text between two calls that follow each other; None: one is all there can be."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of plain text."""

    text: str
    kind: Kind = "text"
    index: int = 0
    id: str = ""
    name: str = ""


class PlainParser:
    """All is text."""

    markers: tuple[str, ...] = ()

    def feed(self, text: str) -> Sequence[Delta]:
        return [TextDelta(text)] if text else []

    def finish(self) -> Sequence[Delta]:
        return []


class PlainFormats:
    """Formats of a model that has none."""

    opener = ""
    between: str | None = None
    thinking: Thinking | None = None

    def parser(self, tools: Sequence[Mapping[str, Any]] | None, prompt: str, name: str) -> Parser:
        return PlainParser()

    def frame(self, name: str) -> tuple[str, str] | None:
        return None

    def thought(self, prompt: str) -> tuple[str, str] | None:
        return None


PLAIN = PlainFormats()
