"""A scripted runner in place of ModelRunner, without mlx, and an engine over it.

A request's tokens depend on its prompt and the position only, and come one step late, as those of the real
runner do. Each plan is checked against the rules that a runner relies on; violations are listed in `broken`.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxrun.config.settings import EngineSettings, SchedulerSettings
from mlxrun.core.memory_budget import MemoryBudget, RequestLimits
from mlxrun.core.request import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprob
from mlxrun.core.step_plan import Admission, PrefillChunk, PromptLogprobs, SampledToken, StepPlan, StepResult
from mlxrun.engine.engine import Engine
from mlxrun.engine.scheduler.scheduler import Scheduler
from mlxrun.engine.workloads.pooling import PoolingSteps
from mlxrun.model.load.model_info import LoadedModelInfo

VOCAB = 50
CONTEXT = 1000


def compute_token(prompt: Sequence[int], position: int) -> int:
    """The token at `position` of prompt + answer."""
    return zlib.crc32(repr((tuple(prompt), position)).encode()) % VOCAB


def compute_answer(request: Request, limit: int = CONTEXT) -> tuple[tuple[int, ...], FinishReason]:
    """The answer that the request must get. `limit`: maximum of prompt and answer tokens."""
    tokens: list[int] = []
    start = len(request.prompt)
    for position in range(start, min(start + request.params.max_tokens, limit)):
        token = compute_token(request.prompt, position)
        if token in request.params.stop_ids:
            return tuple(tokens), FinishReason.STOP
        tokens.append(token)
    return tuple(tokens), FinishReason.LENGTH


def compute_score(prompt: Sequence[int], position: int, count: int = 0) -> TokenLogprob:
    """The logprob of a prompt's token, with `count` likeliest ones."""
    number = zlib.crc32(repr(tuple(prompt[: position + 1])).encode()) % 1000
    return TokenLogprob(-number / 100, tuple((i, -float(position + i)) for i in range(count)))


def make_request(rid: str = "a", size: int = 10, max_tokens: int = 4, **fields: Any) -> Request:
    """A request whose prompt differs from that of any other id or size."""
    stop_ids = frozenset(fields.pop("stop_ids", ()))
    wanted = {key: fields.pop(key, None) for key in ("logprobs", "prompt_logprobs")}
    params = SamplingParams(max_tokens=max_tokens, stop_ids=stop_ids, **wanted)
    base = zlib.crc32(rid.encode()) % 10_000
    return Request(rid, tuple(base + i for i in range(size)), params, **fields)


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """Lets an engine thread run as many steps as the test allows; for `FakeRunner.before`."""

    def __init__(self, steps: int = 0) -> None:
        self._steps = threading.Semaphore(steps)
        self._open = False
        self.waiting = 0  # steps that have come to the gate

    def __call__(self, plan: StepPlan) -> None:
        self.waiting += 1
        if not self._open and not self._steps.acquire(timeout=60):
            raise AssertionError("the test did not open the gate")

    def let_pass(self, steps: int) -> None:
        for _ in range(steps):
            self._steps.release()

    def open(self) -> None:
        self._open = True
        self._steps.release()


@dataclass(slots=True)
class FakeRow:
    """The runner's record of a request."""

    request: Request
    length: int  # tokens of prompt and answer that are known or drawn
    filled: int = 0  # tokens in the cache
    packed: bool = False  # quantized by an earlier step


