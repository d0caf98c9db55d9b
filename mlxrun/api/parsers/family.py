"""The description of a format: one record for each family of tool calls or of reasoning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlxrun.api.parsers.delta import SPACE
from mlxrun.api.parsers.text_stream import Step, TextStream

Reader = Callable[[TextStream, str], Step[Any]]
Detector = Callable[[str, frozenset[str]], bool]


@dataclass(frozen=True, slots=True)
class ToolCallFamily:
    """A format of tool calls.

    `openers` begin a call anywhere in the text; `read` gets the stream behind one, and the opener. `bare` are
    texts that begin a call without a marker, and much else: they are not looked for in reasoning, and
    `read_bare` reads what stands behind one.
    `read_start` is tried where text begins, with "" as the opener: for formats without one. Both begin a call
    (`TextStream.begin_call`), or return without: then the opener is text, and what follows it is read again.
    `read_answer` replaces all of that, and the reasoning family: for formats that structure the whole answer.
    """

    name: str
    detect: Detector  # gets the chat template and the texts of all added tokens
    openers: tuple[str, ...] = ()
    read: Reader | None = None
    read_start: Reader | None = None
    read_answer: Callable[[TextStream], Step[None]] | None = None
    ignored: tuple[str, ...] = ()  # markers without a meaning of their own, which are left out of the text
    bare: tuple[str, ...] = ()
    read_bare: Reader | None = None
    ends: tuple[str, ...] = ()  # end tags that are left out behind a call, also where one is too many
    # Whether a call ends reasoning that was not closed: for openers that are special tokens, which text that
    # only mentions a call does not contain.
    ends_reasoning: bool = False
    # Turns a new id (`call_` and hexadecimal digits) into one that the model's template accepts.
    convert_id: Callable[[str], str] | None = None
    aliases: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()  # special tokens whose text the parser must see
    # Makes of a tool's name the text before and after a call's JSON arguments, for grammars; None: no JSON.
    prefix_suffix: Callable[[str], tuple[str, str]] | None = None
    # Makes the family of one model from the texts of its added tokens: for tags that each names differently.
    adapt: Callable[[ToolCallFamily, frozenset[str]], ToolCallFamily] | None = None


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """A format of reasoning: `pairs` of an opening tag and the tags that may close it.

    `anywhere`: the opening tag counts in the middle of text too (special tokens); else where text begins:
    at the start, behind reasoning or behind a call.
    """

    name: str
    detect: Detector
    pairs: tuple[tuple[str, tuple[str, ...]], ...]
    anywhere: bool = False
    variants: tuple[str, ...] = ()  # what models write for the first opening tag; a budget does not count it
    read_answer: Callable[[TextStream], Step[None]] | None = None
    ignored: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    closing: str = ""  # what ends reasoning early, written as the model's template writes it
    adapt: Callable[[ReasoningFamily, frozenset[str]], ReasoningFamily] | None = None  # as above

    def is_opened_by(self, prompt: str) -> bool:
        """Whether a rendered prompt ends with the opening tag, so that the answer begins within reasoning."""
        return prompt.rstrip(SPACE).endswith(self.pairs[0][0])
