"""The formats of one model, chosen once from its config and its template: what text/formats.py asks for."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mlxrun.config.settings import ParserSettings
from mlxrun.parsers.answer import AnswerParser, opened_by
from mlxrun.parsers.registry import Chosen, choose


class Host(Protocol):
    """What of a model decides its formats."""

    @property
    def chat_template(self) -> str | None: ...
    @property
    def tokenizer(self) -> Any: ...


class ModelFormats:
    """Makes a parser for each answer of a model."""

    def __init__(self, chosen: Chosen) -> None:
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


def _ids(name: str) -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: "call_" + hashlib.blake2b(f"{name}:{next(numbers)}".encode(), digest_size=12).hexdigest()