@dataclass
class FakeRunner:
    """Samples `compute_token`. A test may script the fields before `plans`, also during a run."""

    fail_steps: Sequence[int] = ()  # these calls of `execute` raise (the first is 1)
    poison: Mapping[str, int] = field(default_factory=dict)  # id: raise when this position is computed
    refuse: Mapping[str, Exception] = field(default_factory=dict)  # id: fails alone when it is admitted
    dead: bool = False  # every step that computes something raises
    late: bool = False  # `poison` and `dead` show when tokens are read, as a device's errors do
    sleep: float = 0.0  # seconds a step
    before: Callable[[StepPlan], None] | None = None  # called on the engine thread before each step
    memory: MemoryBudget | None = None  # what the allocator has
    image_parts: dict[str, int] = field(default_factory=dict)  # id: steps that its images take

    plans: list[StepPlan] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)  # rules of a plan that were not kept
    admissions: list[str] = field(default_factory=list)
    resets: int = 0
    trials: int = 0
    closed: bool = False
    rows: dict[str, FakeRow] = field(default_factory=dict)
    peak: int = 0  # bytes in use at most
    _launched: list[tuple[str, int]] = field(default_factory=list)  # (id, position) under way
    _scored: list[PromptLogprobs] = field(default_factory=list)  # under way
    trouble: str | None = None

    has_pending_snapshots = False
    awaits_first_tokens = False
    awaits_drafts = False

    def collect(self) -> StepResult:
        raise AssertionError("nothing is waited for")

    def execute(self, plan: StepPlan) -> StepResult:
        self.threads.add(threading.get_ident())
        self.plans.append(plan)
        if self.before is not None:
            self.before(plan)
        if self.sleep:
            time.sleep(self.sleep)
        if self.closed:
            self._break("execute after close")
        left = {rid: row for rid in plan.free if (row := self.rows.pop(rid, None)) is not None}
        new = len(self.admissions)
        errors = {a.request.id: e for a in plan.admit if (e := self._admit(a)) is not None}
        self._raise(plan)
        ready = {rid: self._encode(rid) for rid in plan.encode}
        launched = [(rid, self._decode(rid)) for rid in plan.decode]
        scored = []
        for chunk in plan.prefill:
            if chunk.request_id not in errors:
                scored += self._score(chunk)
                launched += [(chunk.request_id, chunk.stop)] if self._prefill(chunk) else []
        self._allocate(plan)
        before, self._launched = self._launched, launched
        known = {rid: row for rid, row in (self.rows | left).items() if rid not in self.admissions[new:]}
        tokens = {rid: (self._sample(known[rid].request, at),) for rid, at in before if rid in known}
        scores, self._scored = self._scored, scored
        admitted = self.admissions[new:]
        return StepResult(
            tokens,
            errors,
            prompt_logprobs=tuple(s for s in scores if s.request_id not in admitted),
            ready=ready,
        )

    def reset(self) -> None:
        self.threads.add(threading.get_ident())
        self.resets += 1
        self.rows, self._launched, self._scored, self.trouble = {}, [], [], None

    def compute_trial(self) -> None:
        self.trials += 1
        if self.dead:
            raise RuntimeError("the device is gone")

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed = True

    # -- what a plan may ask ----------------------------------------------------------------------------

    def _break(self, rule: str) -> None:
        self.broken.append(f"step {len(self.plans)}: {rule}")

    def _admit(self, admission: Admission) -> Exception | None:
        request, output = admission.request, admission.output
        self.admissions.append(request.id)
        if request.id in self.rows:
            self._break(f"{request.id} is admitted twice")
        if output != compute_answer(request)[0][: len(output)]:
            self._break(f"{request.id} is admitted with an answer that it did not get: {output}")
        if request.id in self.refuse:
            return self.refuse[request.id]
        self.rows[request.id] = FakeRow(request, len(request.prompt) + len(output))
        return None

    def _encode(self, rid: str) -> int | None:
        """A part of a request's images; they are ready with the last one."""
        self.image_parts[rid] = left = self.image_parts[rid] - 1
        if left < 0 or rid not in self.rows:
            self._break(f"{rid} has no images left, or no row")
        return 0 if left else None

    def _decode(self, rid: str) -> int:
        row = self.rows.get(rid)
        if row is None:
            self._break(f"{rid} decodes without a row")
            return 0
        if row.filled + 1 < row.length:
            self._break(f"{rid} decodes with {row.filled} of {row.length} tokens in its cache")
        row.filled += 1
        row.length = max(row.length, row.filled) + 1
        return row.filled

    def _score(self, chunk: PrefillChunk) -> list[PromptLogprobs]:
        row = self.rows.get(chunk.request_id)
        count = None if row is None else row.request.params.prompt_logprobs
        if row is None or count is None:
            return []
        prompt = row.request.prompt
        positions = range(chunk.start + 1, min(chunk.stop + 1, len(prompt)))
        found = tuple(compute_score(prompt, at, max(count, 1)) for at in positions)
        return [PromptLogprobs(chunk.request_id, chunk.start + 1, found)]

    def _prefill(self, chunk: PrefillChunk) -> bool:
        """Whether the chunk samples."""
        row = self.rows.get(chunk.request_id)
        if row is None:
            self._break(f"{chunk} without a row")
            return False
        if not chunk.start == row.filled < chunk.stop <= row.length:
            self._break(f"{chunk} with {row.filled} of {row.length} tokens in the cache")
        if self.image_parts.get(chunk.request_id):
            self._break(f"{chunk} is computed before its images")
        if any(start < chunk.stop < end for start, end in row.request.image_spans):
            self._break(f"{chunk} ends inside an image: {row.request.image_spans}")
        row.filled = chunk.stop
        samples = chunk.stop == row.length and row.request.params.max_tokens > 0
        row.length += int(samples)
        return samples

    # -- what it does -----------------------------------------------------------------------------------

    def _raise(self, plan: StepPlan) -> None:
        if self.trouble is not None:
            raise RuntimeError(self.trouble)
        if len(self.plans) in self.fail_steps:
            raise RuntimeError(f"step {len(self.plans)} fails as scripted")
        trouble = (
            "the device is gone" if self.dead and (plan.decode or plan.prefill) else self._poisoned(plan)
        )
        if trouble is not None and self.late:
            self.trouble = trouble
        elif trouble is not None:
            raise RuntimeError(trouble)

    def _poisoned(self, plan: StepPlan) -> str | None:
        decoded = [(rid, row.filled + 1) for rid in plan.decode if (row := self.rows.get(rid))]
        filled = [(c.request_id, c.stop) for c in plan.prefill if c.request_id in self.rows]
        for rid, position in decoded + filled:
            if position >= self.poison.get(rid, position + 1):
                return f"{rid} cannot be computed"
        return None

    def _allocate(self, plan: StepPlan) -> None:
        if self.memory is None:
            return
        prompt = sum(c.stop - c.start for c in plan.prefill)
        whole = [row.filled for row in self.rows.values() if not row.packed]
        used = self.memory.compute_needed_bytes(whole, prompt)
        packed = sum(row.filled for row in self.rows.values() if row.packed)
        used += packed * (self.memory.footprint.packed_per_token or 0)
        for rid in plan.decode:
            self.rows[rid].packed = self.memory.footprint.packed_per_token is not None and (
                self.rows[rid].filled > self.memory.footprint.packed_from
            )
        self.peak = max(self.peak, used)
        if used > self.memory.limit:
            self._break(f"{used} bytes are needed of {self.memory.limit}")

    def _sample(self, request: Request, position: int) -> SampledToken:
        token = compute_token(request.prompt, position)
        received = request.params.logprobs is not None
        return SampledToken(token, TokenLogprob(-float(position)) if received else None)


