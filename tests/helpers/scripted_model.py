"""The embedded model behind a real server, with answers that a test writes.

Everything is real but the choice of tokens: the template, the tokenizer, the forwards, the prefix cache, the
parsers. The answer is forced token by token through the grammar's place in a request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from mlxrun.config.settings import Config
from mlxrun.core.request import Request, TokenEvent
from mlxrun.engine.client import EngineClient
from tests.helpers.served_model import ModelServer, run_model_server

# Makes an answer of the rendered prompt; None: the model answers by itself.
AnswerScript = Callable[[str], str | None]


@dataclass(frozen=True)
class FixedAnswer:
    """A grammar that allows one text only."""

    tokens: tuple[int, ...]

    def start(self, output: Sequence[int], stop_ids: frozenset[int]) -> FixedAnswerMatcher:
        return FixedAnswerMatcher(self.tokens, stop_ids, len(output))


@dataclass
class FixedAnswerMatcher:
    tokens: tuple[int, ...]
    stop_ids: frozenset[int]
    position: int

    @property
    def done(self) -> bool:
        return self.position >= len(self.tokens)

    def mask(self) -> bytes:
        allowed = self.stop_ids if self.done else {self.tokens[self.position]}
        bits = sum(1 << token for token in allowed)
        return bits.to_bytes(max(allowed) // 8 + 1, "little")

    def accept(self, token: int) -> None:
        self.position += 1

    def fork(self) -> FixedAnswerMatcher:
        return replace(self)


class ScriptedClient(EngineClient):
    """Forces the answers that `script` gives, also in place of a grammar."""

    script: AnswerScript

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        tokenizer = self.model_info.tokenizer
        text = self.script(tokenizer.decode(list(request.prompt)))
        if text is not None:
            tokens = tokenizer.encode(text, add_special_tokens=False)
            request = replace(request, grammar=FixedAnswer(tuple(tokens)))
        events = super().generate(request)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()


@contextmanager
def run_scripted_server(script: AnswerScript, config: Config | None = None) -> Iterator[ModelServer]:
    """A server of the embedded model that answers as `script` says, until the block ends."""

    async def start(config: Config, model_info: Any) -> EngineClient:
        client = await ScriptedClient.start(config, model_info)
        assert isinstance(client, ScriptedClient)
        client.script = script
        return client

    with run_model_server(config or Config(), start_client=start) as served:
        yield served
