"""A model's formats in brackets: [reasoning], (arguments of a call)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxrun.api.parsers.answer_parser import ModelFormats
from mlxrun.api.parsers.delta import Delta, DeltaKind

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class Brackets(ModelFormats):
    """A scripted format: `[reasoning]`, `(arguments of a call)`, else content. A `~` is withheld until the
    next character, as the beginning of a marker would be."""

    def make_parser(
        self, tools: Sequence[Mapping[str, Any]] | None, prompt: str, name: str, held_calls: int = 0
    ) -> BracketParser:
        return BracketParser()


class BracketParser:
    markers: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.kind: DeltaKind = "content"
        self.calls, self.withheld = -1, ""

    def feed(self, text: str) -> list[Delta]:
        made: list[Delta] = []
        for char in text:
            if char == "~":
                self.withheld += char
            elif char in "[])":
                self.kind = "reasoning" if char == "[" else "content"
            elif char == "(":
                self.kind, self.calls = "call", self.calls + 1
                made.append(Delta("call", "", self.calls, f"call_{self.calls}", "f"))
            else:
                at = self.calls if self.kind == "call" else 0
                made.append(Delta(self.kind, self.withheld + char, at))
                self.withheld = ""
        return made

    def finish(self, stopped: bool = False) -> list[Delta]:
        return [Delta("content", self.withheld)] if self.withheld else []