def make_model_info(context_length: int = CONTEXT) -> LoadedModelInfo:
    return LoadedModelInfo(
        folder=Path("fake"),
        config={},
        tokenizer=None,
        chat_template=None,
        eos_ids=frozenset(),
        context_length=context_length,
        vision=False,
        defaults={},
        name="fake",
        names=(),
        digests={},
    )


def make_settings(**fields: Any) -> SchedulerSettings:
    """Settings easy to count with: chunks of 4, 12 prompt tokens per step, 8 beside decoding rows."""
    defaults = {
        "chunk": 4,
        "prefill_budget": 12,
        "prefill_budget_busy": 8,
        "max_running": 4,
        "max_queue": 100,
    }
    return SchedulerSettings(**{**defaults, **fields})


def make_engine(
    runner: FakeRunner | None = None,
    settings: SchedulerSettings | None = None,
    *,
    memory: MemoryBudget | None = None,
    clock: Callable[[], float] | None = None,
    max_errors: int = 3,
    context: int = CONTEXT,
    whole: bool = False,
    make_pooling: Callable[[Scheduler], PoolingSteps] | None = None,
    preparation: Iterator[None] | None = None,
) -> Engine:
    """An Engine over a FakeRunner, by default an unscripted one. `make_pooling`: makes what computes vectors
    beside it."""
    limits = RequestLimits(context, memory or MemoryBudget())
    scheduler = Scheduler(settings or make_settings(), limits, aligned_chunks=whole, clock=clock or Clock())
    model_info = make_model_info(context)
    pooling = None if make_pooling is None else make_pooling(scheduler)
    own, settings_of_engine = runner or FakeRunner(), EngineSettings(max_errors=max_errors)
    return Engine(model_info, scheduler, own, settings_of_engine, pooling=pooling, preparation=preparation)


