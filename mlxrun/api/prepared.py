"""A checked request body: what the engine is asked, and what is needed to write the response."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxrun.api.openai.fields import RequestKind
from mlxrun.parsers.delta import Parser, PlainParser
from mlxrun.parsers.model_formats import ModelFormats
from mlxrun.scheduler.request import Request
from mlxrun.text.continuation import ContinuationParser


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One request of a front end: a Request for each choice, prompt by prompt, `n` to a prompt."""

    kind: RequestKind
    requests: tuple[Request, ...]
    stops: tuple[str, ...]
    """The request's stop strings."""
    seed: int
    """As used: given, configured or drawn. The first choice of each prompt has it as it is."""
    model: str
    """The model's name for the response."""
    n: int = 1
    control_stops: tuple[str, ...] = ()
    """Stop tokens that end the answer also where the model spells them as text."""
    echoed_prompts: tuple[str, ...] = ()
    """Text of each prompt, if the completion is to begin with it."""
    stream: bool = False
    include_usage: bool = False
    """Whether the last chunk of a stream has the usage."""
    formats: ModelFormats = ModelFormats()
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that the answer may call, in OpenAI's form."""
    single_tool_call: bool = False
    """Whether the answer ends with its first call."""
    prompts: tuple[str, ...] = ()
    """Text of each prompt of a chat, from which parsers see how the answer begins."""
    continuation: str = ""
    """The end of the prompt that the answers go on from."""

    def make_parser(self, index: int) -> Parser:
        """A new parser for the answer at `index` of `requests`."""
        if self.kind != "chat":
            return PlainParser()
        prompt = self.prompts[index // self.n]
        name = hashlib.blake2b(f"{self.seed}:{index}:{prompt}".encode(), digest_size=16).hexdigest()
        before = prompt.removesuffix(self.continuation)

        def make() -> Parser:
            return self.formats.make_parser(self.tools or None, before, name)

        return ContinuationParser(make, self.continuation) if self.continuation else make()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once whatever `n` is."""
        return sum(len(request.prompt) for request in self.requests[:: self.n])
