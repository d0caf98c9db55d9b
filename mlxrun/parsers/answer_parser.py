"""One answer of a model whose formats are chosen: thoughts, text and calls in the order of the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxrun.parsers.delta import Delta
from mlxrun.parsers.delta_builder import new_call_id
from mlxrun.parsers.registry import ChosenFamilies
from mlxrun.parsers.state_machine import AnswerStateMachine
from mlxrun.parsers.tool_schemas import ToolSchemas


class AnswerParser:
    """The parser of one answer (see `delta.Parser`).

    `tools`: the request's, in OpenAI form; without any no calls are looked for. `opened`: the prompt ends
    within a thought (`opened_by` tells). A thought that does not end is all thought, never text.
    """

    def __init__(
        self,
        chosen: ChosenFamilies,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        opened: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        offered = ToolSchemas(tools)
        family = chosen.tools
        if family is not None and not (offered or family.whole):
            family = None
        self._machine = AnswerStateMachine(family, chosen.reasoning, offered, opened=opened, new_id=new_id)
        self.feed: Callable[[str], Sequence[Delta]] = self._machine.feed
        self.finish: Callable[[], Sequence[Delta]] = self._machine.finish
        self.markers = ChosenFamilies(
            family, chosen.reasoning
        ).markers  # special tokens whose text the detokenizer must let through

    @property
    def woken(self) -> int:
        """How often a reader had to look at text; plain text wakes none."""
        return self._machine.woken


def opened_by(chosen: ChosenFamilies, prompt: str) -> bool:
    """Whether a rendered prompt leaves a thought open."""
    return chosen.reasoning is not None and chosen.reasoning.opened(prompt)
