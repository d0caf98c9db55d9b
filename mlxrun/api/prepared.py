"""A checked request: the Requests for the engine, and what is needed to build the response.

A front end makes one ApiContext, which turns bodies into token ids for one model, with the limits of the
server's settings.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from mlxrun.api.parsers.answer_parser import ModelFormats
from mlxrun.api.parsers.delta import Parser, PlainParser
from mlxrun.api.text.continuation import ContinuationParser
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.templates.template import check_template
from mlxrun.api.text.templates.template_support import inspect_template
from mlxrun.config.settings import Config
from mlxrun.core.errors import PromptTooLong, RequestError
from mlxrun.core.request import Request

RequestKind = Literal["chat", "completion", "pooled", "transcription"]
_MESSAGE_FIELDS = ("messages", "input", "items")


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A client's request. `requests` has `n` Requests for each prompt, in the order of the prompts."""

    kind: RequestKind
    requests: tuple[Request, ...]
    stops: tuple[str, ...]  # the request's stop strings
    seed: int  # as given, configured or random; the first choice of each prompt uses it unchanged
    model: str  # the name in the response
    n: int = 1
    control_stops: tuple[str, ...] = ()  # texts of stop tokens, which also end the answer if they are spelled
    echoed_prompts: tuple[str, ...] = ()  # the text of each prompt, if completions repeat it
    echoed_offsets: tuple[tuple[int, ...], ...] = ()  # where their tokens begin, if these have logprobs
    prompt_logprobs: int | None = None  # alternatives per token in the field of this name; None: no field
    stream: bool = False
    include_usage: bool = False  # whether a stream ends with a chunk of token counts
    continuous_usage: bool = False  # whether every chunk of a stream has those so far
    returns_token_ids: bool = False  # whether responses have the ids of prompt and answer
    writes_tokens_as_ids: bool = False  # whether logprobs name tokens by their ids
    formats: ModelFormats = ModelFormats()
    tools: tuple[Mapping[str, Any], ...] = ()  # those that the answer may call, in OpenAI's format
    single_tool_call: bool = False  # whether the answer ends after its first tool call
    prompts: tuple[str, ...] = ()  # the text of each chat prompt, which tells parsers how the answer begins
    continuation: str = ""  # the end of the prompt, if the answer continues it
    window_text: str | None = None  # the text whose windows are the prompts (api/text/raw_prompts.py)

    def make_parser(self, index: int) -> Parser:
        """Make a parser for the answer to `requests[index]`."""
        if self.kind != "chat":
            return PlainParser()
        prompt = self.prompts[index // self.n]
        name = hashlib.blake2b(f"{self.seed}:{index}:{prompt}".encode(), digest_size=16).hexdigest()
        before = prompt.removesuffix(self.continuation)
        # A stop string may end the answer within a call, which then is none. So none is begun before.
        held_calls = 0 if not self.stops else 1 if self.single_tool_call else sys.maxsize

        def make() -> Parser:
            return self.formats.make_parser(self.tools or None, before, name, held_calls)

        return ContinuationParser(make, self.continuation) if self.continuation else make()

    @property
    def name(self) -> str:
        """The common part of the ids of `requests`."""
        return self.requests[0].id.rpartition("-")[0]

    @property
    def has_logprobs(self) -> bool:
        return self.requests[0].params.logprobs is not None

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts. Each prompt counts once, whatever `n` is."""
        return sum(len(request.prompt) for request in self.requests[:: self.n])


@dataclass(frozen=True, slots=True)
class ApiContext:
    """What turns bodies into Requests. `media_loader` decides which media may be read, `formats` how answers
    are parsed. Making one tries out the chat template; ModelLoadError if the template is broken."""

    model_info: ModelInfo
    config: Config
    media_loader: MediaLoader
    formats: ModelFormats = ModelFormats()

    def __post_init__(self) -> None:
        check_template(self.model_info, self.config.model.chat_template)
        inspect_template(self.model_info)

    def without_max_tokens(self) -> ApiContext:
        """Return the same context, in which the limit that a caller gives comes before the config's."""
        sampling = replace(self.config.sampling, max_tokens=None)
        return replace(self, config=replace(self.config, sampling=sampling))


def check_message_counts(body: Any, most: int) -> None:
    """Raise RequestError if the body has more than `most` messages or items, before any is processed."""
    for name in _MESSAGE_FIELDS:
        items = body.get(name) if isinstance(body, dict) else None
        # Integers are the token ids of one text.
        if isinstance(items, list) and len(items) > most and type(items[0]) is not int:
            text = f"{name}: {len(items)} items are more than {most} (server.max_messages)"
            raise RequestError(text, param=name)


def check_prompt_lengths(prepared: PreparedRequest, most: int | None) -> None:
    """Raise PromptTooLong if a prompt has more than `most` tokens; None: no limit."""
    longest = max(len(request.prompt) for request in prepared.requests)
    if most is not None and longest > most:
        raise PromptTooLong(f"the prompt has {longest} tokens; server.max_prompt_tokens is {most}")
