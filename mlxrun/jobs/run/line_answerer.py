"""Answers one line: body -> Requests -> engine -> response body.

This module alone uses the engine; line_bodies.py alone knows the APIs. Each choice continues from the tokens
in `PartialAnswers`, of an earlier run or an earlier try. A line without a seed gets one from the job's base
seed and its custom_id, so a rerun samples the same tokens.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from mlxrun.api.choice import Choice
from mlxrun.api.parsers.answer_parser import ModelFormats
from mlxrun.api.parsers.registry import detect_formats
from mlxrun.api.prepared import ApiContext
from mlxrun.api.stored_files import ReadFile
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.config.media_settings import get_image_bytes
from mlxrun.config.settings import Config
from mlxrun.core.request import Request, TokenEvent
from mlxrun.core.transcription import Transcript
from mlxrun.core.workers import run_together
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.records.output_records import BatchStamp, LineTokens
from mlxrun.jobs.run.line_bodies import Body, LineBody, PooledBody, TranscriptBody, prepare_line
from mlxrun.jobs.run.partial_answers import PartialAnswer, PartialAnswers, PartialAnswerTable
from mlxrun.jobs.run.progress import ProgressMeter

if TYPE_CHECKING:
    from mlxrun.engine.client import EngineClient

Table = TypeVar("Table", bound=PartialAnswerTable)
DEFAULT_MAX_TOKENS = 1024  # of an answer, where neither the line nor the config sets it


def get_base_seed(config: Config) -> int:
    """Return the seed from which the seeds of lines are derived."""
    return config.sampling.seed or 0


def derive_line_seed(base: int, custom_id: str) -> int:
    """Derive the seed of a line that sets none, from the job's base seed and the line's id alone."""
    digest = hashlib.sha256(f"{base}:{custom_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class LinePreparer:
    """Turns lines into Requests. It needs no engine, so `--dry-run` and `--strict` use it too. `folder`: the
    folder of relative image paths, None to refuse paths; `formats`: None for those of the model;
    `max_tokens`: the limit of answers where neither line nor config sets one, None for the context's end;
    `stamp`: the stamp of the lines' batch in a server."""

    stamp: BatchStamp | None = None

    def __init__(
        self,
        model_info: ModelInfo,
        config: Config,
        folder: Path | None,
        *,
        formats: ModelFormats | None = None,
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
    ) -> None:
        self.folder = folder
        image_bytes = get_image_bytes(config.media.memory_bytes, config.scheduler.memory_limit)
        loader = MediaLoader(config.media, folder, memory_bytes=image_bytes)
        if formats is None:
            formats = detect_formats(model_info.chat_template, model_info.tokenizer, config.parsers)
        self._context = ApiContext(model_info, config, loader, formats)
        self._config = config
        self._max_tokens = max_tokens
        self._read_file: ReadFile | None = None

    def for_batch(self, stamp: BatchStamp | None, read_file: ReadFile | None) -> Self:
        """Make a copy for the lines of a server's batch. `read_file`: reads the files that they may name."""
        found = copy.copy(self)
        found.stamp, found._read_file = stamp, read_file
        return found

    async def prepare(self, line: JobLine, key: str = "") -> Body:
        """Build the requests of a line, one for each choice. RequestError if its body is refused. `key`: the
        line's key, of which ids in its answer are made."""
        seed = derive_line_seed(get_base_seed(self._config), line.custom_id)  # where the body has none
        config = replace(self._config, sampling=replace(self._config.sampling, seed=seed))
        context = replace(self._context, config=config)
        return await prepare_line(
            line,
            key,
            context,
            default_max_tokens=self._max_tokens,
            read_file=self._read_file,
            stamp=self.stamp,
        )


class Answerer(Protocol):
    """Answers the lines of a job: the engine of this process, or workers in other processes."""

    @property
    def answers(self) -> PartialAnswers:
        """The job's partial answers."""

    @property
    def concurrency(self) -> int:
        """The number of lines that it should have at once."""

    async def answer(self, line: JobLine, key: str, tokens: LineTokens) -> dict[str, Any]:
        """Return the response body of `line`. `tokens` counts its tokens, also if it fails."""


class WorkerPool(Protocol):
    """Engines in other processes, which answer the lines in place of an engine in this process."""

    async def start(self, meter: ProgressMeter, answers: PartialAnswers) -> Answerer:
        """Start the engines, and return the object that hands lines to them."""

    def list_workers(self) -> list[dict[str, Any]]:
        """List the workers as status and manifest contain them, each with its `state`."""

    def read_cache_counters(self) -> Mapping[str, int]:
        """Sum the cache counters of the engines."""

    async def close(self) -> None:
        """Stop the engines."""


def count_lines_at_once(config: Config) -> int:
    """Return the number of lines that one engine should have at once, so that the next prompts are ready."""
    return config.batch.concurrency or 2 * config.scheduler.max_running