def merge_events(first: TokenEvent, later: TokenEvent) -> TokenEvent:
    """Two events of a request as one. Copies all tokens."""
    tokens, logprobs = first.tokens + later.tokens, first.logprobs + later.logprobs
    scores = first.prompt_logprobs + later.prompt_logprobs
    return first.merge_progress(later)._replace(tokens=tokens, logprobs=logprobs, prompt_logprobs=scores)


class Answers:
    """All events so far, by request. Checks that each request ends once and that no event follows."""

    def __init__(self) -> None:
        self.events: dict[str, list[TokenEvent]] = {}

    def record(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            before = self.events.setdefault(event.request_id, [])
            assert not (before and before[-1].finish), f"after the end of {event.request_id}: {event}"
            assert (event.error is not None) == (event.finish is FinishReason.ERROR)
            before.append(event)

    def tokens(self, rid: str) -> tuple[int, ...]:
        return tuple(t for event in self.events.get(rid, ()) for t in event.tokens)

    def finish(self, rid: str) -> FinishReason | None:
        events = self.events.get(rid)
        return events[-1].finish if events else None

    def error(self, rid: str) -> Exception | None:
        return self.events[rid][-1].error

    def get_answer(self, rid: str) -> tuple[tuple[int, ...], FinishReason | None]:
        return self.tokens(rid), self.finish(rid)


def finish_all(engine: Engine, answers: Answers | None = None, steps: int = 5000) -> Answers:
    """Step until the engine is idle."""
    answers = answers or Answers()
    for _ in range(steps):
        if not engine.busy:
            return answers
        answers.record(engine.step())
    raise AssertionError(f"not idle after {steps} steps: {[e.id for e in engine.scheduler.requests]}")


def serve_requests(*requests: Request, **options: Any) -> tuple[FakeRunner, Answers]:
    """Answer these requests, all sent before the first step."""
    runner = FakeRunner(memory=options.get("memory"))
    engine = make_engine(runner, **options)
    for request in requests:
        engine.add(request)
    answers = finish_all(engine)
    assert runner.broken == []
    assert runner.rows == {}
    return runner, answers


def list_ended(answers: Answers, engine: Engine, steps: int) -> list[str]:
    """Run steps. Returns the ids of requests in the order in which they ended."""
    order: list[str] = []
    for _ in range(steps):
        events = engine.step()
        answers.record(events)
        order += [e.request_id for e in events if e.finish]
    return order


def list_chunks(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(c.request_id, c.start, c.stop) for c in plan.prefill]
