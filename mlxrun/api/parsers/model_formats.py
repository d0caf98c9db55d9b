"""The formats in which one model writes tool calls and reasoning."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrun.api.parsers.answer_parser import AnswerParser
from mlxrun.api.parsers.delta import Parser, PlainParser
from mlxrun.api.parsers.family import ReasoningFamily, ToolCallFamily


@dataclass(frozen=True)
class ModelFormats:
    """The families of one model; see `registry.detect_formats`. Without families all text is content."""

    tool_calls: ToolCallFamily | None = None
    reasoning: ReasoningFamily | None = None

    def make_parser(self, tools: Sequence[Mapping[str, Any]] | None, prompt: str, name: str) -> Parser:
        """Make the parser of an answer to the rendered `prompt` that may call `tools`. The ids of its calls
        follow from `name`, so an answer that is generated again has the same ids."""
        if self.tool_calls is None and self.reasoning is None:
            return PlainParser()
        opened = self.reasoning is not None and self.reasoning.is_opened_by(prompt)
        return AnswerParser(self.tool_calls, self.reasoning, tools, opened=opened, new_id=_id_maker(name))

    def get_call_prefix_suffix(self, name: str) -> tuple[str, str] | None:
        """See ToolCallFamily; None also if there is no family."""
        family = self.tool_calls
        return None if family is None else family.get_call_prefix_suffix(name)

    def get_reasoning_tags(self, prompt: str) -> tuple[str, str] | None:
        """Return the opening and closing tag of the reasoning that may begin an answer to `prompt`. The
        opening tag is empty if the prompt ends with it. None: the answer begins without reasoning."""
        family = self.reasoning
        if family is None or family.read_answer is not None:
            return None
        opening, (closing, *_) = family.pairs[0]
        if family.is_opened_by(prompt):
            return "", closing
        closed = prompt.rstrip().endswith(closing)  # the template has switched reasoning off
        return None if closed else (opening, closing)

    @property
    def call_opener(self) -> str:
        """The marker with which every tool call, and only a tool call, begins; empty if there is none."""
        family, around = self.tool_calls, self.get_call_prefix_suffix("f")
        if family is None or around is None:
            return ""
        return next((opener for opener in family.openers if around[0].startswith(opener)), "")

    @property
    def call_separator(self) -> str | None:
        """The text between two consecutive calls; None if only one call is known to be valid."""
        return "\n" if self.tool_calls is not None and self.tool_calls.name == "hermes" else None


def _id_maker(name: str) -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: "call_" + hashlib.blake2b(f"{name}:{next(numbers)}".encode(), digest_size=12).hexdigest()