class LineAnswerer(Generic[Table]):
    """Answers any number of lines at once. With `background`, requests yield to those of a server's
    clients."""

    def __init__(
        self,
        client: EngineClient,
        preparer: LinePreparer,
        config: Config,
        meter: ProgressMeter,
        answers: Table,
        background: bool = False,
    ) -> None:
        self.answers = answers
        self.concurrency = count_lines_at_once(config)
        self._client = client
        self._preparer = preparer
        self._meter = meter
        self._background = background
        self._slots = asyncio.Semaphore(config.scheduler.max_queue)  # one job never fills the engine's queue

    async def answer(self, line: JobLine, key: str, tokens: LineTokens) -> dict[str, Any]:
        """Return the response body of `line`. `tokens` counts its tokens, also if it fails. If one choice
        fails, the others are aborted."""
        body = await self._preparer.prepare(line, key)
        prepared = body.prepared
        max_tokens = sum(request.params.max_tokens for request in prepared.requests)
        self._meter.add_prompt(prepared.prompt_tokens, max_tokens)
        if isinstance(body, PooledBody):
            # Vectors are not kept for a later run: the line then begins anew.
            vectors = (self._compute_vector(request, tokens) for request in prepared.requests)
            return body.build(await run_together(vectors))
        if isinstance(body, TranscriptBody):
            async with body.held:
                return body.build(await self._transcribe(prepared.requests[0], tokens))
        await run_together(self._answer_choice(body, at, key, tokens) for at in range(len(prepared.requests)))
        return body.build()

    async def _transcribe(self, request: Request, tokens: LineTokens) -> Transcript:
        """The whole transcript, which is not kept in part for a later run."""
        request, whole = replace(request, background=self._background), Transcript()
        async with self._slots, aclosing(self._client.generate(request)) as events:
            async for event in events:
                whole = whole.join(event.transcript)
                tokens.add(0, 0, len(event.tokens))
                tokens.times.mark_progress(self._meter.clock(), len(event.tokens))
                self._meter.add_tokens(0, 0, len(event.tokens))
        return whole

    async def _compute_vector(self, request: Request, tokens: LineTokens) -> bytes:
        request, vector = replace(request, background=self._background), b""
        async with self._slots, aclosing(self._client.generate(request)) as events:
            async for event in events:
                vector = event.vector
        tokens.add(len(request.prompt), 0, 0)
        tokens.times.mark_progress(self._meter.clock(), 0)
        self._meter.add_tokens(len(request.prompt), 0, 0)
        return vector

    async def _answer_choice(self, body: LineBody, at: int, key: str, tokens: LineTokens) -> None:
        request = replace(body.prepared.requests[at], background=self._background)
        partial = self.answers.find(key, at, request)
        choice = Choice(body.prepared, at, self._client.model_info)
        choice.left_out_tokens = partial.left_out
        for event in split_event(TokenEvent("", tuple(partial.tokens), tuple(partial.logprobs))):
            body.feed(choice, choice.resume(event.tokens, event.logprobs))
        finish = partial.find_finish(request, self._client.model_info.context_length)
        if finish is not None:
            body.feed(choice, choice.feed(TokenEvent(request.id, finish=finish, stop_id=partial.stop_id)))
        elif not choice.stopped:
            request = replace(request, prior_output=tuple(partial.tokens))
            async with aclosing(self._generate(request, partial, tokens)) as events:
                async for event in events:
                    for each in split_event(event):
                        body.feed(choice, choice.feed(each))
                    if choice.ended:
                        break
        if self._preparer.stamp is None:
            choice.cached_tokens = 0  # which depend on the run, and not on the line alone
        body.feed(choice, choice.finish())

    async def _generate(
        self, request: Request, partial: PartialAnswer, tokens: LineTokens
    ) -> AsyncGenerator[TokenEvent, None]:
        """Have the engine begin or continue an answer, and keep and count what it generates."""
        prompt = _PromptProgress()
        async with self._slots, aclosing(self._client.generate(request)) as events:
            async for event in events:
                computed, reused = prompt.take_progress(event)
                tokens.add(computed, reused, len(event.tokens))
                if event.num_computed_tokens or event.tokens:
                    tokens.times.mark_progress(self._meter.clock(), len(event.tokens))
                self._meter.add_tokens(computed, reused, len(event.tokens))
                partial.add(event)
                yield event


def split_event(event: TokenEvent) -> Iterator[TokenEvent]:
    """Yield one event for each token, so that answers are written alike however their tokens came."""
    if len(event.tokens) <= 1:
        yield event
        return
    last = len(event.tokens) - 1
    for at, token in enumerate(event.tokens):
        yield event._replace(
            tokens=(token,),
            logprobs=event.logprobs[at : at + 1],
            finish=event.finish if at == last else None,
            prompt_logprobs=() if at else event.prompt_logprobs,
        )


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
