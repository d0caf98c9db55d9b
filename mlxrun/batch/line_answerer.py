"""Answers one line: body -> Requests -> engine -> response body. Only this module uses the engine and the
API.

Each choice continues from the tokens that `PartialAnswers` has of it, from an earlier run or an earlier try.
A line without a seed gets one from the job's base seed and its custom_id, so a rerun samples the same tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxrun.batch.job_file import JobLine
from mlxrun.batch.output_records import CREATED, LineTokens, make_request_id
from mlxrun.batch.partial_answers import PartialAnswer, PartialAnswers
from mlxrun.batch.progress import ProgressMeter
from mlxrun.config.settings import Config
from mlxrun.scheduler.request import TokenEvent
from mlxrun.text.model_info import ModelInfo

if TYPE_CHECKING:
    from mlxrun.api.choice import Choice
    from mlxrun.api.prepared import PreparedRequest
    from mlxrun.engine.client import EngineClient
    from mlxrun.parsers.model_formats import ModelFormats
    from mlxrun.scheduler.request import Request

DEFAULT_MAX_TOKENS = 1024  # of an answer, where neither the line nor the config sets it


def get_base_seed(config: Config) -> int:
    """The seed from which the seeds of lines are derived."""
    return config.sampling.seed or 0


def derive_line_seed(base: int, custom_id: str) -> int:
    """The seed of a line that sets none; it depends on the job's base seed and the line's id alone."""
    digest = hashlib.sha256(f"{base}:{custom_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class LinePreparer:
    """Turns lines into Requests; needs no engine, so `--dry-run` and `--strict` use it too.

    `folder`: image paths are relative to it, None refuses them. `max_tokens`: of an answer, where neither the
    line nor the config sets it; None: up to the context's end.
    """

    def __init__(
        self,
        model_info: ModelInfo,
        config: Config,
        folder: Path | None,
        *,
        formats: ModelFormats | None = None,
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
    ) -> None:
        from mlxrun.api.context import ApiContext
        from mlxrun.parsers.model_formats import ModelFormats
        from mlxrun.text.images import MediaLoader

        self.folder = folder
        loader = MediaLoader(config.media, folder)
        self._context = ApiContext(model_info, config, loader, formats or ModelFormats())
        self._config = config
        self._max_tokens = max_tokens

    async def prepare(self, line: JobLine) -> PreparedRequest:
        """The requests of a line, one for each choice; RequestError if its body is refused."""
        from mlxrun.api.openai.request import prepare_request

        body = line.body
        if body.get("seed") is None:
            body = {**body, "seed": derive_line_seed(get_base_seed(self._config), line.custom_id)}
        return await prepare_request(line.url, body, self._context, default_max_tokens=self._max_tokens)


class LineAnswerer:
    """Answers lines, any number at once. `background`: for requests that yield to those of a server's
    clients."""

    def __init__(
        self,
        client: EngineClient,
        preparer: LinePreparer,
        config: Config,
        meter: ProgressMeter,
        answers: PartialAnswers,
        background: bool = False,
    ) -> None:
        self.answers = answers
        self._client = client
        self._preparer = preparer
        self._meter = meter
        self._background = background
        self._slots = asyncio.Semaphore(config.scheduler.max_queue)  # one job never fills the engine's queue

    async def answer(self, line: JobLine, key: str, tokens: LineTokens) -> dict[str, Any]:
        """The response body of `line`; `tokens` counts what it costs, also if it fails. If one choice fails,
        the others are aborted."""
        from mlxrun.api.openai.response import build_response

        prepared = await self._preparer.prepare(line)
        max_tokens = sum(request.params.max_tokens for request in prepared.requests)
        self._meter.add_prompt(prepared.prompt_tokens, max_tokens)
        try:
            async with asyncio.TaskGroup() as group:
                choices = range(len(prepared.requests))
                tasks = [group.create_task(self._answer_choice(prepared, at, key, tokens)) for at in choices]
        except BaseExceptionGroup as errors:
            raise find_first_error(errors) from errors
        return build_response(prepared, [task.result() for task in tasks], make_request_id(key), CREATED)

    async def _answer_choice(
        self, prepared: PreparedRequest, at: int, key: str, tokens: LineTokens
    ) -> Choice:
        from mlxrun.api.choice import Choice

        request = replace(prepared.requests[at], background=self._background)
        partial = self.answers.find(key, at, request)
        choice = Choice(prepared, at, self._client.model_info)
        choice.resume(partial.tokens, partial.logprobs)
        finish = partial.find_finish(request, self._client.model_info.context_length)
        if finish is not None:
            choice.feed(TokenEvent(request.id, finish=finish))
        elif not choice.stopped:
            await self._generate(
                replace(request, prior_output=tuple(partial.tokens)), choice, partial, tokens
            )
        choice.finish()
        return choice

    async def _generate(
        self, request: Request, choice: Choice, partial: PartialAnswer, tokens: LineTokens
    ) -> None:
        """Have the engine begin or continue an answer."""
        prompt = _PromptProgress()
        async with self._slots, aclosing(self._client.generate(request)) as events:
            async for event in events:
                computed, reused = prompt.take_progress(event)
                tokens.add(computed, reused, len(event.tokens))
                self._meter.add_tokens(computed, reused, len(event.tokens))
                partial.add(event)
                choice.feed(event)
                if choice.stopped:
                    return


@dataclass(slots=True)
class _PromptProgress:
    """Prompt tokens of one request that were computed or reused so far."""

    done: int = 0
    reused: int = 0

    def take_progress(self, event: TokenEvent) -> tuple[int, int]:
        """Tokens computed and tokens reused since the last event. Tokens that preemption computes twice count
        once, as events are merged and not all of them are seen."""
        more = max(0, event.num_computed_tokens - self.done)
        reused = min(more, max(0, event.num_cached_tokens - self.reused))
        self.done += more
        self.reused += reused
        return more - reused, reused


def find_first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception in a group that is no group itself."""
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
