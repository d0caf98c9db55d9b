"""Answers one line: body -> Requests -> engine -> response body. Engine and text side are used here only.

Each choice goes on from the tokens that `PartialAnswers` has of it, from an earlier run or an earlier try.

The seed of a line that gives none comes from the job's base seed and its custom_id: a rerun draws the same.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mlxrun.batch.job_file import JobLine
from mlxrun.batch.output_records import CREATED, TokenWork, request_id
from mlxrun.batch.partial_answers import PartialAnswer, PartialAnswers
from mlxrun.batch.progress import ProgressMeter
from mlxrun.config.settings import Config
from mlxrun.scheduler.request import TokenEvent
from mlxrun.text.model_info import ModelInfo

if TYPE_CHECKING:
    from mlxrun.api.choice import Choice
    from mlxrun.api.prepared import PreparedRequest
    from mlxrun.parsers.model_formats import ModelFormats
    from mlxrun.scheduler.request import Request

MAX_TOKENS = 1024  # of an answer, where neither the line nor the config says


class EngineClientInterface(Protocol):
    """The engine as a job sees it; `generate` raises instead of giving an ERROR event."""

    @property
    def model_info(self) -> ModelInfo: ...

    def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]: ...

    def read_cache_counters(self) -> Mapping[str, int]:
        """What the prefix cache did, as cache/entry.py counts it; empty without one. Never raises."""
        ...

    async def close(self) -> None: ...


def base_seed(config: Config) -> int:
    """The seed that the seeds of lines are made from."""
    return config.sampling.seed or 0


def line_seed(base: int, custom_id: str) -> int:
    """The seed of a line that gives none: from the job's base seed and the line's id alone."""
    digest = hashlib.sha256(f"{base}:{custom_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class Prepare(Protocol):
    """Turns lines into Requests."""

    @property
    def folder(self) -> Path | None:
        """Image paths are relative to it; None refuses them."""

    async def __call__(self, line: JobLine) -> PreparedRequest:
        """RequestError if the line's body is refused."""
        ...


class Preparer:
    """Turns lines into Requests; needs no engine, so `--dry-run` and `--strict` use it too.

    `max_tokens`: of an answer, where neither the line nor the config says; None: up to the context's end.
    """

    def __init__(
        self,
        host: ModelInfo,
        config: Config,
        folder: Path | None,
        *,
        formats: ModelFormats | None = None,
        max_tokens: int | None = MAX_TOKENS,
    ) -> None:
        from mlxrun.api.context import ApiContext
        from mlxrun.parsers.model_formats import ModelFormats
        from mlxrun.text.images import MediaLoader

        self.folder = folder
        self._side = ApiContext(host, config, MediaLoader(config.media, folder), formats or ModelFormats())
        self._config = config
        self._max_tokens = max_tokens

    async def __call__(self, line: JobLine) -> PreparedRequest:
        from mlxrun.api.openai.request import prepare_request

        body = line.body
        if body.get("seed") is None:
            body = {**body, "seed": line_seed(base_seed(self._config), line.custom_id)}
        return await prepare_request(line.url, body, self._side, default_max_tokens=self._max_tokens)


@dataclass(slots=True)
class Spent:
    """What one line has cost so far, also if it fails; retries add up."""

    computed: int = 0
    reused: int = 0
    output: int = 0

    def add(self, computed: int, reused: int, output: int) -> None:
        self.computed += computed
        self.reused += reused
        self.output += output

    @property
    def work(self) -> TokenWork:
        return TokenWork(self.computed, self.reused)

    @property
    def total(self) -> int:
        return self.computed + self.reused + self.output


class LineAnswerer:
    """Answers lines, any number at once; the engine's queue is never overfilled by one job alone."""

    def __init__(
        self,
        client: EngineClientInterface,
        prepare: Prepare,
        config: Config,
        meter: ProgressMeter,
        answers: PartialAnswers,
    ) -> None:
        self.answers = answers
        self._client = client
        self._prepare = prepare
        self._meter = meter
        self._slots = asyncio.Semaphore(config.scheduler.max_queue)

    async def answer(self, line: JobLine, key: str, spent: Spent) -> dict[str, Any]:
        """The response body of `line`."""
        from mlxrun.api.openai.request import build_response

        prepared = await self._prepare(line)
        most = sum(request.params.max_tokens for request in prepared.requests)
        self._meter.seen(prepared.prompt_tokens, most)
        if len(prepared.requests) == 1:
            choices = [await self._choice(prepared, 0, key, spent)]
        else:
            choices = await self._choices(prepared, key, spent)
        return build_response(prepared, choices, request_id(key), CREATED)

    async def _choices(self, prepared: PreparedRequest, key: str, spent: Spent) -> list[Choice]:
        """All choices at once; if one fails the others are aborted."""
        try:
            async with asyncio.TaskGroup() as group:
                count = len(prepared.requests)
                tasks = [group.create_task(self._choice(prepared, at, key, spent)) for at in range(count)]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        return [task.result() for task in tasks]

    async def _choice(self, prepared: PreparedRequest, at: int, key: str, spent: Spent) -> Choice:
        from mlxrun.api.openai.request import Choice

        request = prepared.requests[at]
        partial = self.answers.find(key, at, request)
        choice = Choice(prepared, at, self._client.model_info)
        choice.resume(partial.tokens, partial.logprobs)
        ended = partial.ended(request, self._client.model_info.context_length)
        if ended is not None:
            choice.feed(TokenEvent(request.id, finish=ended))
        elif not choice.stopped:
            await self._ask(replace(request, prior_output=tuple(partial.tokens)), choice, partial, spent)
        choice.finish()
        return choice

    async def _ask(self, request: Request, choice: Choice, partial: PartialAnswer, spent: Spent) -> None:
        """Have the engine answer, or answer on."""
        prompt = _PromptProgress()
        async with self._slots, aclosing(self._client.generate(request)) as events:
            async for event in events:
                computed, reused = prompt.news(event)
                spent.add(computed, reused, len(event.tokens))
                self._meter.progress(computed, reused, len(event.tokens))
                partial.add(event)
                choice.feed(event)
                if choice.stopped:
                    return


@dataclass(slots=True)
class _PromptProgress:
    """How far the prompt of one request is."""

    done: int = 0
    reused: int = 0

    def news(self, event: TokenEvent) -> tuple[int, int]:
        """Tokens computed and tokens reused since the event before. What a preempted prompt computes again
        counts once: events are merged, so not all of it is seen."""
        more = max(0, event.num_computed_tokens - self.done)
        reused = min(more, max(0, event.num_cached_tokens - self.reused))
        self.done += more
        self.reused += reused
        return more - reused, reused


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first plain exception in a group."""
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
