"""The formats of one model, chosen once from its config and its template: what text/formats.py asks for."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mlxrun.config.settings import ParserSettings
from mlxrun.parsers.answer_parser import AnswerParser, opened_by
from mlxrun.parsers.family import ReasoningFamily
from mlxrun.parsers.registry import ChosenFamilies, choose


class Host(Protocol):
    """What of a model decides its formats."""

    @property
    def chat_template(self) -> str | None: ...
    @property
    def tokenizer(self) -> Any: ...


class ModelFormats:
    """Makes a parser for each answer of a model."""

    def __init__(self, chosen: ChosenFamilies) -> None:
        self.chosen = chosen

    @classmethod
    def of(cls, host: Host, settings: ParserSettings) -> ModelFormats:
        """As the config says; `auto`: by template and added tokens. ConfigError for an unknown name."""
        added = host.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        tokens = [token.content for token in added]
        return cls(choose(host.chat_template, tokens, settings.tools, settings.reasoning))

    def parser(self, tools: Sequence[Mapping[str, Any]] | None, prompt: str, name: str) -> AnswerParser:
        """A parser of one answer to the rendered `prompt`. The ids of calls follow from `name`, so that an
        answer that is given again has the same."""
        opened = opened_by(self.chosen, prompt)
        return AnswerParser(self.chosen, tools, opened=opened, new_id=_ids(name))

    def frame(self, name: str) -> tuple[str, str] | None:
        """The text before and after the JSON of the arguments of a call; None: the format is another."""
        family = self.chosen.tools
        return None if family is None or family.frame is None else family.frame(name)

    def thought(self, prompt: str) -> tuple[str, str] | None:
        """What begins and ends a thought that may come first in an answer to `prompt`; None: none may."""
        thinking = self.chosen.reasoning
        if thinking is None or not thinking.pairs:
            return None
        opens, (closes, *_) = thinking.pairs[0]
        if thinking.opened(prompt):
            return "", closes
        closed = prompt.rstrip().endswith(closes)  # the template has switched thoughts off
        return None if closed else (opens, closes)

    @property
    def thinking(self) -> ReasoningFamily | None:
        """How the model writes thoughts; None: it writes none that are known."""
        return self.chosen.reasoning

    @property
    def opener(self) -> str:
        """What every call begins with, and nothing else does; empty if the format has no such marker."""
        family, frame = self.chosen.tools, self.frame("f")
        if family is None or frame is None:
            return ""
        return next((opener for opener in family.openers if frame[0].startswith(opener)), "")

    @property
    def between(self) -> str | None:
        """Text between two calls that follow each other; None: one is all that the format is sure of."""
        family = self.chosen.tools
        return "\n" if family is not None and family.name == "hermes" else None


def _ids(name: str) -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: "call_" + hashlib.blake2b(f"{name}:{next(numbers)}".encode(), digest_size=12).hexdigest()
