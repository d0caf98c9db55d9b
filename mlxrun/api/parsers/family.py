"""The description of a format: one record for each family of tool calls or of reasoning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from string import Template
from typing import Any

from mlxrun.api.parsers.delta import SPACE
from mlxrun.api.parsers.text_stream import Step, TextStream
from mlxrun.api.parsers.tool_schemas import encode_json

Reader = Callable[[TextStream, str], Step[Any]]
# Whether a model writes a format, by its chat template and the texts of all added tokens.
Detector = Callable[[str, frozenset[str]], bool]


def is_shown(*texts: str) -> Detector:
    """Detect formats of which each of `texts` is in the template or among the tokens."""
    return lambda template, tokens: all(text in template or text in tokens for text in texts)


def in_template(*texts: str, without: tuple[str, ...] = ()) -> Detector:
    """Detect a template that has all of `texts`, and none of `without`."""
    return lambda template, tokens: (
        all(text in template for text in texts) and not any(text in template for text in without)
    )


def in_tokens(*texts: str) -> Detector:
    """Detect formats of which all `texts` are among the tokens."""
    return lambda template, tokens: tokens.issuperset(texts)


def any_of(*detectors: Detector) -> Detector:
    """Detect all formats that one of `detectors` detects."""
    return lambda template, tokens: any(detect(template, tokens) for detect in detectors)


@dataclass(frozen=True, slots=True)
class ToolCallFamily:
    """A format of tool calls.

    `openers` begin a call anywhere in the text; `read` gets the stream behind one, and the opener. `bare` are
    plain texts that may begin a call, but often do not. They do not count in reasoning, and `read_bare` reads
    behind one. `read_start` is for formats without an opener: it is tried where text begins, with "".

    These readers either begin a call (`TextStream.begin_call`), or the opener becomes text and the text
    behind it is read again. `read_answer` is for formats that structure the whole answer. It replaces the
    other readers, and the reasoning family.
    """

    name: str
    aliases: tuple[str, ...] = ()
    detect: Detector = any_of()  # without one, the config has to name the family
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
    markers: tuple[str, ...] = ()  # special tokens whose text the parser must see
    # A call as the template writes it, for grammars, with `$name` or `$json_name` and `$arguments` for the
    # name, the same in quotes, and the JSON arguments. Empty: the arguments are no JSON.
    call: str = ""
    # Makes the family of one model from the texts of its added tokens: for tags that each names differently.
    adapt: Callable[[frozenset[str]], ToolCallFamily] | None = None

    def get_call_prefix_suffix(self, name: str) -> tuple[str, str] | None:
        """Return the texts around the JSON arguments of a call of tool `name`; None if there is no JSON."""
        if not self.call:
            return None
        names = {"name": name, "json_name": encode_json(name)}
        before, after = (Template(part).substitute(names) for part in self.call.split("$arguments"))
        return before, after


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """A format of reasoning. `pairs`: an opening tag and the tags that may close it.

    `anywhere`: the opening tag, a special token, counts in the middle of text too. Else it counts only where
    text begins: at the start, behind reasoning or behind a call.
    """

    name: str
    pairs: tuple[tuple[str, tuple[str, ...]], ...]
    aliases: tuple[str, ...] = ()
    detect: Detector = any_of()
    anywhere: bool = False
    variants: tuple[str, ...] = ()  # what models write for the first opening tag; a budget does not count it
    read_answer: Callable[[TextStream], Step[None]] | None = None
    ignored: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    closing: str = ""  # what ends reasoning early, written as the model's template writes it
    adapt: Callable[[frozenset[str]], ReasoningFamily] | None = None  # as above

    def is_opened_by(self, prompt: str) -> bool:
        """Tell whether a rendered prompt ends with the opening tag, so the answer begins in reasoning."""
        return prompt.rstrip(SPACE).endswith(self.pairs[0][0])
