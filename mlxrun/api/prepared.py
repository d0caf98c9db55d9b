"""A checked request: the Requests for the engine, and what is needed to build the response."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mlxrun.parsers.delta import Parser, PlainParser
from mlxrun.parsers.model_formats import ModelFormats
from mlxrun.scheduler.request import Request
from mlxrun.text.continuation import ContinuationParser

RequestKind = Literal["chat", "completion"]


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One request of a client: a Request for each choice, prompt by prompt, `n` per prompt."""

    kind: RequestKind
    requests: tuple[Request, ...]
    stops: tuple[str, ...]
    """The request's stop strings."""
    seed: int
    """As used: given, configured or random. The first choice of each prompt uses it unchanged."""
    model: str
    """The model's name for the response."""
    n: int = 1
    control_stops: tuple[str, ...] = ()
    """Texts of stop tokens, which end the answer also if the model spells them."""
    echoed_prompts: tuple[str, ...] = ()
    """The text of each prompt, if completions repeat it."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with a chunk of token counts."""
    formats: ModelFormats = ModelFormats()
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that the answer may call, in OpenAI's format."""
    single_tool_call: bool = False
    """Whether the answer ends after its first tool call."""
    prompts: tuple[str, ...] = ()
    """The text of each chat prompt, which tells parsers how the answer begins."""
    continuation: str = ""
    """The end of the prompt, if the answer continues it."""

    def make_parser(self, index: int) -> Parser:
        """Makes a parser for the answer at `index` of `requests`."""
        if self.kind != "chat":
            return PlainParser()
        prompt = self.prompts[index // self.n]
        name = hashlib.blake2b(f"{self.seed}:{index}:{prompt}".encode(), digest_size=16).hexdigest()
        before = prompt.removesuffix(self.continuation)

        def make() -> Parser:
            return self.formats.make_parser(self.tools or None, before, name)

        return ContinuationParser(make, self.continuation) if self.continuation else make()

    @property
    def has_logprobs(self) -> bool:
        return self.requests[0].params.logprobs is not None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once whatever `n` is."""
        return sum(len(request.prompt) for request in self.requests[:: self.n])
