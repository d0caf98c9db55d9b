"""The engine: it loops over its workloads. Front ends reach it through engine/client.py.

It knows token ids, not text. Every request that `add` accepts gets exactly one event with `finish` set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from mlxrun.config.settings import EngineSettings
from mlxrun.core.errors import RequestError
from mlxrun.core.request import Request, TokenEvent, compute_digest
from mlxrun.engine.scheduler.prefix_cache_interface import PrefixCacheInterface
from mlxrun.engine.scheduler.scheduler import Scheduler
from mlxrun.engine.workloads.generation import GenerationSteps, Runner
from mlxrun.engine.workloads.pooling import PoolingSteps
from mlxrun.engine.workloads.token_selection import TokenSelection
from mlxrun.engine.workloads.transcription import TranscriptionSteps
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.load_check.recheck import Recheck
from mlxrun.model.load_check.report import LoadCheckReport

log = logging.getLogger(__name__)

# Each request that `add` took gets exactly one event with `finish` set, from `step` or from `abort`, unless
# another workload gets the request. Called on the engine's thread only.
Workload = GenerationSteps | PoolingSteps | TokenSelection | TranscriptionSteps


class Engine:
    """Steps a model. It is not thread-safe: one thread builds, steps and closes it.

    `pooling`: computes vectors, None if the model has none; `transcription`: of recordings, None if the model
    takes none. `selection`: leaves out tokens of long prompts, None if all are computed; `num_embeddings`:
    the number of tokens with embeddings, 0 if unknown. `recheck`, `preparation`: what is left to do while the
    engine is idle; each item of the second takes milliseconds.
    """

    def __init__(
        self,
        model_info: LoadedModelInfo,
        scheduler: Scheduler,
        runner: Runner,
        settings: EngineSettings,
        load_check: LoadCheckReport | None = None,
        pooling: PoolingSteps | None = None,
        selection: TokenSelection | None = None,
        transcription: TranscriptionSteps | None = None,
        num_embeddings: int = 0,
        recheck: Recheck | None = None,
        preparation: Iterator[None] | None = None,
    ) -> None:
        self.model_info = model_info
        self.scheduler = scheduler
        self.load_check = load_check
        self.recheck = recheck
        self._preparation = preparation
        self.generation = GenerationSteps(scheduler, runner, settings.max_errors)
        self.pooling = pooling
        self.selection = selection
        self.transcription = transcription
        slices: list[Workload | None] = [selection, pooling, transcription]
        self._slices = [each for each in slices if each is not None]  # between the steps that generate
        self._workloads: list[Workload] = [*self._slices, self.generation]  # a request is for the first one
        self._settings = settings
        self._num_embeddings = num_embeddings
        self._aborted: list[TokenEvent] = []  # final events that the next step returns
        self.held = ExitStack()  # what the engine holds of the process until it is closed
        self.before_step: Callable[[], None] | None = None  # adapts what it holds to the machine's load

    @property
    def prefix_cache(self) -> PrefixCacheInterface:
        """The scheduler's prefix cache."""
        return self.scheduler.prefix_cache

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._aborted) or any(workload.is_busy for workload in self._workloads)

    def add(self, request: Request) -> None:
        """Queue a request. Raises Overloaded, PromptTooLong or RequestError if it cannot run."""
        self._check_tokens(request)
        if any(workload.has(request.id) for workload in self._workloads):
            raise RequestError(f"a request with id {request.id!r} is already running")
        methods = None if self.load_check is None else self.load_check.methods
        if methods is not None and methods.whole_prompts:
            request = join_media_spans(request, whole_prompt=True)
        elif methods is not None and methods.whole_media and request.media is not None:
            request = join_media_spans(request)
        if request.media is not None and self._settings.reproducible:
            request = join_digests(request)
        workload = next((each for each in self._workloads if each.takes(request)), None)
        if workload is None:
            raise RequestError("this model gives no embeddings, scores or transcripts")
        workload.add(request)

    def _check_tokens(self, request: Request) -> None:
        """RequestError for a token without an embedding; those of images get theirs from elsewhere."""
        size = self._num_embeddings
        if not size or not request.prompt or max(request.prompt) < size:
            return
        spans = request.image_spans
        for at, token in enumerate(request.prompt):
            if token >= size and not any(start <= at < stop for start, stop in spans):
                raise RequestError(
                    f"token {at} of the prompt is {token}, and the model has embeddings of {size} tokens: "
                    "its tokenizer knows a special token that the model does not",
                    code="unknown_token",
                )

    def abort(self, request_id: str) -> None:
        """End a request. Its final event comes with the next step. A request that has ended is ignored."""
        found = (workload.abort(request_id) for workload in self._workloads)
        self._aborted += [event for event in found if event is not None]

    def step(self) -> list[TokenEvent]:
        """Run one step of generation, and one slice of each other busy workload. Returns the events of
        requests that made progress. EngineDead after `engine.max_errors` consecutive failures."""
        if self.before_step is not None:
            self.before_step()
        events, self._aborted = self._aborted, []
        busy = [workload for workload in self._slices if workload.is_busy]
        if self.generation.is_busy or not busy:
            events += self.generation.step()
        for workload in busy:
            events += workload.step()
        if busy:
            self.generation.exclude_time()
        return events

    @property
    def idle_delay(self) -> float | None:
        """Seconds for which the engine is idle before `work_idle` does something; None: nothing is left."""
        if self._preparation is not None:
            return 0.0
        return None if self.recheck is None else self.recheck.delay

    def work_idle(self, is_wanted: Callable[[], bool]) -> None:
        """Do what is left to do while the engine is idle: prepare, and then `check_again`. `is_wanted`:
        whether there is something else to do."""
        if self._preparation is None:
            self.check_again(is_wanted)
        else:
            self.prepare(is_wanted)

    def prepare(self, is_wanted: Callable[[], bool] = lambda: False) -> None:
        """Prepare for requests what they would wait for, until something else `is_wanted`."""
        try:
            for _ in self._preparation or ():
                if is_wanted():
                    return
        except Exception as error:  # whatever the library raises, requests need none of this
            log.warning("attention is not prepared for prompts: %s", error)
        self._preparation = None

    def check_again(self, is_wanted: Callable[[], bool]) -> None:
        """Compare an idle model again whose verdict was kept. `is_wanted`: whether there is something else to
        do; then nothing is compared, and `recheck.delay` says when to try again."""
        found = None if self.recheck is None else self.recheck.run(is_wanted)
        if found is not None and self.load_check is not None:
            names = ("compared", "seconds", "kept", "surprise")
            self.load_check = replace(self.load_check, **{name: getattr(found, name) for name in names})
            self.recheck = None

    def close(self) -> None:
        """Release all arrays, on the thread that made them."""
        with self.held, ExitStack() as stack:
            for workload in reversed(self._workloads):
                stack.callback(workload.close)
            self.prefix_cache.shutdown()
            self._preparation = None


def join_media_spans(request: Request, *, whole_prompt: bool = False) -> Request:
    """The request with one span, from its first token to the end of its last image, or of the whole prompt.
    No chunk and no cache entry ends inside it. RequestError if the request wants prompt logprobs, which a
    span does not have."""
    if request.params.prompt_logprobs is not None:
        prompts = "prompts" if whole_prompt else "prompts with images"
        raise RequestError(f"prompt_logprobs are not supported for {prompts} of this model")
    spans, digests = request.image_spans, request.image_digests
    if whole_prompt or not spans:  # or where its images are is not known
        return replace(request, image_spans=((0, len(request.prompt)),), image_digests=())
    stop = spans[-1][1]
    content = np.array(request.prompt[:stop], np.int64).tobytes()
    digest = compute_digest(*digests, content)
    known = len(digests) == len(spans)
    return replace(request, image_spans=((0, stop),), image_digests=(digest,) if known else ())


def join_digests(request: Request) -> Request:
    """The request with digests that each cover all its images. Images that are encoded together round
    differently from single ones, so a cached image is exact only beside the same images."""
    every = request.image_digests
    return replace(request, image_digests=tuple(compute_digest(own, *every) for own in every))
